"""The state of a barrier: the reports of each group, and the means of closed groups.

A failed sample is neutral to its group if it gets the mean of the scored samples. So a group with a failed sample
closes at that mean as soon as all of its samples have reported, or earlier if a sample can wait no longer. After that
the mean must not change: late samples, scored or not, get it, too. A group without a scored sample closes at a
constant. A group without a failed sample stays open, because no sample needs its mean.

This is a state machine without clocks, tasks or processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from .group_means import mean_of

GroupKey: TypeAlias = "tuple[str, str]"
"""The name of a group: its uid, and the step."""

DETAILED = 8_192
"""Most groups whose reports are kept."""

REMEMBERED = 65_536
"""Most closed groups whose mean is kept."""


@dataclass(slots=True)
class GroupRecord:
    """A group: its number of samples (None if unknown), their rewards, and the mean at which it is closed.

    `rewards` holds None for a failed sample. `generations` identifies the response that a reward belongs to.
    """

    size: int | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    generations: dict[str, str] = field(default_factory=dict)
    mean: float | None = None

    def take(self, sample: str, reward: float | None, generation: str) -> None:
        """Record the outcome of this response of a sample."""
        self.rewards[sample] = reward
        self.generations[sample] = generation

    def knows(self, sample: str, generation: str) -> bool:
        """Whether this response of a sample has reported."""
        return sample in self.rewards and self.generations.get(sample, "") == generation

    def is_due(self) -> bool:
        """Whether all samples have reported, and a failed one needs the mean."""
        return self.size is not None and len(self.rewards) >= self.size and None in self.rewards.values()

    def mean_so_far(self) -> float:
        """The mean at which the group is closed, or the mean of its scored samples so far."""
        return mean_of(self.rewards.values()) if self.mean is None else self.mean


class BarrierState:
    """The groups that are being scored, and the means of closed groups.

    `on_close` is called with every group that closes, and its mean. Memory is bounded: the least recently used groups
    lose first their reports (an open group closes then), later their means.
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
        """Record the outcome of a sample: its reward, or None if it failed. Return the number that it trains on.

        None means: a scored sample trains on its own reward; the group of a failed one is open, and `on_close` will
        give its mean. `sample` identifies the sample in its group, and `generation` its response: a repeated report
        counts once, and a regenerated response replaces the earlier one. In a closed group, a regenerated response
        trains on its own reward if it is scored, else on the group's mean. `size` is the number of samples in the
        group; None if unknown.
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
        """Whether this response of a sample has reported; False also if its group is no longer kept."""
        return key in self._groups and self._groups[key].knows(sample, generation)

    def mean(self, key: GroupKey) -> float | None:
        """The mean at which a group is closed; None if it is open or unknown."""
        if key in self._groups:
            return self._touch(key).mean
        if key in self._means:
            self._means.move_to_end(key)
        return self._means.get(key)

    def close(self, key: GroupKey) -> float:
        """Close a group early, at the mean of its scored samples so far. Return the mean at which it is closed."""
        mean = self.mean(key)
        return self._close(key, self._touch(key)) if mean is None else mean

    def restore(self, key: GroupKey, size: int | None, rewards: Mapping[str, float | None], mean: float | None) -> None:
        """Merge a process's record of a group: reports, and the mean if it was closed. Reports known already stand."""
        if mean is None or self.mean(key) is not None:
            known = self._groups.get(key)
            for sample, reward in rewards.items():
                # It is unknown here which of two responses of a sample is the later one.
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
