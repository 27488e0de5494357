"""Loads the qreward configuration of a verl run.

The tree may be inline (`+qreward.sources...`, or a config group `+qreward=name`), in a file that `+qreward.config` or
the environment variable `QREWARD_CONFIG` names, or in both; inline keys win. A tree without judges gets one that runs
verl's reward function, so a user who has a function needs no configuration.
"""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from qreward_plugins import Config
from qreward_plugins.adapters import load_layers, with_framework

COMPUTE_SCORE = "verl_adapter:compute_score"
"""The `function` of a source that stands for the reward function of this verl run, default or custom."""


def load_settings(trainer: DictConfig | None, tree: Any = None) -> Config:
    """The validated configuration of a verl run.

    Args:
        trainer: verl's configuration; its node `qreward` is the inline tree.
        tree: an inline tree that replaces that node.

    Raises `ConfigurationError` with all mistakes.
    """
    inline = tree if tree is not None else (trainer.get("qreward") if trainer is not None else None)
    return load_layers(inline, default=_REWARD_FUNCTION, printed_by="verl")


def with_reward_model(config: Config, address: str | None) -> Config:
    """The configuration with verl's own reward model in the place of `framework://reward`. `address` is that of its
    router ("host:port"), None if verl serves none. Raises `ConfigurationError` if it is needed and there is none.
    """
    addresses = {} if address is None else {"reward": f"http://{address}"}
    remedy = (
        "Set reward.reward_model.enable=True, its model_path, and reward.custom_reward_function.path (any function), "
        "without which verl asks no reward manager."
    )
    return with_framework(config, addresses, framework="this run of verl", remedy=remedy)


_REWARD_FUNCTION = {
    "sources": {"compute_score": {"kind": "function", "function": COMPUTE_SCORE}},
    "judges": {"compute_score": {"kind": "function", "sources": ["compute_score"]}},
}
