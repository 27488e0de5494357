"""Compares the answer in a response with the ground truth."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from ..judges.extraction import Extract, extracted
from ..judges.verdicts import after_thoughts

_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d{1,4})?(?:\s*/\s*\d[\d,]*)?")
_MOST_CHARS = 400
_POWER = re.compile(r"(?:\^|\*\*)\{*")
_TOWER = re.compile(r"\d+(?:\^\d+){2,}")


def exact(
    solution_str: str,
    ground_truth: Any,
    *,
    extract: Extract = "all",
    ignore_case: bool = False,
    ignore_space: bool = True,
    **_: Any,
) -> float:
    """1 if the answer is the ground truth, or one of several, apart from outer white space; else 0. `ignore_space`
    folds inner white space, too.
    """

    def folded(text: str) -> str:
        text = " ".join(text.split()) if ignore_space else text.strip()
        return text.casefold() if ignore_case else text

    truths, answer = {folded(each) for each in _truths(ground_truth)}, folded(extracted(solution_str, extract))
    return float(bool(answer) and answer in truths)


def choice(
    solution_str: str, ground_truth: Any, *, extract: Extract = "tag", choices: Sequence[str] = "ABCD", **_: Any
) -> float:
    """1 if the answer is the choice of the ground truth; else 0. Brackets, stars and full stops around it do not count:
    `(B)` and `**B.**` are `B`. An answer that is more than a choice is none.
    """
    truths = {each.strip(" ().*").casefold() for each in _truths(ground_truth)}
    unknown = sorted(truths - {each.casefold() for each in choices})
    if unknown:
        raise ValueError(f"the ground truth {unknown[0]!r} is none of the choices {', '.join(choices)}")
    answer = extracted(solution_str, extract).strip(" ().*:$").casefold()
    return float(answer in truths)


def number(
    solution_str: str,
    ground_truth: Any,
    *,
    extract: Extract = "boxed",
    tolerance: float = 0.0,
    relative: float = 1e-9,
    **_: Any,
) -> float:
    """1 if the answer is a number as near to the ground truth as `tolerance` or `relative` (a share of the ground
    truth) allow; else 0. Commas of thousands, a currency sign, a percent sign and fractions such as 3/4 are read; an
    answer with two numbers is none.
    """
    truths = [_as_number(each) for each in _truths(ground_truth)]
    if None in truths:
        raise ValueError(f"the ground truth {str(ground_truth)[:80]!r} is no number")
    found = _as_number(extracted(solution_str, extract))
    if found is None:
        return 0.0
    near = (
        abs(found - truth) <= max(Fraction(tolerance), Fraction(relative) * abs(truth))
        for truth in truths
        if truth is not None
    )
    return float(any(near))


def regex(
    solution_str: str,
    ground_truth: Any = None,
    *,
    pattern: str,
    extract: Extract = "all",
    whole: bool = False,
    **_: Any,
) -> float:
    """1 if `pattern` matches in the answer, or with `whole` all of it; else 0. `{ground_truth}` in the pattern stands
    for the ground truth, as it is written, or for any one of several.
    """
    if "{ground_truth}" in pattern:
        truths = "|".join(map(re.escape, _truths(ground_truth)))
        pattern = pattern.replace("{ground_truth}", f"(?:{truths})")
    match = re.fullmatch if whole else re.search
    return float(match(pattern, extracted(solution_str, extract)) is not None)


def mathematics(solution_str: str, ground_truth: Any, **_: Any) -> float:
    """1 if the last answer of the response equals the ground truth, or one of several, as math-verify sees it;
    else 0.

    Sympy may compute for ever, and math-verify's own time limit needs signals of the main thread. So it has none here:
    the worker process is killed after `timeouts.total_s` of the source, the samples behind it wait, and the sample
    fails instead of getting a 0. Therefore a box with nothing but a tower of powers that no computer writes out
    (9^9^9^9) gets a 0 at once, unless a ground truth is a power, too.
    """
    from math_verify import parse, verify  # type: ignore[import-untyped]

    # It warns at each call that it has no time limit.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truths, response = _truths(ground_truth), after_thoughts(solution_str)
    if _is_huge_tower(extracted(response, "boxed")) and not any(map(_POWER.search, truths)):
        return 0.0
    golds = []
    for truth in truths:
        golds.append(parse(truth if "$" in truth or "\\boxed" in truth else f"${truth}$", parsing_timeout=None))
        if not golds[-1]:
            raise ValueError(f"math-verify cannot read the ground truth {truth[:80]!r}")
    read = parse(response, parsing_timeout=None)
    return float(any(verify(gold, read, timeout_seconds=None) for gold in golds))


def _is_huge_tower(text: str) -> bool:
    """Whether a text is a tower of powers of whole numbers, and nothing else, with more than 100,000 digits."""
    tower = _POWER.sub("^", "".join(text.split())).replace("}", "")
    if len(tower) > _MOST_CHARS or not _TOWER.fullmatch(tower):
        return False
    *bases, top = map(int, tower.split("^"))
    for base in reversed(bases):
        if base > 1 and min(top, 10**6) * math.log10(base) > 100_000:
            return True
        top = base**top
    return False


def _truths(ground_truth: Any) -> list[str]:
    """The ground truths, as texts. Raises ValueError without one."""
    several = ground_truth if isinstance(ground_truth, (list, tuple)) else [ground_truth]
    texts = [
        each if isinstance(each, str) else "" if each is None else json.dumps(each, default=str) for each in several
    ]
    if not texts or not all(text.strip() for text in texts):
        raise ValueError("the sample has no ground truth, which this check compares with")
    return texts


def _as_number(text: str) -> Fraction | None:
    """The one number in a text; None if there is none, or more than one. Exact, so that 0.1 + 0.2 is 0.3."""
    text = (
        text.replace("\\$", "").replace("$", "").replace("\\%", "%").replace("\\!", "").replace("\u2212", "-").strip()
    )
    text = re.sub(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    found = _NUMBER.findall(text) if len(text) <= _MOST_CHARS else []
    if len(found) != 1:
        return None
    value, _, below = found[0].replace(",", "").replace(" ", "").partition("/")
    try:
        read = Fraction(value) / (Fraction(below) if below else 1)
    except (ValueError, ZeroDivisionError):
        return None
    return read / 100 if text.endswith("%") else read
