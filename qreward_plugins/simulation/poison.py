"""Poisoned samples: responses that provoke faults of a server, which no other sample's requests do.

A policy may write text that a provider's firewall blocks, that crashes a tokenizer, or that makes a judge write for
ever. By promise P11 such a sample costs only itself. So in trials with poisoned samples the servers have no other
fault, and every other sample must be scored.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ..errors import PermanentError, SourceError, SourceUnusable, TransientError
from ..samples import Sample
from .servers import Server

Poison = Literal[
    "blocked", "missing", "redirected", "refused", "throttled", "broken", "hang", "prose", "usage", "limits"
]
"""`blocked`: status 403. `missing`: 404. `redirected`: 307. `refused`: 400. `throttled`: 429 on every try, before any
work. `broken`: status 500 on every try. `hang`: no answer for `HANGS_S`. `prose`: no verdict in the reply. `usage`: a
valid verdict that reports absurd usage. `limits`: a valid verdict that announces one request a day."""

OF_ONE_REPLY = ("prose", "usage", "limits")
"""Those that do not fail a request, so that other calls in the same request are answered."""
TIMEOUT_S = 120.0
"""The time limit of every source: more than a healthy server takes for any sample that is not poisoned."""
SLOWEST_S_PER_UNIT = 3.0
WIDEST_NOISE = 0.25
"""With both at four sigma, sample and noise, a server of this speed takes 75 s."""
HANGS_S = 200.0
"""Longer than the time limit."""
TOO_LARGE_S = 1.0
"""What a request that is always throttled is told to wait."""
ABSURD_TOKENS = 10**9
ABSURD_LIMITS: Mapping[str, float] = {
    "requests_per_window": 1.0,
    "requests_remaining": 0.0,
    "requests_reset_s": 86_400.0,
    "tokens_per_window": 1.0,
    "tokens_remaining": 0.0,
    "tokens_reset_s": 86_400.0,
}
DEADLINE_S = 7200.0
"""More than all samples of a trial need."""
_KEY = "poison"
ALWAYS_THROTTLED: Mapping[str, Any] = {_KEY: "throttled"}
"""The extras of a sample that every server throttles on every try."""
_SHARE_OF_TRIALS = 0.2


_LOOK_LIKE_THE_SOURCE = ("blocked", "missing", "redirected")
"""Replies that look like a failed source if many samples provoke them."""
_MOST_ALIKE = 2
_MOST = 1000


@dataclass
class Poisoner:
    """Decides which samples of a trial are poisoned, and how: a `share` of them, at most `most`."""

    kinds: tuple[Poison, ...]
    share: float
    most: int
    rng: random.Random

    def extras(self) -> dict[str, Any]:
        """The extras of the next sample."""
        if not self.most or self.rng.random() >= self.share:
            return {}
        self.most -= 1
        return {_KEY: self.rng.choice(self.kinds)}


def poisoner_of(seed: int) -> Poisoner | None:
    """The poisoner of this seed's trial; None for most trials."""
    rng = random.Random(f"poison {seed}")
    if rng.random() >= _SHARE_OF_TRIALS:
        return None
    drawn = [kind for kind in get_args(Poison) if kind != "throttled"]  # those would be tried for two hours
    kinds = tuple(rng.sample(drawn, rng.choice((1, 1, 2, 9))))
    most = _MOST_ALIKE if set(kinds) & set(_LOOK_LIKE_THE_SOURCE) else _MOST
    return Poisoner(kinds, rng.choice((0.05, 0.1, 0.3)), most, rng)


def poison_of(sample: Sample) -> Poison | None:
    """How a sample is poisoned; None if it is not."""
    found: Poison | None = sample.extras.get(_KEY)
    return found


def healthy(server: Server) -> Server:
    """The server with its limits, and without faults, stragglers, errors, invalid replies and false announcements."""
    return replace(
        server,
        faults=(),
        straggler_share=0.0,
        error_share=0.0,
        invalid_share=0.0,
        announces=None if server.announces == "wrong" else server.announces,
        seconds_per_unit=min(server.seconds_per_unit, SLOWEST_S_PER_UNIT),
        noise=min(server.noise, WIDEST_NOISE),
        declared=True,
        declares_window=True,
    )


def error_of(poison: Poison | None, server: str) -> SourceError | None:
    """The error of a poisoned request; None if it gets a verdict."""
    if poison == "blocked":
        return SourceUnusable(f"{server} answered with status 403", status=403)
    if poison == "missing":
        return SourceUnusable(f"{server} answered with status 404", status=404)
    if poison == "redirected":
        return SourceUnusable(f"{server} answered with status 307", status=307)
    if poison == "refused":
        return PermanentError(f"{server} answered with status 400", status=400)
    if poison == "broken":
        return TransientError(f"{server} answered with status 500", status=500)
    return None
