"""Defines the assumptions of a plan, with their defaults, and parses them from the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..config import Config, configured_name
from ..errors import InputError


class RequestTime(NamedTuple):
    """Seconds of an average request of n calls: `fixed_s + n * call_s`. A request carries several calls at a source
    with `batch`, otherwise one.
    """

    fixed_s: float
    call_s: float


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about the sources and the rollouts. Times are seconds; shares go from 0 to 1.

    Raises `InputError` for numbers out of range.
    """

    latency_s: Mapping[str, float | RequestTime] = field(default_factory=dict)
    """Seconds of an average request without waiting, by the name of the source; "*" for all others. A number is the
    time of a request of one call. Default: from the journal, or else the `usual_latency_s` of the kind (3 for a
    language model, 0.5 for a scoring service, 0.1 for a function); never from the journal for a source with `batch`,
    because it does not record how many calls a request carried."""
    fixed_share: float = 0.5
    """The part of the time of a request of one call that does not grow with the number of its calls. Used for sources
    with `batch` whose `latency_s` is a number."""
    spread: float | None = None
    """Sigma of the lognormal noise on latencies. Default: from the journal, or else 0.3."""
    length_share: float | None = None
    """The part of a latency that is proportional to the length of the rollout. Default: from the journal, or else 0.5.
    """
    straggler_share: float = 0.01
    """Share of the requests that take ten times as long. A journal does not show it: the scheduler replaces such an
    attempt by another one, and only the answered attempt is recorded."""
    error_share: float = 0.01
    """Share of the requests that fail and are tried again."""
    prompt_tokens: int = 200
    """Tokens of the question of a rollout. Not used if rollouts come from a file or a journal."""
    verdict_tokens: float | None = None
    """Tokens of a verdict with its rationale. Default: from the journal, or else 120."""

    def __post_init__(self) -> None:
        for name, given in self.latency_s.items():
            parts = given if isinstance(given, RequestTime) else (given,)
            if not (all(part >= 0 for part in parts) and 0.001 <= sum(parts) <= 3600):
                written = "+".join(f"{part:g}" for part in parts)
                raise InputError(f"the latency of {name!r} must be from 0.001 to 3600 seconds, not {written}")
        for key in ("fixed_share", "length_share", "straggler_share", "error_share"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{key} must be from 0 to 1, not {value:g}")
        if self.error_share > 0.9:
            raise InputError(f"error_share must be at most 0.9, not {self.error_share:g}: nothing would ever end")
        if self.spread is not None and not 0 <= self.spread <= 3:
            raise InputError(f"spread must be from 0 to 3, not {self.spread:g}")
        if self.prompt_tokens < 0 or (self.verdict_tokens is not None and not 0 <= self.verdict_tokens < 1e6):
            raise InputError("prompt_tokens and verdict_tokens must be numbers of tokens, from 0 on")


VERDICT_TOKENS = 120.0
SPREAD = 0.3


def parse_latency(text: str, config: Config) -> dict[str, float | RequestTime]:
    """Read `3` (every source) or `a=2,b=0.5`; `a=2,5` is 2 for a and 5 for all others. `a=0.02+0.001` is a
    `RequestTime`: 0.02 for a request, plus 0.001 for each call in it. Raises `InputError`.
    """
    latency_s: dict[str, float | RequestTime] = {}
    for part in text.split(","):
        name, separator, number = part.strip().rpartition("=")
        name = name.strip() if separator else "*"
        try:
            seconds = _seconds(number)
        except ValueError:
            remedy = "write 3, or a=2,b=0.5, or a=0.02+0.001 (for a request, plus for each call in it)"
            raise InputError(f"--latency {text!r}: {number!r} is no number of seconds; {remedy}") from None
        names = dict.fromkeys(map(configured_name, config.sources))
        if name != "*" and name not in (*config.sources, *names):
            raise InputError(f"--latency {text!r}: there is no source {name!r}; there are {', '.join(names)}")
        latency_s[name] = seconds
    return latency_s


def _seconds(text: str) -> float | RequestTime:
    try:
        return float(text)  # first, because of numbers like 1e+2
    except ValueError:
        fixed, separator, call = text.partition("+")
        if not separator:
            raise
        return RequestTime(float(fixed), float(call))


def parse_data_source(text: str) -> tuple[str, float]:
    """Read `math/gsm8k` or, with its share of the samples, `math/gsm8k=0.7`. Raises `InputError`."""
    name, separator, number = text.rpartition("=")
    if not separator:
        return text, 1.0
    try:
        share = float(number)
    except ValueError:
        return text, 1.0
    if not (math.isfinite(share) and share > 0):
        raise InputError(f"--data-source {text!r}: a share must be above 0, not {number}")
    return name, share
