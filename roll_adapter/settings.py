"""Where the configuration of a ROLL run comes from, and what ROLL's own configuration adds to it.

ROLL reads its YAML with dacite, which drops every key that a dataclass does not have without a word
(configs/base_config.py), so the tree must stand where ROLL keeps free-form settings: in
`rewards.<domain>.reward_manager_config`, a list that holds this one tree. Workers check it when they are initialised,
before training begins.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from qreward_plugins import ConfigurationError, Mistake
from qreward_plugins.config import Config, load_layers
from qreward_plugins.config.layers import ENVIRONMENT
from qreward_plugins.sharing import may_share

_log = logging.getLogger("roll_adapter")

DEADLINE_SHARE = 0.8
"""Share of ROLL's `rpc_timeout` that a sample may take at most: a call that is over it ends the training."""


def load_settings(
    worker_config: Any,
    *,
    domain: str,
    rpc_timeout_s: float | None = None,
    warn: bool = True,
    variables: Mapping[str, str] | None = None,
) -> Config:
    """The validated configuration of the reward workers of a domain.

    Args:
        worker_config: ROLL's `RewardConfig`; its `reward_manager_config` holds the tree, or `{config: path}`. Without
        it `QREWARD_CONFIG` of the worker's `system_envs` names the file.
        domain: the domain's name, for messages.
        rpc_timeout_s: ROLL's `rpc_timeout` in seconds; the deadline is cut to stay below it.
        warn: whether to warn of keys that ROLL prints.
        variables: the environment variables to read it with; default: those of this process.

    Raises `ConfigurationError` with every mistake.
    """
    origin = f"rewards.{domain}.reward_manager_config"
    trees = list(getattr(worker_config, "reward_manager_config", None) or [])
    if len(trees) > 1:
        problem = f"holds {len(trees)} trees; a domain has one."
        raise ConfigurationError([Mistake(origin, problem, "Put all sources and judges into one.")])
    # The workers of other domains ask, too, and theirs is another environment.
    path = (getattr(worker_config, "system_envs", None) or {}).get(ENVIRONMENT)
    tree = trees[0] if trees else path
    settings = load_layers(tree, origin=f"{origin}[0]", printed_by="ROLL" if warn else None, variables=variables)
    allowed_s = DEADLINE_SHARE * rpc_timeout_s if rpc_timeout_s else settings.engine.deadline_s
    if settings.engine.deadline_s > allowed_s:
        _log.warning(
            "engine.deadline_s of the domain %s is cut from %g to %g s: ROLL ends the training when a call takes "
            "longer than rpc_timeout (%g s).",
            domain,
            settings.engine.deadline_s,
            allowed_s,
            rpc_timeout_s,
        )
        settings = settings.model_copy(
            update={"engine": settings.engine.model_copy(update={"deadline_s": float(allowed_s)})}
        )
    return settings


def domain_of(cluster_name: str | None, rewards: Mapping[str, Any]) -> str:
    """The domain that a worker belongs to, by the name of its cluster, which ROLL makes of it (rlvr_pipeline.py)."""
    name = (cluster_name or "").removeprefix("reward-")
    return name if name in rewards or len(rewards) != 1 else next(iter(rewards))


def processes_of(settings: Config, rewards: Mapping[str, Any], *, domain: str | None = None) -> int:
    """How many workers share the limits of these settings: those of every domain that has a source of them, too, and
    of every domain whose sources cannot be known here. `domain` is the one of the process that asks, whose
    `system_envs` are in its environment.
    """
    own = _envs(rewards.get(domain)) if domain is not None else {}
    workers = 0
    for name, config in rewards.items():
        if is_ours(config) and (name == domain or _may_share_with(settings, config, name, own)):
            workers += int(getattr(config, "world_size", None) or 1)
    return max(1, workers)


def is_ours(config: Any) -> bool:
    """Whether the workers of a domain are `QRewardWorker`s, or of a class that is made of it."""
    from roll.utils.import_utils import safe_import_class

    from .worker import QRewardWorker

    path = getattr(config, "worker_cls", None)
    found = safe_import_class(path) if isinstance(path, str) else path
    # ROLL wraps workers as Ray actors in its driver only.
    return isinstance(found, type) and issubclass(found, QRewardWorker)


def _may_share_with(settings: Config, config: Any, domain: str, own: Mapping[str, str]) -> bool:
    """Whether the workers of another domain may use a source of `settings`, as far as this process can tell.

    Their environment is assumed to be this one's, without this domain's `system_envs` (`own`) and with theirs.
    """
    theirs = {name: value for name, value in os.environ.items() if name not in own} | _envs(config)
    try:
        other = load_settings(config, domain=domain, warn=False, variables=theirs)  # its own workers warn
    except ConfigurationError:
        return True  # its variables may be set for its own workers only; they say what is wrong with it
    return may_share(settings, other, their_environment=theirs)


def _envs(config: Any) -> dict[str, str]:
    envs = getattr(config, "system_envs", None) or {}
    return {str(name): str(value) for name, value in envs.items()}
