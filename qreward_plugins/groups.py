"""What a failed sample means to its group, for every framework that trains on groups.

A group-based estimator compares the samples of one prompt with each other, so a number made up for one of them moves
the baseline of all. The mean of the scored ones is the number that moves nothing: it leaves the group's mean where it
was and has an advantage of zero itself. Where a framework can replace a prompt, a group with too few rewards is better
dropped; but a judge that is down would have prompts replaced for ever, so the gate that drops them gives up.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction

from .config import Constant, Groups
from .config.models import FailurePolicy
from .errors import JudgeUnavailable, RewardMissing
from .samples import Failed, Outcome

UNSCORED = 0.0
"""The mean of a group without any score. With one constant for all its samples, no sample has an advantage."""


def group_means(rewards: Sequence[float | None], groups: Sequence[Hashable]) -> list[float]:
    """For every sample the mean reward of the scored samples of its group.

    `rewards[i]` belongs to the group `groups[i]`; None: that sample failed. A group without any reward has the mean of
    all scored samples, and 0.0 where there are none at all: any one number is neutral to a group that failed whole.
    """
    scored: dict[Hashable, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        if reward is not None:
            scored.setdefault(group, []).append(reward)
    means = {group: mean_of(values) for group, values in scored.items()}
    whole = mean_of(rewards)
    return [means.get(group, whole) for group in groups]


def mean_of(rewards: Iterable[float | None]) -> float:
    """The mean of `rewards`, without the None of failed samples; `UNSCORED` if all failed."""
    scored = [float(reward) for reward in rewards if reward is not None]
    if not scored:
        return UNSCORED
    try:
        return math.fsum(scored) / len(scored)
    except OverflowError:
        # The sum exceeds float64, the mean does not.
        return float(sum(map(Fraction, scored)) / len(scored))


def number_of(outcome: Outcome, policy: FailurePolicy) -> float | None:
    """The number that an outcome trains as under `on_failure`; None: it has none of its own, and the adapter keeps it
    out of training or makes it neutral to its group.

    Raises `RewardMissing` with the policy `raise`.
    """
    if outcome.reward is not None:
        return float(outcome.reward)
    if isinstance(policy, Constant):
        return policy.constant
    if policy == "raise":
        assert isinstance(outcome, Failed)
        raise RewardMissing(outcome)
    return None


class GroupGate:
    """Decides which groups are trained, and ends the run when too many in a row are not. Any thread may ask it."""

    def __init__(self, settings: Groups) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._dropped_in_a_row = 0
        self._causes: Counter[str] = Counter()
        self._detail = ""

    def admit(self, size: int, causes: Iterable[str], *, detail: str = "") -> bool:
        """Whether a group of `size` samples has enough rewards; `causes` says why each failed one has none, and
        `detail` what became of one of them in full: a person can only mend what is named.

        Raises `JudgeUnavailable` when `give_up_after` groups in a row had too few.
        """
        failed = list(causes)
        wanted = self._settings.min_scored
        enough = size if wanted == "all" else min(size, wanted)
        with self._lock:
            if size - len(failed) >= enough:
                self._dropped_in_a_row = 0
                self._causes.clear()
                self._detail = ""
                return True
            self._dropped_in_a_row += 1
            self._causes.update(failed)
            self._detail = detail or self._detail
            if self._dropped_in_a_row < self._settings.give_up_after:
                return False
            dropped, reasons = self._dropped_in_a_row, self._causes.most_common(3)
            last, self._detail = self._detail, ""
            self._dropped_in_a_row = 0
            self._causes.clear()
        last = f" The last failure: {last}." if last else ""
        told = ", ".join(f"{reason} {count} times" for reason, count in reasons)
        raise JudgeUnavailable(
            f"{dropped} groups in a row had fewer than {enough} samples with a reward ({told}).{last} Replacing them "
            "would not end. `qreward check` asks every source; groups.give_up_after is how many groups are tried."
        )


__all__ = ["UNSCORED", "GroupGate", "group_means", "mean_of", "number_of"]
