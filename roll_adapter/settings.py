"""Loads the configuration of a ROLL run.

ROLL reads its YAML with dacite, which drops unknown keys without a message (configs/base_config.py). So the tree must
be where ROLL keeps free-form settings: in `rewards.<domain>.reward_manager_config`, a list with this one tree. Workers
check it when they are initialised, before training begins.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from qreward_plugins import Config, ConfigurationError, Mistake
from qreward_plugins.adapters import ENVIRONMENT, load_layers, with_framework

DEADLINE_SHARE = 0.8
"""Most of ROLL's `rpc_timeout` that a sample may take. A call that exceeds the timeout ends the training."""

_NO_TREE = "is missing or empty. ROLL drops a key that it does not know, so it may be misspelt."
_TREE = "Write in the domain: reward_manager_config: [{config: /path/to/judges.yaml}]"

_NO_SERVER = (
    "Set judge_api_url of the domain. ROLL's cluster `reward_model` is reached through Ray only and has no address."
)


def load_settings(worker_config: Any, *, domain: str, rpc_timeout_s: float | None = None) -> Config:
    """The validated configuration of the reward workers of a domain.

    Args:
        worker_config: ROLL's `RewardConfig`; its `reward_manager_config` holds the tree, or `{config: path}`. Without
        it `QREWARD_CONFIG` of the worker's `system_envs` names the file.
        domain: the domain's name, for messages.
        rpc_timeout_s: ROLL's `rpc_timeout` in seconds; the deadline must stay below it.

    `framework://reward` is the server of ROLL's own key `judge_api_url` of the domain. Raises `ConfigurationError` with
    all mistakes.
    """
    origin = f"rewards.{domain}.reward_manager_config"
    trees = trees_of(getattr(worker_config, "reward_manager_config", None), origin)
    tree = trees[0] if trees else (getattr(worker_config, "system_envs", None) or {}).get(ENVIRONMENT)
    if tree is None and not os.environ.get(ENVIRONMENT):
        raise ConfigurationError([Mistake(origin, _NO_TREE, _TREE)])
    settings = load_layers(tree, origin=f"{origin}[0]", printed_by="ROLL")
    address = getattr(worker_config, "judge_api_url", None)
    settings = with_framework(
        settings, {"reward": address} if address else {}, framework=f"ROLL's domain {domain}", remedy=_NO_SERVER
    )
    if rpc_timeout_s and settings.engine.deadline_s > DEADLINE_SHARE * rpc_timeout_s:
        problem = f"ROLL ends the training when a call takes longer than rpc_timeout ({rpc_timeout_s:g} s)."
        remedy = f"Set it to {DEADLINE_SHARE * rpc_timeout_s:g} or less."
        raise ConfigurationError([Mistake("engine.deadline_s", problem, remedy)], origin=f"{origin}[0]")
    return settings


def trees_of(value: Any, origin: str) -> list[Any]:
    """The trees in a `reward_manager_config`: one, or none. Raises `ConfigurationError` for more, and for no list."""
    if value and (isinstance(value, str) or not isinstance(value, Sequence) or len(value) > 1):
        raise ConfigurationError([Mistake(origin, "must be a list with one tree, as a domain has one.", _TREE)])
    return list(value or [])


def phases_problem(pipeline_config: Any) -> str:
    """Why judges cannot share ROLL's GPUs and sleep while it trains, as a sentence; "" if they can."""
    if getattr(pipeline_config, "async_pipeline", False):
        return (
            "with async_generation_ratio above 0, ROLL asks for rewards while it trains; no time is left for the judge."
        )
    return ""


def groups_problem(pipeline_config: Any, worker_config: Any) -> Mistake | None:
    """Why no worker gets a whole group, so that siblings cannot be compared (kind `rank`); None if one does."""
    if getattr(pipeline_config, "generate_opt_level", 1) == 0:
        if int(getattr(worker_config, "world_size", None) or 1) > 1:
            problem = "several workers share a batch, and with it its groups, so siblings cannot be compared."
            return Mistake("world_size", problem, "Set it to 1; one worker scores a whole batch at once.")
    elif getattr(pipeline_config, "is_num_return_sequences_expand", False):
        problem = "ROLL asks for the rewards of a group one by one, so siblings cannot be compared."
        return Mistake("is_num_return_sequences_expand", problem, "Set it to false.")
    return None


def domain_of(cluster_name: str | None, rewards: Mapping[str, Any]) -> str:
    """The domain of a worker, from the name that ROLL gives its cluster (rlvr_pipeline.py)."""
    name = (cluster_name or "").removeprefix("reward-")
    return name if name in rewards or len(rewards) != 1 else next(iter(rewards))
