"""The one place where a judge's words become a number.

This is the trust boundary of the package: the reply may quote the response, the response may hold forged verdicts, and
a model that follows the response may write anything. So a verdict is one JSON object that carries the identifier drawn
for this call, the identifier is claimed exactly once in the whole reply, and nothing is repaired, clipped or guessed:
every doubt is an `InvalidVerdict`, which costs another try and never trains anything.

The work is bounded by the length of the reply, whatever it holds: no nesting deeper than `MAX_NESTING`, no number
converted that is longer than 64 digits, and a budget of characters that all attempts at parsing share.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import InvalidVerdict
from ..sources.strict_json import MAX_NESTING, strict_decoder, too_deep
from .material import readable

MAX_RATIONALE_CHARS = 2_000
MAX_EXCERPT_CHARS = 120

_MAX_CANDIDATES = 256
_CANDIDATE = re.compile(r'\{\s*"')
_ID = re.compile(r'"id"\s*:\s*')
_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Words:
    """What a judge said, in its own range: the total, the criteria, and why."""

    score: float
    components: Mapping[str, float]
    rationale: str


class Scale:
    """The linear map from the range in which a judge scores to the reward range, exact at both ends and inside them.

    It is computed in rational numbers and rounded once: a score of 7 in 0 to 10 is a reward of 0.7, and no pair of
    ranges can overflow or leave the reward range by a rounding error.
    """

    def __init__(self, score_range: tuple[float, float], reward_range: tuple[float, float]) -> None:
        self._low = Fraction(score_range[0])
        self._floor = Fraction(reward_range[0])
        self._slope = (Fraction(reward_range[1]) - self._floor) / (Fraction(score_range[1]) - self._low)

    def reward(self, score: float) -> float:
        return float(self._floor + (Fraction(score) - self._low) * self._slope)


def excerpt(text: str) -> str:
    """At most `MAX_EXCERPT_CHARS` characters of `text`, quoted and escaped, for messages."""
    quoted = repr(text[:MAX_EXCERPT_CHARS])
    if len(text) <= MAX_EXCERPT_CHARS and len(quoted) <= MAX_EXCERPT_CHARS:
        return quoted
    return quoted[: MAX_EXCERPT_CHARS - 4] + quoted[0] + "..."


def read_words(
    text: str,
    *,
    nonce: str,
    score_range: tuple[float, float],
    criteria: Sequence[str] = (),
    max_chars: int = 65_536,
) -> Words:
    """Read the verdict out of `text`, the reply of a judge that was told to answer under `nonce`.

    Reasoning before `</think>` is not part of the answer. Prose and code fences around the object are ignored, so are
    keys that were not asked for, and objects that do not carry the nonce. Raises `InvalidVerdict` for everything else.
    """
    if not text.strip():
        raise InvalidVerdict("the reply is empty")
    if len(text) > max_chars:
        raise InvalidVerdict(f"the reply has {len(text):,} characters, {max_chars:,} are read: {excerpt(text)}")
    answer = _without_reasoning(text.strip().lstrip("\ufeff"), nonce)
    claims = _claims(answer, nonce)
    if len(claims) != 1:
        count = "no verdict" if not claims else f"{len(claims)} verdicts"
        raise InvalidVerdict(f"the reply holds {count} under this call's id, not exactly one: {excerpt(answer)}")
    verdict = _object_with(answer, nonce, claims[0])
    return Words(
        score=_number("score", verdict, score_range, answer),
        components=_components(verdict, criteria, score_range, answer),
        rationale=_rationale(verdict),
    )


def _claims(text: str, nonce: str) -> list[int]:
    """Where in `text` the identifier is claimed. (A pattern that holds the nonce would be compiled for every reply.)"""
    claim = f'"{nonce}"'
    return [match.start() for match in _ID.finditer(text) if text.startswith(claim, match.end())]


def _without_reasoning(text: str, nonce: str) -> str:
    if text.startswith(_THINK):
        _, closed, answer = text.partition(_END_THINK)
        if not closed:
            raise InvalidVerdict(f"the reply ends inside its reasoning: {excerpt(text)}")
        return answer
    # Chat templates that open the reasoning themselves leave only its end in the reply. A verdict whose rationale
    # mentions the tag has its id before the tag, and stays whole.
    if text.count(_END_THINK) == 1 and _THINK not in text:
        answer = text.partition(_END_THINK)[2]
        if _claims(answer, nonce):
            return answer
    return text


def _object_with(text: str, nonce: str, claim: int) -> Mapping[str, Any]:
    """Find the outermost JSON object around the position `claim`, and see to it that it makes the claim itself."""
    if too_deep(text):
        raise InvalidVerdict(f"the reply is nested more than {MAX_NESTING} deep: {excerpt(text)}")
    flaws: list[str] = []
    decoder = strict_decoder(flaws)
    budget = 8 * len(text)
    position = 0
    for _ in range(_MAX_CANDIDATES):
        candidate = _CANDIDATE.search(text, position)
        if candidate is None or candidate.start() > claim:
            raise InvalidVerdict(f"the verdict is not a JSON object: {excerpt(text[max(0, claim - 1) :])}")
        start = candidate.start()
        flaws.clear()
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            budget -= error.pos - start
            position = start + 1
        except (RecursionError, ValueError) as error:
            raise InvalidVerdict(f"the reply cannot be read ({type(error).__name__}): {excerpt(text)}") from None
        else:
            budget -= end - start
            position = end
            if end > claim:
                return _claimant(value, nonce, flaws, text[start:end])
        if budget < 0:
            break
    raise InvalidVerdict(f"the reply holds too many pieces that look like JSON: {excerpt(text)}")


def _claimant(value: Any, nonce: str, flaws: Sequence[str], source: str) -> Mapping[str, Any]:
    if flaws:
        raise InvalidVerdict(f"the verdict {flaws[0]}: {excerpt(source)}")
    if not isinstance(value, dict) or value.get("id") != nonce:
        raise InvalidVerdict(f"the verdict stands inside another object: {excerpt(source)}")
    return value


def _number(name: str, values: Mapping[str, Any], interval: tuple[float, float], source: str) -> float:
    if name not in values:
        raise InvalidVerdict(f"the verdict has no {name}: {excerpt(source)}")
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        kind = "null" if value is None else type(value).__name__
        raise InvalidVerdict(f"{name} must be a number, not {kind}: {excerpt(source)}")
    # Compared before it is converted: a float can round an integer into the range. NaN is in no range.
    if not interval[0] <= value <= interval[1]:
        raise InvalidVerdict(f"{name} is outside {interval[0]:g} to {interval[1]:g}: {excerpt(source)}")
    return float(value)


def _components(
    verdict: Mapping[str, Any], criteria: Sequence[str], interval: tuple[float, float], source: str
) -> dict[str, float]:
    if not criteria:
        return {}
    values = verdict.get("components")
    if not isinstance(values, dict):
        raise InvalidVerdict(f"the verdict has no components, {', '.join(criteria)} were asked for: {excerpt(source)}")
    return {name: _number(name, values, interval, source) for name in criteria}


def _rationale(verdict: Mapping[str, Any]) -> str:
    rationale = verdict.get("rationale")
    return readable(rationale)[:MAX_RATIONALE_CHARS] if isinstance(rationale, str) else ""
