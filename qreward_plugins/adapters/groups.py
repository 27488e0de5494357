"""Groups of samples: the mean that a failed one gets, and which groups are trained.

A group-based estimator compares the samples of one prompt, so an invented number for one of them moves the baseline of
all. The mean of the scored samples moves nothing: the group's mean stays the same. slime and ROLL want a number of a
sample that is masked out of the loss, and get this one. Sums are exact, so a mean does not depend on the order of its
rewards, and equals them if all are equal.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction

from ..config import Constant, FailurePolicy, Groups
from ..errors import JudgeUnavailable, RewardMissing
from ..samples import SCREENED, Failed, Outcome

UNSCORED = 0.0
"""The mean of a group without any score. With one constant for all its samples, no sample has an advantage."""

KEEPS_OUT = ("auto", "neutral", "exclude")
"""The values of `on_failure` that keep failed samples out of training."""

KEPT = 4096
"""Most unfinished groups in `RunningMeans`; the least recently used is dropped first."""


def mean_of(rewards: Iterable[float | None]) -> float:
    """The mean of `rewards`, without the None of failed samples; `UNSCORED` if all failed. Raises ValueError for a
    reward that is not finite.
    """
    scored = [_exact(reward) for reward in rewards if reward is not None]
    return float(sum(scored) / len(scored)) if scored else UNSCORED


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

    None if it has no number: the adapter keeps it out of training. That holds for a screened sample under every policy,
    because nothing has failed. Raises `RewardMissing` with the policy `raise`.
    """
    if not isinstance(outcome, Failed):
        return float(outcome.reward)
    if policy == "raise" and not outcome.screened:
        raise RewardMissing(outcome)
    return policy.constant if isinstance(policy, Constant) and not outcome.screened else None


@dataclass(slots=True)
class _Group:
    """A group whose samples are still being scored. Only the sum is kept: an evaluation has no last sample."""

    total: Fraction = Fraction()
    scored: int = 0
    followers: list[Callable[[float], None]] = field(default_factory=list)
    """Of each failed sample, what gets the mean."""

    @property
    def mean(self) -> float:
        return float(self.total / self.scored) if self.scored else UNSCORED


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
        """Add the reward of a scored sample, and give its failed siblings the new mean. Raises ValueError for a reward
        that is not finite.
        """
        exact = _exact(reward)
        with self._group(key, size) as group:
            group.total += exact
            group.scored += 1
            for on_mean in group.followers:
                on_mean(group.mean)

    def follow(self, key: Hashable, on_mean: Callable[[float], None], *, size: int | None = None) -> None:
        """Add a failed sample: call `on_mean` with the mean (0.0 before the first score), now and on each change."""
        with self._group(key, size) as group:
            group.followers.append(on_mean)
            on_mean(group.mean)

    def mean(self, key: Hashable) -> float:
        """The mean of a group's scored samples so far; 0.0 without any."""
        with self._lock:
            return self._groups[key].mean if key in self._groups else UNSCORED

    @contextmanager
    def _group(self, key: Hashable, size: int | None) -> Iterator[_Group]:
        """Lock a group that gets a sample, and drop it if that was its last one."""
        with self._lock:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
            if len(self._groups) > KEPT:
                self._groups.popitem(last=False)
            yield group
            if size is not None and group.scored + len(group.followers) >= size:
                del self._groups[key]


class GroupGate:
    """Drops groups with too few rewards, for frameworks that can replace a prompt (slime, ROLL), and ends the run after
    too many in a row: while a judge is down, prompts would be replaced for ever. Thread-safe.
    """

    def __init__(self, settings: Groups) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._start_over()

    def _start_over(self) -> None:
        self._dropped_in_a_row = 0
        self._causes: Counter[str] = Counter()
        self._detail = ""

    def admit(self, size: int, causes: Iterable[str], *, detail: str = "") -> bool:
        """Whether a group of `size` samples has enough rewards (`groups.min_scored`).

        `causes` has one entry for each failed sample. `detail` is the detail of one failure, for the error message.
        Raises `JudgeUnavailable` after `groups.give_up_after` dropped groups in a row. A group that has too few because
        a monitor took samples out is dropped and not counted.
        """
        failed = list(causes)
        wanted = self._settings.min_scored
        enough = size if wanted == "all" else min(size, wanted)
        with self._lock:
            if size - len(failed) >= enough:
                self._start_over()
                return True
            if size - len(failed) + failed.count(SCREENED) >= enough:
                return False
            self._dropped_in_a_row += 1
            self._causes.update(failed)
            self._detail = detail or self._detail
            if self._dropped_in_a_row < self._settings.give_up_after:
                return False
            dropped, last = self._dropped_in_a_row, f" The last failure: {self._detail}." if self._detail else ""
            reasons = ", ".join(f"{cause} {count} times" for cause, count in self._causes.most_common(3))
            self._start_over()
        raise JudgeUnavailable(
            f"{dropped} groups in a row had fewer than {enough} samples with a reward ({reasons}).{last} Replacing "
            "them would not end. `qreward check` tests every source; groups.give_up_after sets the number of groups."
        )


def _exact(reward: float) -> Fraction:
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite, not {reward}")
    return Fraction(reward)
