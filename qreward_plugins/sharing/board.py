"""The board on which the rewards of a group meet, whose samples were scored in different processes.

A failed sample is neutral to its group when it gets the mean of the scored ones: its own advantage is zero then, and
the group's mean is what it was. A group is therefore closed at that mean, as soon as all of its samples have reported,
or early, when somebody can wait no longer. From then on the mean must not move: whoever comes late, scored or not, gets
it, too. A group in which nothing is scored is closed at one constant.

This is a state machine without clocks, tasks and processes: who waits, and for how long, is not known here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ..groups import mean_of

Key: TypeAlias = "tuple[str, str]"
"""What names a group: its uid, and the step."""

DETAILED = 8_192
"""Groups of which every report is kept, at most."""

REMEMBERED = 65_536
"""Closed groups of which the mean is remembered, at most."""


@dataclass(slots=True)
class _Group:
    size: int | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    generations: dict[str, str] = field(default_factory=dict)
    mean: float | None = None


class Board:
    """The groups that are being scored, and the means of those that are closed.

    `on_close` is called with every group that closes, and its mean. Memory is bounded: of the groups that were touched
    longest ago first the reports are forgotten (an open group is closed for that), then the mean.
    """

    def __init__(
        self,
        on_close: Callable[[Key, float], None] = lambda key, mean: None,
        *,
        detailed: int = DETAILED,
        remembered: int = REMEMBERED,
    ) -> None:
        self._on_close = on_close
        self._detailed = detailed
        self._remembered = remembered
        self._groups: OrderedDict[Key, _Group] = OrderedDict()
        self._means: OrderedDict[Key, float] = OrderedDict()

    def report(
        self, key: Key, sample: str, reward: float | None, size: int | None = None, *, generation: str = ""
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
        anew = sample in group.rewards and group.generations.get(sample, "") != generation
        if known is not None and not anew:
            return None if known == reward else known
        if group.mean is None or anew:
            group.rewards[sample] = reward
            group.generations[sample] = generation
        if group.mean is None:
            if group.size is None or len(group.rewards) < group.size:
                return None
            self._close(key, group, mean_of(group.rewards.values()))
            if reward is not None:
                return None
        return None if anew and reward is not None else group.mean

    def knows(self, key: Key, sample: str, generation: str = "") -> bool:
        """Whether this response of a sample of a group has reported, as far as that is remembered."""
        group = self._groups.get(key)
        return group is not None and sample in group.rewards and group.generations.get(sample, "") == generation

    def mean(self, key: Key) -> float | None:
        """The mean that a group is closed at; None: it is open, or not known."""
        if key in self._groups:
            return self._touch(key).mean
        if key in self._means:
            self._means.move_to_end(key)
        return self._means.get(key)

    def close(self, key: Key) -> float:
        """Close a group early, at the mean of what is scored by now, and return the mean that it is closed at."""
        mean = self.mean(key)
        if mean is None:
            group = self._touch(key)
            mean = mean_of(group.rewards.values())
            self._close(key, group, mean)
        return mean

    def restore(self, key: Key, size: int | None, rewards: Mapping[str, float | None], mean: float | None) -> None:
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
        self._close(key, group, mean)

    def _touch(self, key: Key) -> _Group:
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        if len(self._groups) > self._detailed:
            oldest, forgotten = self._groups.popitem(last=False)
            if forgotten.mean is None:
                self._close(oldest, forgotten, mean_of(forgotten.rewards.values()))
            assert forgotten.mean is not None
            self._means[oldest] = forgotten.mean
            if len(self._means) > self._remembered:
                self._means.popitem(last=False)
        return group

    def _close(self, key: Key, group: _Group, mean: float) -> None:
        group.mean = mean
        self._on_close(key, mean)


__all__ = ["Board", "Key"]
