"""Random numbers of simulated requests, from a keyed hash.

A fair comparison of two policies needs the same random numbers. So those of a request depend only on the seed, the
sample, and the number of earlier requests of that sample; not on its time, its server or other draws. A hash (BLAKE2b,
RFC 7693) is also much cheaper than seeding a generator for every request.
"""

from __future__ import annotations

import math
import struct
from hashlib import blake2b
from typing import NamedTuple

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

    def requests(self, sample_id: str) -> int:
        """The number of requests of this sample so far."""
        return self._requests.get(sample_id, 0)


def share(text: str) -> float:
    """A pseudo-random number from 0 to below 1, determined by the text."""
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=6).digest()
    return int.from_bytes(digest, "little") / 2**48


def normal(first: float, second: float) -> float:
    """A standard normal number from two uniform ones (Box and Muller 1958).

    `random.gauss` may change with the Python version, and a seed must not.
    """
    return math.sqrt(-2.0 * math.log(max(first, 1e-300))) * math.cos(math.tau * second)
