"""Defines `GroupWeights`: which weights judge each group of samples of one process, with `affinity: group`."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TypeAlias

from ..samples import Sample

_log = logging.getLogger("qreward_plugins.replicas")

KEPT = 8192
"""Groups without a sample under way that are remembered."""

Named: TypeAlias = "tuple[str, str]"
"""Version and identity of weights (`Weights`)."""


class GroupWeights:
    """Knows the samples under way of each group, and the weights that have begun to judge it. `Gate` guards it by its
    lock, except for the count of mixed groups, which belongs to the event loop. `source`: its name, for the log.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._samples: Counter[str] = Counter()
        self._begun: OrderedDict[str, Named] = OrderedDict()
        self._last: dict[Named, set[str]] = {}
        """By weights whose last replicas are draining: the groups that they had begun to judge by then."""
        self._judged: OrderedDict[str, Named | None] = OrderedDict()
        """The weights that gave the answers for a group; None: several."""
        self.mixed = 0
        """Number of groups that were judged by several versions."""
        self._warned: Named | None = None

    def submitted(self, group: str) -> None:
        """Note that a sample of a group was submitted."""
        self._samples[group] += 1

    def ended(self, group: str) -> bool:
        """Note that a sample has its outcome. Return whether it was the last one of its group that is known."""
        self._samples[group] -= 1
        if self._samples[group] > 0:
            return False
        del self._samples[group]
        return True

    def restart(self) -> None:
        """Forget the samples under way: their event loop was closed."""
        self._samples.clear()

    def begin(self, group: str, weights: Named) -> None:
        """Note that a call of a group goes to a replica with these weights."""
        self._begun[group] = weights
        self._begun.move_to_end(group)
        if len(self._begun) > KEPT + len(self._samples):
            self._begun.popitem(last=False)

    def begun(self, group: str) -> Named | None:
        """The weights that have begun to judge a group; None if none have, or if it was forgotten."""
        return self._begun.get(group)

    def last(self, weights: set[Named], draining: bool) -> None:
        """Note that the last replicas with these weights begin to drain. `draining`: some replicas drain so."""
        if not draining:
            self._last.clear()
        for one in weights:
            # Equal weights may have been loaded anew. Only the groups of before are awaited, or it would never end.
            self._last[one] = {group for group, begun in self._begun.items() if begun == one}

    def belongs(self, group: str, weights: Named) -> bool:
        """Whether draining replicas with these weights are to finish a group."""
        return group in self._last.get(weights, ())

    def under_way(self, weights: Named) -> bool:
        """Whether a group that draining replicas with these weights are to finish has samples under way."""
        finishing = self._last.get(weights, set())
        if len(finishing) > len(self._samples):
            return any(group in finishing for group in self._samples)
        return any(group in self._samples for group in finishing)

    def answered(self, group: str, weights: Named) -> None:
        """Count the group if answers of several versions were taken for it. The first such group is logged."""
        known = self._judged.setdefault(group, weights)
        self._judged.move_to_end(group)
        if len(self._judged) > KEPT:
            self._judged.popitem(last=False)
        if known is None or known[1] == weights[1]:
            return
        self._judged[group] = None
        self.mixed += 1
        if self._warned != weights:
            self._warned = weights
            _log.warning(
                "source %s: group %s was judged by two versions of the weights, %r and %r: no replica had the earlier "
                "one any more; further groups are counted in the statistics (`mixed_groups`)",
                self._source,
                group,
                known[0],
                weights[0],
            )


def group_of(sample: Sample) -> str:
    """Return what names the group of a sample in one process; "" if it is in none. Data sets use their ids again in
    each epoch, so the step belongs to it.
    """
    if not sample.group_id:
        return ""
    return f"{sample.group_id}" if sample.step is None else f"{sample.group_id} of step {sample.step}"
