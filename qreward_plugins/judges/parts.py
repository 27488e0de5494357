"""What judges of judges share: how the verdicts of parts become one, what each step or turn adds to a score, how a
failed part is told, and which names parts may have.

The components of a whole are the score of each part that was asked, by its name, and the components of the part below
it: `reward/quality/proof`. A part that was not asked has none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import anyio
from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from ..errors import ConfigurationError, Mistake
from ..samples import Cause, Failed, Sample, Verdict
from .base import Ask, Judge, JudgeFailed

Reduction: TypeAlias = Literal["last", "min", "mean", "sum", "prod"]
"""How the scores of steps or turns become one."""


def check_names(parts: Iterable[Any], title: str) -> None:
    """Raise `ValidationError` for the name of a part that begins with that of another one and a slash, because it would
    look like a component of it.
    """
    names = [part for part in parts if isinstance(part, str)]
    mistakes: list[InitErrorDetails] = []
    for name in names:
        whole = next((other for other in names if name.startswith(f"{other}/")), None)
        if whole is not None:
            problem = f"the name looks like a component of `{whole}`, another part of this judge; rename this judge"
            error = PydanticCustomError("like_component", "{problem}", {"problem": problem})
            mistakes.append({"type": error, "loc": (name,), "input": name})
    if mistakes:
        raise ValidationError.from_exception_data(title, mistakes)


def check_own_names(judge: str, parts: Collection[str], own: Sequence[str]) -> None:
    """Raise `ConfigurationError` for a part that has the name of one of the judge's own components."""
    taken = [name for name in own if name in parts]
    if taken:
        problem = f"a part of it is named {taken[0]!r}, as a component of this kind is."
        raise ConfigurationError([Mistake(f"judges.{judge}", problem, "Rename the part.")])


def component_names(parts: Iterable[Judge], own: Sequence[str] = ()) -> tuple[str, ...]:
    """The names of the components of a whole, as far as they are known in advance."""
    return tuple(
        dict.fromkeys(
            [
                *own,
                *(
                    name
                    for part in parts
                    for name in (part.name, *(_below(part.name, component) for component in part.component_names()))
                ),
            ]
        )
    )


def range_of(ranges: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The range of rewards that come from one of several ranges; None if one of them is unknown."""
    every = list(ranges)
    known = [each for each in every if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(every) else None


def bar_mistakes(place: str, part: Judge, bar: float | None, does: str, *, below: bool = False) -> list[Mistake]:
    """Find a bar that the rewards of a part always or never reach. `place` is its key, and `does` what the part does
    with rewards from the bar on, or with those up to it (`below`).
    """
    if bar is None or part.reward_range is None:
        return []
    low, high = part.reward_range
    never, always = (bar < low, bar >= high) if below else (bar > high, bar <= low)
    problem = f"it {'never' if never else 'always'} {does}: the rewards of {part.name} are from {low:g} to {high:g}."
    return [Mistake(place, problem, "Set a number in between.")] if never or always else []


def correct_at_mistakes(whole: Judge, *bars: float | None) -> list[Mistake]:
    """Find a `correct_at` outside of the range of a judge's rewards, if that is known."""
    low, high = whole.reward_range or (-math.inf, math.inf)
    # The ends of a sum are rounded.
    slack = 1e-9 * max(abs(low), abs(high)) if whole.reward_range is not None else 0.0
    outside = [bar for bar in bars if bar is not None and not low - slack <= bar <= high + slack]
    problem = "{:g} is outside of the range of its rewards, {:g} to {:g}."
    remedy = "It is compared with the reward of this judge."
    return [Mistake(f"judges.{whole.name}.correct_at", problem.format(bar, low, high), remedy) for bar in outside]


def mask_mistakes(place: str, whole: str, part: Judge) -> list[Mistake]:
    """Find a part that takes samples out of the training, where the whole goes on without a part that fails."""
    problem = f"judge {part.name} takes samples out, but {whole} goes on without it, so they would be trained."
    return [Mistake(place, problem, f"Put the screen around {whole}.")] if part.masks else []


def refuse(*found: Iterable[Mistake]) -> None:
    """Raise `ConfigurationError` with all mistakes, if there are any."""
    if mistakes := [mistake for each in found for mistake in each]:
        raise ConfigurationError(mistakes)


async def asked(whole: str, part: Judge, sample: Sample, ask: Ask) -> Verdict:
    """Return the verdict of a part. Raises `JudgeFailed` in the name of the whole."""
    try:
        return await part.judge(sample, ask)
    except JudgeFailed as error:
        raise part_failed(whole, part.name, error.failed) from None


async def in_time(part: Judge, sample: Sample, ask: Ask, within_s: float | None) -> Verdict:
    """Return the verdict of a part that the whole can do without. Raises `JudgeFailed` (`infra/deadline`) after
    `within_s` seconds; None: the deadline of the sample is the only limit.
    """
    with anyio.move_on_after(math.inf if within_s is None else within_s):
        return await part.judge(sample, ask)
    detail = f"no reward within {within_s:g} s (within_s)"
    raise JudgeFailed(Failed(Cause.INFRA, "deadline", detail, judge=part.name))


def part_failed(whole: str, part: str, failed: Failed) -> JudgeFailed:
    """The failure of a whole because of a part, whose name begins the detail."""
    return JudgeFailed(replace(failed, detail=f"{part}: {failed.detail or failed.reason}", judge=whole))


def combined(
    whole: str,
    verdicts: Mapping[str, Verdict],
    score: float,
    *,
    correct: bool | None = None,
    own: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Verdict:
    """Return the verdict of a whole with this score, from those of the parts that were asked, by name.

    `own` are its own components. `weights` are the factors of the parts that the score adds up; that of a part which
    decides alone is 1. If the reward of such a part is a floor, the basis of the whole is a floor, too, and what the
    steps of a response add to them, they add to the whole. None: the score comes from all parts in another way.
    """
    components: dict[str, float] = dict(own or {})
    for name, verdict in verdicts.items():
        components[name] = verdict.score
        components |= {_below(name, component): value for component, value in verdict.components.items()}
    rationales = {name: verdict.rationale for name, verdict in verdicts.items() if verdict.rationale}
    deciding = [name for name in verdicts if weights is None or name in weights]
    failure = _failure({name: failed for name in deciding if (failed := verdicts[name].failure)}, whole)
    return Verdict(
        score,
        components=components,
        rationale="\n".join(f"{name}: {rationale}" for name, rationale in rationales.items()),
        correct=correct,
        judge=whole,
        source=_beside(verdict.source for verdict in verdicts.values()),
        model=_beside(verdict.model for verdict in verdicts.values()),
        weight_version=_beside(verdict.weight_version for verdict in verdicts.values()),
        basis="judged" if failure is None else "floor",
        failure=failure,
        cached=all(verdict.cached for verdict in verdicts.values()),
        cut=any(verdict.cut for verdict in verdicts.values()),
        returned=_only_one(verdict.returned for verdict in verdicts.values()),
        dense=tuple(
            sorted(
                (end, weight * added) for name, weight in (weights or {}).items() for end, added in verdicts[name].dense
            )
        ),
    )


def split(scores: Sequence[float], reduction: Reduction, discount: float = 1.0) -> tuple[float, Sequence[float]]:
    """Return the score of a response from those of its steps, and what each step adds to it: nothing is told for
    `prod`, which is no sum.

    With `mean` and `sum`, the n-th step counts `discount` to the power of n, from 0. `last`: each step adds by how much
    it is better than the one before (potential-based shaping; Ng, Harada and Russell, ICML 1999). `min`: the worst step
    adds all (min-form credit assignment; PURE, arXiv 2504.15275).
    """
    if reduction == "prod":
        return math.prod(scores), ()
    if reduction == "last":
        return scores[-1], [scores[0], *(after - before for before, after in pairwise(scores))]
    if reduction == "min":
        worst = scores.index(min(scores))
        return scores[worst], [score if place == worst else 0.0 for place, score in enumerate(scores)]
    weights = [discount**place for place in range(len(scores))]
    total = math.fsum(weights) if reduction == "mean" else 1.0
    parts = [score * weight / total for score, weight in zip(scores, weights, strict=True)]
    return math.fsum(parts), parts


def _failure(failures: Mapping[str, Failed], judge: str) -> Failed | None:
    """Merge the failures of the parts that have floors; the cause is that of the first."""
    if not failures:
        return None
    first = next(iter(failures.values()))
    detail = "; ".join(f"{name}: {failed.detail or failed.reason}" for name, failed in failures.items())
    return replace(first, detail=detail, judge=judge)


def _below(part: str, component: str) -> str:
    return f"{part}/{component}"


def _beside(names: Iterable[str]) -> str:
    # Sorted, so that metrics do not count "a+b" and "b+a" as two names.
    return "+".join(sorted({name for several in names for name in several.split("+") if name}))


def _only_one(mappings: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the mapping of the function among the parts, without its score; None unless exactly one part has one."""
    found = [mapping for mapping in mappings if mapping is not None]
    return {key: value for key, value in found[0].items() if key != "score"} if len(found) == 1 else None
