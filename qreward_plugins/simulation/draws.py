"""Luck: everything that is random about a simulated request, as a keyed hash.

Two policies are compared fairly only on the same luck. So what happens to a request does not depend on when it is sent,
where to, or what else was drawn before, but only on the seed, the sample, and how many requests of that sample came
before it. A hash (BLAKE2b, RFC 7693) also costs a fraction of what seeding a generator for every request would.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import NamedTuple

_UNPACK = struct.Struct("<6Q").unpack
_UNIT = 2.0**-64


class Draw(NamedTuple):
    """The luck of one request. `normal` is standard normal, the others are uniform in 0 to 1."""

    normal: float
    straggler: float
    error: float
    invalid: float
    network: float


class Luck:
    """Draws for the requests of any number of samples, the same for the same `seed`.

    One `Luck` is shared by all servers of a run: it counts the requests of each sample over all of them.
    """

    def __init__(self, seed: int = 0) -> None:
        self._key = f"{seed}".encode()
        self._requests: dict[str, int] = {}

    def draw(self, sample_id: str) -> Draw:
        """The luck of the next request of this sample."""
        number = self._requests.get(sample_id, 0)
        self._requests[sample_id] = number + 1
        digest = blake2b(f"{sample_id}/{number}".encode("utf-8", "surrogatepass"), digest_size=48, key=self._key)
        first, second, straggler, error, invalid, network = _UNPACK(digest.digest())
        return Draw(
            normal(first * _UNIT, second * _UNIT), straggler * _UNIT, error * _UNIT, invalid * _UNIT, network * _UNIT
        )

    def requests(self, sample_id: str) -> int:
        """How many requests of this sample there were."""
        return self._requests.get(sample_id, 0)


def share(text: str) -> float:
    """A number from 0 to below 1 that looks random and is always the same for the same text."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def normal(first: float, second: float) -> float:
    """A standard normal number from two uniform ones (Box and Muller 1958).

    `random.gauss` may change with the Python version, and a seed must not.
    """
    return math.sqrt(-2.0 * math.log(max(first, 1e-300))) * math.cos(math.tau * second)
