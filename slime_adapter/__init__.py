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
from typing import Any

_HOMES = {
    "hooks": ("drop_failed_and_flat_groups", "drop_failed_groups", "eval_rollout", "log_eval", "log_rollout"),
    "normalization": ("post_process",),
    "scoring": ("reward",),
    "settings": ("close",),
    "start": ("DataSource", "check"),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f".{home}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
