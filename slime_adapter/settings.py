"""Loads the configuration of a slime run, and keeps the state that belongs to it.

slime calls a bare function with `args` as the only context, from different event loops (training and evaluation share
one, a fully-async rollout has another). So the state that outlives a call is kept here, by configuration: the core's
portal with its queue and limits, the gate that drops groups, and the means of groups.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
from typing import Any

from qreward_plugins import Config, ConfigurationError, GroupGate, Mistake, process_portal
from qreward_plugins.adapters import (
    ENVIRONMENT,
    VALUE,
    RunningMeans,
    close_process_portals,
    did_you_mean,
    judge_kind_of,
    load_layers,
    refuse_comparing,
    refuse_parts,
    with_framework,
    without_colocated,
)

from .phases import Phases, problem_of

_log = logging.getLogger("slime_adapter")

POST_PROCESS_FLAG = "--custom-reward-post-process-path slime_adapter.post_process"


class Adapter:
    """The state of one configuration in this process. Raises `ConfigurationError`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.portal = process_portal(config)
        self.phases = Phases(self.portal)
        self.facts = self.portal.facts()
        self.gate = GroupGate(config.groups)
        self.last_failure = ""
        """The detail of the last failure."""
        self.means = RunningMeans()
        self.training = self.portal.training_log()
        """Records what slime trains on; None without a journal."""
        self._warned = False

    def warn_of_missing_hook(self, args: Any) -> None:
        """Warn once if the flag that keeps failed samples out of the groups' statistics is not set."""
        if self._warned or getattr(args, "custom_reward_post_process_path", None) is not None:
            return
        self._warned = True
        _log.warning(
            "A sample has no reward. It gets the mean of its group, but still counts in its group's standard "
            "deviation. Add %s to prevent that.",
            POST_PROCESS_FLAG,
        )


_ONE_BY_ONE = "slime asks for the rewards of a group one by one, and for none of a sample that was aborted."

_lock = threading.Lock()
_adapters: list[tuple[tuple[Any, ...], Adapter]] = []


def adapter_of(args: Any) -> Adapter:
    """The adapter for slime's `args`; the first call for a configuration makes it.

    The tree is `args.qreward` (slime makes every top-level key of the file behind `--custom-config-path` an attribute),
    or the file that `QREWARD_CONFIG` names; without either, the reward server of `--rm-url`. Raises
    `ConfigurationError` with all mistakes.

    `framework://NAME` is the router of the model NAME that slime serves (`--sglang-config`), `framework://rollout` that
    of the model that is trained, and `framework://reward` also the server of `--rm-url`.
    """
    inline, url, servers = getattr(args, "qreward", None), getattr(args, "rm_url", None), _servers(args)
    key = inline, url, os.environ.get(ENVIRONMENT), servers
    with _lock:
        found = next((adapter for known, adapter in _adapters if known == key), None)
        if found is not None:
            return found
        settings = with_framework(_load(inline, url), servers, framework="this run of slime", remedy=_NO_SERVER)
        problem, remedy = problem_of(args)
        if problem:
            settings = without_colocated(settings, problem, remedy=remedy)
        if not getattr(args, "group_rm", False):
            refuse_comparing(settings, _ONE_BY_ONE, remedy="Set --group-rm.")
        refuse_parts(
            settings, turns="slime has one text of a response.", dense="slime's batch has one reward of a sample."
        )
        adapter = Adapter(settings)
        _check_reward_keys(args, adapter)
        _adapters.append((copy.deepcopy(key), adapter))
        return adapter


def end_rewards() -> None:
    """Let judges on the trainer's GPUs sleep, and wait for that: the rollout asks for no reward any more."""
    with _lock:
        adapters = [adapter for _, adapter in _adapters]
    for adapter in adapters:
        adapter.phases.end()


def close() -> None:
    """Close the engines of this process; pending rewards fail. Engines that are not closed here close at exit."""
    with _lock:
        _adapters.clear()
    close_process_portals()


def _load(inline: Any, url: str | None) -> Config:
    if inline is None and not url and not os.environ.get(ENVIRONMENT):
        raise ConfigurationError([_MISSING], origin="slime's arguments")
    return load_layers(inline, default=_reward_server(url) if url else None, origin="qreward", printed_by="slime")


_MISSING = Mistake(
    "qreward",
    "there is no configuration.",
    "Give slime `--custom-config-path FILE` with `sources` and `judges` below the key `qreward`, name a file in "
    f"{ENVIRONMENT} (in the runtime environment of the Ray job), or set --rm-url.",
)


def _check_reward_keys(args: Any, adapter: Adapter) -> None:
    """Raise `ConfigurationError` for a key that no judge gives."""
    kinds = [judge_kind_of(judge) for judge in adapter.config.judges.values()]
    if not kinds or any(kind.asks == VALUE or not kind.__module__.startswith("qreward_plugins.") for kind in kinds):
        return  # verdicts may have components that the configuration does not name
    known = ("score", *adapter.facts.components)
    # slime takes the key of training for evaluations, too, unless they have their own.
    keys = {getattr(args, f"{name}_key", None): f"--{name}-key" for name in ("eval_reward", "reward")}
    mistakes = [
        Mistake(flag.replace("_", "-"), f"no judge gives {key!r}.", f"{did_you_mean(key, known)}It is one of {known}.")
        for key, flag in keys.items()
        if key and key not in known
    ]
    if mistakes:
        raise ConfigurationError(mistakes, origin="slime's flags")


_NO_SERVER = "Add the model to the file of --sglang-config under this name, or set --rm-url for framework://reward."


def _servers(args: Any) -> dict[str, str]:
    """The URLs of slime's servers by name (slime/rollout/sglang_rollout.py: `get_model_url`)."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    servers = {str(name): f"http://{host}:{port}" for name, (host, port) in routers.items()}
    if (host := getattr(args, "sglang_router_ip", None)) and (port := getattr(args, "sglang_router_port", None)):
        servers.setdefault("rollout", f"http://{host}:{port}")
    if getattr(args, "rm_url", None):
        servers.setdefault("reward", args.rm_url)
    return servers


def _reward_server(url: str) -> dict[str, Any]:
    """The server of slime's own `remote_rm`, which takes prompt, response and label (slime/rollout/rm_hub)."""
    return {
        "sources": {"rm_url": {"kind": "http", "url": url}},
        "judges": {"rm_url": {"kind": "function", "sources": ["rm_url"]}},
    }
