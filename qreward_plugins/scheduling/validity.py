"""Validity: whether the replies of a source are valid verdicts. It decides who is to blame for one that is not.

A source that gives everybody prose is broken. One that gives prose to some responses and verdicts to others was
provoked by those responses. Two measures tell them apart, because a batch may hold many responses that provoke: most of
the last replies being invalid makes a source *garbled*, which other sources are preferred to; a small share of valid
ones in its longer past shows that it *can judge*.
"""

from __future__ import annotations

import math
from collections import deque

LEAST_VALID = 0.04
"""Share of valid verdicts among its replies from which on a source is taken to be able to judge."""
_WINDOW = 50
"""Replies that say whether a source is garbled."""
_LEAST_REPLIES = 10
_MEMORY = 500
"""Replies that are remembered, about, for the share of valid ones; older ones fade."""


class Validity:
    """What the replies of one source were worth. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._last: deque[bool] = deque(maxlen=_WINDOW)
        self._valid_at = -math.inf
        self._valid = 0.0
        self._replies = 0.0

    @property
    def garbled(self) -> bool:
        """Whether most of the last replies were no valid verdicts: then it is not the responses that provoke them."""
        invalid = self._last.count(False)
        return len(self._last) >= _LEAST_REPLIES and 2 * invalid > len(self._last)

    def judges_since(self, at: float) -> bool:
        """Whether it gave valid verdicts after `at`, and not only by chance: then it can judge, and what it cannot
        judge was provoked. However many responses of a batch provoke it, they cannot keep the others from being judged.
        """
        return self._valid_at >= at and self._valid >= LEAST_VALID * self._replies

    def learn(self, valid: bool, now: float) -> None:
        """Note whether a reply was a valid verdict."""
        self._last.append(valid)
        self._valid += valid - self._valid / _MEMORY
        self._replies += 1 - self._replies / _MEMORY
        if valid:
            self._valid_at = now

    def forgive(self) -> None:
        """Forget the last replies: the source is well again."""
        self._last.clear()
