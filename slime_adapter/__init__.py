"""qreward for slime: a reward function and hooks, which slime's flags name by path.

    --custom-rm-path slime_adapter.reward
    --custom-reward-post-process-path slime_adapter.post_process
    --dynamic-sampling-filter-path slime_adapter.drop_failed_groups
    --custom-rollout-log-function-path slime_adapter.log_rollout
    --custom-eval-rollout-log-function-path slime_adapter.log_eval
    --data-source-path slime_adapter.DataSource
    --eval-function-path slime_adapter.eval_rollout          (where --group-rm is set)

slime's `load_function` imports the part before the last dot as a module and looks the rest up in it. So everything that
a flag may name is an attribute of this package. The names load on first use, because slime also imports this package in
processes that never score; importing it must import neither slime nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .hooks import drop_failed_and_flat_groups, drop_failed_groups, eval_rollout, log_eval, log_rollout
    from .normalization import post_process
    from .scoring import reward, reward_group, reward_sample
    from .settings import close
    from .start import DataSource, check

_HOMES = {
    "DataSource": "start",
    "check": "start",
    "close": "settings",
    "drop_failed_and_flat_groups": "hooks",
    "drop_failed_groups": "hooks",
    "eval_rollout": "hooks",
    "log_eval": "hooks",
    "log_rollout": "hooks",
    "post_process": "normalization",
    "reward": "scoring",
    "reward_group": "scoring",
    "reward_sample": "scoring",
}

__all__ = [
    "DataSource",
    "check",
    "close",
    "drop_failed_and_flat_groups",
    "drop_failed_groups",
    "eval_rollout",
    "log_eval",
    "log_rollout",
    "post_process",
    "reward",
    "reward_group",
    "reward_sample",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f".{home}", __name__), name)
