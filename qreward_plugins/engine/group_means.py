"""The mean of a group's scored samples, which a failed sample gets.

A group-based estimator compares the samples of one prompt, so an invented number for one of them moves the baseline of
all. The mean of the scored samples moves nothing: the group's mean stays the same, and the failed sample's advantage is
zero. All frameworks use this module for it.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence

from ..config import Constant, FailurePolicy
from ..errors import RewardMissing
from ..samples import Failed, Outcome

UNSCORED = 0.0
"""The mean of a group without any score. With one constant for all its samples, no sample has an advantage."""

KEPT = 4096
"""Most unfinished groups in `RunningMeans`; the least recently used is dropped first."""

OnMean = Callable[[float], None]

_BITS = 1074
"""2**-1074 is the smallest float64 above zero, and every float64 is a multiple of it (IEEE 754 binary64)."""


class Mean:
    """The mean of finite rewards that come one by one.

    It is the exact mean, rounded once. So it does not depend on the order of the rewards, never overflows, equals the
    rewards if all are equal, and has the same bits in every process. No reward is kept.
    """

    __slots__ = ("_total", "scored")

    def __init__(self, rewards: Iterable[float] = ()) -> None:
        self._total = 0
        self.scored = 0
        for reward in rewards:
            self.add(reward)

    def add(self, reward: float) -> None:
        """Add the reward of one more sample. Raises ValueError if it is not finite."""
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

    `rewards[i]` belongs to the group `groups[i]`; None: that sample failed. A group without any reward gets the mean
    of all scored samples, or 0.0 without any: every constant is neutral to such a group. Raises ValueError for a reward
    that is not finite.
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

    None if it has no number: the adapter imputes its group's mean, or leaves it out of training. Raises `RewardMissing`
    with the policy `raise`.
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
    """A group whose samples are still being scored. Its rewards are not kept: an evaluation has no last sample."""

    __slots__ = ("failed", "followers", "mean")

    def __init__(self) -> None:
        self.mean = Mean()
        self.failed = 0
        self.followers: list[OnMean] = []


class RunningMeans:
    """The means of groups whose samples one process scores one by one. Thread-safe; nothing waits.

    It is for frameworks in which a later hook sees the whole group. Until then a failed sample has the mean of the
    siblings scored so far; with `follow` it gets the new mean after each of them. `size` is the number of samples after
    which the group is complete and dropped; None if unknown.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()

    def add(self, key: Hashable, reward: float, *, size: int | None = None) -> None:
        """Add the reward of a scored sample, and give its failed siblings the new mean."""
        with self._lock:
            group = self._touch(key)
            group.mean.add(reward)
            for on_mean in group.followers:
                on_mean(group.mean.value)
            self._forget_if_complete(key, group, size)

    def follow(self, key: Hashable, on_mean: OnMean, *, size: int | None = None) -> None:
        """Add a failed sample: call `on_mean` with the mean (0.0 before the first score), now and on each change."""
        with self._lock:
            group = self._touch(key)
            group.failed += 1
            group.followers.append(on_mean)
            on_mean(group.mean.value)
            self._forget_if_complete(key, group, size)

    def mean(self, key: Hashable) -> float:
        """The mean of a group's scored samples so far; 0.0 without any."""
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
