"""What a failed sample gets for a reward while its group is still being scored.

Where a framework asks for one sample at a time and computes a group's baseline from the numbers it got, a failed sample
needs one that moves nothing: the mean of its scored siblings. They may be scored later than it failed; as long as all
of this happens in one process, whoever failed is told the new mean whenever a sibling's reward comes in.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from .groups import UNSCORED

KEPT = 4096
"""Unfinished groups remembered at most; the one that was touched longest ago is forgotten first."""

Tell = Callable[[float], None]


@dataclass
class _Group:
    # A fraction, because a sum of floats depends on the order and may overflow. The rewards themselves are not kept,
    # because a group of an evaluation never ends.
    total: Fraction = Fraction(0)
    scored: int = 0
    failed: int = 0
    following: list[Tell] = field(default_factory=list)

    def mean(self) -> float:
        """Bit for bit what `group_means` makes of the same rewards."""
        if not self.scored:
            return UNSCORED
        try:
            return float(self.total) / self.scored
        except OverflowError:
            return float(self.total / self.scored)


class Siblings:
    """The rewards of groups whose samples are scored one by one. Any thread may use it.

    `size` is the number of samples after which nothing more is to come and the group is forgotten; None: not known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()

    def scored(self, key: Hashable, reward: float, *, size: int | None = None) -> None:
        """Take in the reward of a sample, and tell its failed siblings the new mean."""
        with self._lock:
            group = self._touch(key)
            group.total += Fraction(reward)
            group.scored += 1
            for tell in group.following:
                tell(group.mean())
            self._forget_if_complete(key, group, size)

    def failed(self, key: Hashable, tell: Tell, *, size: int | None = None, follow: bool = True) -> None:
        """Call `tell` with the mean of the group (0.0 while nothing is scored), and with `follow` again whenever it
        changes.
        """
        with self._lock:
            group = self._touch(key)
            group.failed += 1
            if follow:
                group.following.append(tell)
            tell(group.mean())
            self._forget_if_complete(key, group, size)

    def _touch(self, key: Hashable) -> _Group:
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        if len(self._groups) > KEPT:
            self._groups.popitem(last=False)
        return group

    def _forget_if_complete(self, key: Hashable, group: _Group, size: int | None) -> None:
        if size is not None and group.scored + group.failed >= size:
            del self._groups[key]


__all__ = ["Siblings"]
