"""Finds the answer in a response: what a check compares with the ground truth, and what a judge is shown if it is not
to see the way there.

A pattern of the user runs over a text of the policy, and Python's `re` may then take for ever. A check runs in a worker
process, which is killed. A judge runs in the event loop, so it passes `within_s`, which the package regex keeps.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, field_validator

from ..config.nodes import Node, mapping_or_other, takes
from .verdicts import after_thoughts

Extract = str | Mapping[str, str]

WAYS = ("all", "boxed", "last_line", "tag", "marked")

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|(?P<escaped>\\.)|[{}]", re.DOTALL)
_TAGS = re.compile(r"<(/?)answer>", re.IGNORECASE)


class AnswerPattern(Node):
    """A regular expression that finds the answer."""

    regex: Annotated[str, Field(min_length=1)]
    """The answer is the first group of its last match, or the whole match if it has no group. It needs the package
    regex, which ends a pattern that takes longer than 0.05 s; the sample then fails."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        if find_spec("regex") is None:
            raise ValueError('a pattern needs the package regex: pip install "qreward-plugins[math]"')
        import regex  # type: ignore[import-untyped]

        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ValueError(f"not a regular expression: {error}") from None
        return pattern


AnswerPlace = Annotated[
    Annotated[AnswerPattern, Tag("mapping")]
    | Annotated[Literal["all", "boxed", "last_line", "tag", "marked"], Tag("other")],
    Discriminator(mapping_or_other),
    takes(f"{', '.join(f'`{way}`' for way in WAYS)}, or a mapping with `regex`"),
]


def extracted(response: str, extract: Extract = "all", *, within_s: float | None = None) -> str:
    """Return the answer in a response, after the thoughts of the policy; "" if there is none.

    `extract`: `all` (the whole response), `boxed` (the content of the last `\\boxed{...}`), `last_line`, `tag` (of the
    last `<answer>...</answer>`), `marked` (the last line that begins with `####`, as in GSM8K), or `{regex: PATTERN}`:
    the first group of the last match, or the whole match. Raises ValueError for another word, and TimeoutError if the
    pattern takes more than `within_s` seconds; this needs the package regex. None: no limit.
    """
    text = after_thoughts(response)
    if isinstance(extract, Mapping):
        if set(extract) != {"regex"}:
            raise ValueError(f"extract has the keys {', '.join(map(str, extract))}; the one that it may have is regex")
        matches = _matches(extract["regex"], text, within_s)
        return (matches[-1][1 if matches[-1].re.groups else 0] or "").strip() if matches else ""
    if extract == "all":
        return text.strip()
    if extract == "boxed":
        return _last_box(text)
    if extract == "last_line":
        return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if extract == "tag":
        return _last_tag(text)
    if extract == "marked":
        lines = (line.strip() for line in reversed(text.splitlines()))
        return next((answer for line in lines if line[:4] == "####" and (answer := line[4:].strip())), "")
    raise ValueError(f"extract must be {', '.join(WAYS)} or a mapping with regex, not {extract!r}")


def stated(answer: str, extract: Extract | None) -> str:
    """Return a response in which `extracted` finds this answer; the answer itself for a pattern, and for None."""
    line = " ".join(answer.split())
    written = {"boxed": f"\\boxed{{{line}}}", "tag": f"<answer>{line}</answer>", "marked": f"#### {line}"}
    return written.get(extract, answer) if isinstance(extract, str) else answer


def _matches(pattern: str, text: str, within_s: float | None) -> list[Any]:
    if within_s is None:
        return list(re.finditer(pattern, text))
    import regex

    return list(regex.finditer(pattern, text, timeout=within_s))


# Each looks once at every character: a policy may write a hundred thousand boxes and close none.


def _last_box(text: str) -> str:
    """The content of the last box whose braces close."""
    begins: list[int] = []
    last, end = -1, 0
    for match in _BRACES.finditer(text):
        if match["escaped"]:
            continue
        if match[0] != "}":
            begins.append(match.end() if match["box"] else -1)
        elif begins and (begin := begins.pop()) > last:
            last, end = begin, match.start()
    return text[last:end].strip() if last >= 0 else ""


def _last_tag(text: str) -> str:
    begin, found = -1, ""
    for match in _TAGS.finditer(text):
        if match[1]:
            found, begin = (text[begin : match.start()] if begin >= 0 else found), -1
        elif begin < 0:
            begin = match.end()
    return found.strip()
