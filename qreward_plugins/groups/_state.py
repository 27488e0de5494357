"""The state of a barrier: what was reported of each group, and the means of groups that are closed.

A failed sample is neutral to its group when it gets the mean of the scored ones. So a group with a failed sample is
closed at that mean as soon as all of its samples have reported, or early, when somebody can wait no longer. From then
on the mean must not move: whoever comes late, scored or not, gets it, too. A group in which nothing is scored is closed
at one constant. A group without a failed sample stays open, because nobody needs its mean.

This is a state machine without clocks, tasks and processes: who waits, and for how long, is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ._means import mean_of

GroupKey: TypeAlias = "tuple[str, str]"
"""What names a group: its uid, and the step."""

DETAILED = 8_192
"""Groups of which every report is kept, at most."""

REMEMBERED = 65_536
"""Closed groups of which the mean is remembered, at most."""


@dataclass(slots=True)
class GroupRecord:
    """What is known of a group: how many samples it has (None: unknown), their rewards, and the mean it is closed at.

    `rewards` holds None for a failed sample. `generations` says which response of a sample its reward is for.
    """

    size: int | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    generations: dict[str, str] = field(default_factory=dict)
    mean: float | None = None

    def take(self, sample: str, reward: float | None, generation: str) -> None:
        """Record what became of this response of a sample."""
        self.rewards[sample] = reward
        self.generations[sample] = generation

    def knows(self, sample: str, generation: str) -> bool:
        """Whether this response of a sample has reported."""
        return sample in self.rewards and self.generations.get(sample, "") == generation

    def is_due(self) -> bool:
        """Whether all samples have reported, and a failed one needs the mean."""
        return self.size is not None and len(self.rewards) >= self.size and None in self.rewards.values()

    def mean_so_far(self) -> float:
        """The mean that the group is closed at, or that of what is scored by now."""
        return mean_of(self.rewards.values()) if self.mean is None else self.mean


class BarrierState:
    """The groups that are being scored, and the means of those that are closed.

    `on_close` is called with every group that closes, and its mean. Memory is bounded: of the groups that were touched
    longest ago first the reports are forgotten (an open group is closed for that), then the mean.
    """

    def __init__(
        self,
        on_close: Callable[[GroupKey, float], None] = lambda key, mean: None,
        *,
        detailed: int = DETAILED,
        remembered: int = REMEMBERED,
    ) -> None:
        self._on_close = on_close
        self._detailed = detailed
        self._remembered = remembered
        self._groups: OrderedDict[GroupKey, GroupRecord] = OrderedDict()
        self._means: OrderedDict[GroupKey, float] = OrderedDict()

    def report(
        self, key: GroupKey, sample: str, reward: float | None, size: int | None = None, *, generation: str = ""
    ) -> float | None:
        """Take in what became of a sample: its reward, or None for a failed one.

        `sample` tells the samples of a group apart, and `generation` the responses of a sample that is generated anew:
        a report that comes twice counts once, and a new response takes the place of the earlier one. `size` is how many
        samples there are, None if that is not known. The answer is the number that the sample trains on. None: for a
        scored sample its own reward, for a failed one that its group is open, and `on_close` will tell. Where the group
        is closed already, a new response that is scored trains on its own reward, and one that failed on the group's
        mean.
        """
        if key not in self._groups and key in self._means:
            return self.mean(key)
        group = self._touch(key)
        if group.size is None:
            group.size = size
        known = group.rewards.get(sample)
        anew = sample in group.rewards and not group.knows(sample, generation)
        if known is not None and not anew:
            return None if known == reward else known
        if group.mean is None or anew:
            group.take(sample, reward, generation)
        if group.mean is None:
            if not group.is_due():
                return None
            mean = self._close(key, group)
            return mean if reward is None else None
        return None if anew and reward is not None else group.mean

    def knows(self, key: GroupKey, sample: str, generation: str = "") -> bool:
        """Whether this response of a sample of a group has reported, as far as that is remembered."""
        return key in self._groups and self._groups[key].knows(sample, generation)

    def mean(self, key: GroupKey) -> float | None:
        """The mean that a group is closed at; None: it is open, or not known."""
        if key in self._groups:
            return self._touch(key).mean
        if key in self._means:
            self._means.move_to_end(key)
        return self._means.get(key)

    def close(self, key: GroupKey) -> float:
        """Close a group early, at the mean of what is scored by now, and return the mean that it is closed at."""
        mean = self.mean(key)
        return self._close(key, self._touch(key)) if mean is None else mean

    def restore(self, key: GroupKey, size: int | None, rewards: Mapping[str, float | None], mean: float | None) -> None:
        """Take in what somebody remembers of a group: reports, and the mean that it was closed at, if it was.

        What is known here already stands.
        """
        if mean is None or self.mean(key) is not None:
            known = self._groups.get(key)
            for sample, reward in rewards.items():
                # Of two responses of a sample nobody knows here which is the later one.
                generation = known.generations.get(sample, "") if known else ""
                self.report(key, sample, reward, size, generation=generation)
            return
        group = self._touch(key)
        group.size = group.size or size
        group.rewards = {**rewards, **group.rewards}
        group.mean = mean
        self._close(key, group)

    def _touch(self, key: GroupKey) -> GroupRecord:
        group = self._groups.setdefault(key, GroupRecord())
        self._groups.move_to_end(key)
        if len(self._groups) > self._detailed:
            oldest, forgotten = self._groups.popitem(last=False)
            self._means[oldest] = self._close(oldest, forgotten) if forgotten.mean is None else forgotten.mean
            if len(self._means) > self._remembered:
                self._means.popitem(last=False)
        return group

    def _close(self, key: GroupKey, group: GroupRecord) -> float:
        group.mean = mean = group.mean_so_far()
        self._on_close(key, mean)
        return mean
