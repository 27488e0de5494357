"""What a simulated request is made of: its hidden work, its random numbers from a keyed hash, and its poison.

A fair comparison of two policies needs the same random numbers. So those of a request depend only on the seed, the
sample, and the number of earlier requests of that sample; not on its time, its server or other draws. A hash (BLAKE2b,
RFC 7693) is also much cheaper than seeding a generator for every request.

A poisoned sample provokes a fault of a server, which no other sample's requests do: a policy may write text that a
provider's firewall blocks, that crashes a tokenizer, or that makes a judge write for ever. By promise P11 such a sample
costs only itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

from ..errors import PermanentError, SourceError, SourceUnusable, TransientError
from ..samples import Sample
from ..sources.base import Request

COMPLETION_TOKENS_PER_UNIT = 150
BYTES_PER_TOKEN = 4
WORK_PER_BYTE = 1 / 3000
"""Work per byte of a request that has no work of its own."""


def work_of(request: Request) -> float:
    """The hidden work of a request: that in its sample's `extras`, else an estimate from its size."""
    work: Any = request.sample.extras.get("work")
    return float(work) if isinstance(work, (int, float)) else request.size * WORK_PER_BYTE


def prompt_tokens(size_bytes: int) -> int:
    """The prompt tokens of a request of this size."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def completion_tokens(work: float, most: int) -> int:
    """The completion tokens of a request with this work, at most `most` (0: any number)."""
    tokens = round(COMPLETION_TOKENS_PER_UNIT * work)
    return min(tokens, most) if most else tokens


def score_of(sample_id: str) -> float:
    """The score from 0 to 10 of a sample, which is the same from every simulated server."""
    return round(10 * share(sample_id), 3)


def verdict_text(request: Request) -> str:
    """The verdict of a simulated server, as text for an LLM judge without criteria."""
    return f'{{"id": "{request.nonce}", "rationale": "simulated", "score": {score_of(request.sample.id or "")}}}'


_UNPACK = struct.Struct("<6Q").unpack
_UNIT = 2.0**-64


class Draw(NamedTuple):
    """The random numbers of one request. `normal` is standard normal, the others are uniform in 0 to 1."""

    normal: float
    straggler: float
    error: float
    invalid: float
    network: float


class Luck:
    """Draws random numbers for requests, the same for the same `seed`.

    All servers of a run share one `Luck`, which counts the requests of each sample over all of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._key = f"{seed}".encode()
        self._requests: dict[str, int] = {}

    def draw(self, sample_id: str) -> Draw:
        """The random numbers of the next request of this sample."""
        number = self._requests.get(sample_id, 0)
        self._requests[sample_id] = number + 1
        digest = blake2b(f"{sample_id}/{number}".encode("utf-8", "surrogatepass"), digest_size=48, key=self._key)
        first, second, straggler, error, invalid, network = _UNPACK(digest.digest())
        return Draw(
            normal(first * _UNIT, second * _UNIT), straggler * _UNIT, error * _UNIT, invalid * _UNIT, network * _UNIT
        )


def share(text: str) -> float:
    """A pseudo-random number from 0 to below 1, determined by the text."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def normal(first: float, second: float) -> float:
    """A standard normal number from two uniform ones (Box and Muller 1958).

    `random.gauss` may change with the Python version, and a seed must not.
    """
    return math.sqrt(-2.0 * math.log(max(first, 1e-300))) * math.cos(math.tau * second)


Poison = Literal[
    "blocked", "missing", "redirected", "refused", "throttled", "broken", "hang", "prose", "usage", "limits"
]
"""`blocked`: status 403. `missing`: 404. `redirected`: 307. `refused`: 400. `throttled`: 429 on every try, before any
work. `broken`: status 500 on every try. `hang`: no answer for `HANGS_S`. `prose`: no verdict in the reply. `usage`: a
valid verdict that reports absurd usage. `limits`: a valid verdict that announces one request a day."""

OF_ONE_REPLY = ("prose", "usage", "limits")
"""Those that do not fail a request, so that other calls in the same request are answered."""
HANGS_S = 200.0
"""Longer than the time limit of a source in a poisoned trial."""
TOO_LARGE_S = 1.0
"""What a request that is always throttled is told to wait."""
ABSURD_TOKENS = 10**9
ABSURD_LIMITS: Mapping[str, float] = {
    f"{what}_{name}": value
    for what in ("requests", "tokens")
    for name, value in (("per_window", 1.0), ("remaining", 0.0), ("reset_s", 86_400.0))
}
POISON = "poison"
"""The key of the kind in a sample's extras."""
_ERRORS: Mapping[str | None, tuple[type[SourceError], int]] = {
    "blocked": (SourceUnusable, 403),
    "missing": (SourceUnusable, 404),
    "redirected": (SourceUnusable, 307),
    "refused": (PermanentError, 400),
    "broken": (TransientError, 500),
}


def poison_of(sample: Sample) -> Poison | None:
    """How a sample is poisoned; None if it is not."""
    found: Poison | None = sample.extras.get(POISON)
    return found


def error_of(poison: Poison | None, server: str) -> SourceError | None:
    """The error of a poisoned request; None if it gets a verdict."""
    if poison not in _ERRORS:
        return None
    kind, status = _ERRORS[poison]
    return kind(f"{server} answered with status {status}", status=status)
