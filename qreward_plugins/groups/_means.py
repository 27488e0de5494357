"""The number that a failed sample gets: the mean of the scored samples of its group.

A group-based estimator compares the samples of one prompt with each other, so a number made up for one of them moves
the baseline of all. The mean of the scored ones moves nothing: the group's mean stays where it was, and the failed
sample's own advantage is zero. This holds in every framework, so it is computed here and nowhere else.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

from ..config import Constant
from ..config.models import FailurePolicy
from ..errors import RewardMissing
from ..samples import Failed, Outcome

UNSCORED = 0.0
"""The mean of a group without any score. With one constant for all its samples, no sample has an advantage."""

KEPT = 4096
"""Unfinished groups that `RunningMeans` remembers at most; the one that was touched longest ago is forgotten first."""

Tell = Callable[[float], None]

_BITS = 1074
"""2**-1074 is the smallest float64 above zero, and every float64 is a multiple of it (IEEE 754 binary64)."""


class Mean:
    """The mean of finite rewards that come one by one.

    It is the exact mean, rounded once. So it does not depend on the order of the rewards, never overflows, equals the
    rewards where all are equal, and is the same bit for bit wherever a group is looked at. No reward is kept.
    """

    __slots__ = ("_total", "scored")

    def __init__(self, rewards: Iterable[float] = ()) -> None:
        self._total = 0
        self.scored = 0
        for reward in rewards:
            self.add(reward)

    def add(self, reward: float) -> None:
        """Take in the reward of one more sample. Raises ValueError if it is not finite."""
        if not math.isfinite(reward):
            raise ValueError(f"a reward must be finite, not {reward}")
        numerator, denominator = float(reward).as_integer_ratio()
        self._total += numerator << (_BITS + 1 - denominator.bit_length())
        self.scored += 1

    @property
    def value(self) -> float:
        """The mean so far; `UNSCORED` without any reward."""
        return self._total / (self.scored << _BITS) if self.scored else UNSCORED


def mean_of(rewards: Iterable[float | None]) -> float:
    """The mean of `rewards`, without the None of failed samples; `UNSCORED` if all failed. Raises ValueError for a
    reward that is not finite.
    """
    return Mean(reward for reward in rewards if reward is not None).value


def group_means(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """For every sample the mean reward of the scored samples of its group.

    `rewards[i]` belongs to the group `groups[i]`; None: that sample failed. A group without any reward has the mean of
    all scored samples, and 0.0 where there are none at all: any one number is neutral to a group that failed whole.
    Raises ValueError for a reward that is not finite: it would be the mean of its whole group.
    """
    scored: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            scored.setdefault(group, []).append(reward)
    means = {group: mean_of(values) for group, values in scored.items()}
    whole = mean_of(rewards)
    return [means.get(group, whole) for group in groups]


def number_of(outcome: Outcome, policy: FailurePolicy) -> float | None:
    """The number that an outcome trains as under `on_failure`: its reward, or the policy's constant if it has none.

    None: it has no number of its own. The adapter imputes its group's mean, or leaves it out of training. Raises
    `RewardMissing` with the policy `raise`.
    """
    if outcome.reward is not None:
        return float(outcome.reward)
    if isinstance(policy, Constant):
        return policy.constant
    if policy == "raise":
        assert isinstance(outcome, Failed)
        raise RewardMissing(outcome)
    return None


class _Group:
    """What is kept of a group whose samples are still being scored. Its rewards are not: an evaluation never ends."""

    __slots__ = ("failed", "followers", "mean")

    def __init__(self) -> None:
        self.mean = Mean()
        self.failed = 0
        self.followers: list[Tell] = []


class RunningMeans:
    """The means of groups whose samples one process scores one by one. Any thread may use it. Nobody waits here.

    It is for frameworks in which a later hook sees the whole group: until then a failed sample has the mean of the
    siblings that are scored, and with `follow` it is told the new mean whenever another reward comes in. `size` is the
    number of samples after which nothing more is to come and the group is forgotten; None: not known.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()

    def add(self, key: Hashable, reward: float, *, size: int | None = None) -> None:
        """Take in the reward of a scored sample, and tell its failed siblings the new mean."""
        with self._lock:
            group = self._touch(key)
            group.mean.add(reward)
            for tell in group.followers:
                tell(group.mean.value)
            self._forget_if_complete(key, group, size)

    def follow(self, key: Hashable, tell: Tell, *, size: int | None = None) -> None:
        """Take in a failed sample: call `tell` with the mean (0.0 while nothing is scored), now and on each change."""
        with self._lock:
            group = self._touch(key)
            group.failed += 1
            group.followers.append(tell)
            tell(group.mean.value)
            self._forget_if_complete(key, group, size)

    def mean(self, key: Hashable) -> float:
        """The mean of what is scored of a group by now; 0.0 if nothing is."""
        with self._lock:
            return self._groups[key].mean.value if key in self._groups else UNSCORED

    def _touch(self, key: Hashable) -> _Group:
        group = self._groups.setdefault(key, _Group())
        self._groups.move_to_end(key)
        if len(self._groups) > KEPT:
            self._groups.popitem(last=False)
        return group

    def _forget_if_complete(self, key: Hashable, group: _Group, size: int | None) -> None:
        if size is not None and group.mean.scored + group.failed >= size:
            del self._groups[key]
