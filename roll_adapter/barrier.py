"""Lets a failed trajectory of an agentic pipeline wait for its group, to add the mean of its siblings.

ROLL spreads a group over environment workers, which are processes. Its trajectories meet in ROLL's queue only after
their rewards are final (rollout_scheduler.py, `GroupQueue.put`). So they meet here before: in an actor of the Ray job,
or without Ray in an object of this process. A failed trajectory asks again every `POLL_S` seconds, in the thread of its
environment, so the actor holds no calls. If the actor is lost, the mean of what this process has scored takes the place
of the group's.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qreward_plugins.adapters import RunningMeans, described_error, mean_of, ray_is_up, shared_actor

_log = logging.getLogger("roll_adapter")

NAME = "qreward-groups"
"""The name of the actor in its job."""

POLL_S = 0.5
ANSWER_S = 60.0
"""Most seconds for an answer of the actor, which takes some to start; after that it counts as lost."""

KEPT = 65_536
"""Most groups that are kept; the least recently used is dropped first."""

means = RunningMeans()
"""The means of what this process has scored, by group."""


@dataclass(slots=True)
class _Group:
    """The rewards of a group by trajectory, None for a failed one; and the mean at which it is closed, None if open."""

    rewards: dict[str, float | None] = field(default_factory=dict)
    mean: float | None = None


class Barrier:
    """The groups that are being scored, and the means of closed ones. Thread-safe.

    A group with a failed trajectory closes at the mean of its scored ones: when `size` have reported, or early. After
    that the mean does not change, and trajectories that come later get it, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: OrderedDict[str, _Group] = OrderedDict()

    def report(self, key: str, trajectory: str, reward: float | None, size: int, close: bool) -> float | None:
        """Record a trajectory's reward (None: it failed), and close its group early with `close`. Return the number
        that it adds instead of its own: None for a scored one that keeps its own, and for a failed one while its group
        is open. May be called again.
        """
        with self._lock:
            group = self._groups.setdefault(key, _Group())
            self._groups.move_to_end(key)
            if len(self._groups) > KEPT:
                self._groups.popitem(last=False)
            if group.mean is not None and trajectory not in group.rewards:
                return group.mean
            group.rewards[trajectory] = reward
            failed = None in group.rewards.values()
            if group.mean is None and failed and (close or len(group.rewards) >= size):
                group.mean = mean_of(group.rewards.values())
            return group.mean if reward is None else None


class BarrierActor:
    """A `Barrier` as an actor of Ray, whose async methods are served on one event loop."""

    def __init__(self) -> None:
        self._barrier = Barrier()

    async def report(self, *reported: Any) -> float | None:
        return self._barrier.report(*reported)


_here = Barrier()


def report(*reported: Any) -> float | None:
    """`Barrier.report` of this job; without Ray, of this process. Raises Ray's errors."""
    if not ray_is_up():
        return _here.report(*reported)
    import ray

    mean: float | None = ray.get(shared_actor(NAME, BarrierActor).report.remote(*reported), timeout=ANSWER_S)
    return mean


def settle(
    key: str, trajectory: str, reward: float | None, *, size: int, wait_s: float, running: Callable[[], bool]
) -> float | None:
    """The number that a trajectory of a group of `size` adds instead of its own; None to keep its own.

    A failed one (`reward` None) always gets a number. It blocks its thread until its group is closed, at most `wait_s`
    seconds, and not once `running` returns False. Raises nothing but what `running` raises.
    """
    if reward is not None:
        means.add(key, reward)
    ends_at = time.monotonic() + wait_s
    try:
        while (mean := report(key, trajectory, reward, size, False)) is None and reward is None:
            if not running() or time.monotonic() >= ends_at:
                return report(key, trajectory, reward, size, True)
            time.sleep(min(POLL_S, wait_s))
        return mean
    except Exception as error:
        _log.warning("the barrier of groups does not answer (%s)", described_error(error))
        return means.mean(key) if reward is None else None
