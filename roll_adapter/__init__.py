"""qreward for ROLL: a reward worker, a rollout loop, and a mixin that rewards agentic trajectories.

    rewards:
      my_domain:
        worker_cls: roll_adapter.QRewardWorker
    user_defined_rollout_loop_cls: roll_adapter.QRewardRolloutLoop

ROLL imports the part before the last dot and looks the class up in it, in the driver and in its actors. The classes
load on first use, because importing this package must import neither ROLL nor torch.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"QRewardRolloutLoop": "loop", "QRewardTrajectoryMixin": "trajectories", "QRewardWorker": "worker"}

__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
