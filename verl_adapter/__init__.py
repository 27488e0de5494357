"""qreward for verl: the reward manager `qreward`, for `reward.reward_manager.name=qreward`.

An installed package registers itself in every process of a verl run (entry point `verl.plugins`, verl >= 0.9). Where
verl has no such entry points, name the class: `reward.reward_manager.source=importlib`, `name=QRewardManager`,
`module.path=pkg://verl_adapter`. The classes load on first use, because importing this package must not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batch import QRewardBatchManager
    from .manager import QRewardManager

__all__ = ["QRewardBatchManager", "QRewardManager"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "manager" if name == "QRewardManager" else "batch"
    return getattr(import_module(f".{module}", __name__), name)
