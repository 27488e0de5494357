"""Validity: the share of valid replies of a source. It decides who is to blame for an invalid one.

A source that answers every sample with prose is broken. A source that answers some samples with prose and others
validly was provoked by those responses. Two measures tell these apart, because a batch may hold many responses that
provoke. A source is *degraded* if most of its last replies are invalid: other sources are preferred then. It *can
judge* if a small share of its replies over a longer time is valid.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_VALID = 0.04
"""Share of valid replies from which a source can judge."""
_WINDOW = 50
"""Number of last replies that decide whether a source is degraded."""
_LEAST_REPLIES = 10
"""Fewest replies that decide it."""
_MEMORY = 500
"""Approximate number of replies behind the share of valid ones; older ones fade exponentially."""


class Validity:
    """The valid and invalid replies of one source. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=_WINDOW)
        self._valid_at = -math.inf
        self._valid = 0.0
        self._replies = 0.0

    @property
    def degraded(self) -> bool:
        """Whether most of the last replies were invalid."""
        invalid = self._last.count(False)
        return len(self._last) >= _LEAST_REPLIES and 2 * invalid > len(self._last)

    @property
    def reliable(self) -> bool:
        """Whether most of the last replies were valid; `False` while there are too few to tell."""
        return len(self._last) >= _LEAST_REPLIES and 2 * self._last.count(True) > len(self._last)

    def judges_since(self, at: float) -> bool:
        """Whether it gave a valid reply after `at`, and can judge: then a response provoked each invalid reply. The
        share of valid replies rules out replies that are valid by chance.
        """
        return self._valid_at >= at and self._valid >= LEAST_VALID * self._replies

    def learn(self, valid: bool, now: float) -> None:
        """Note whether a reply was valid."""
        self._last.append(valid)
        self._valid += valid - self._valid / _MEMORY
        self._replies += 1 - self._replies / _MEMORY
        if valid:
            self._valid_at = now

    def forgive(self) -> None:
        """Forget the last replies, because the source answered a probe validly."""
        self._last.clear()
