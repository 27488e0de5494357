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

from qreward_plugins import ConfigurationError, GroupGate, Mistake, process_portal
from qreward_plugins.config import Config, load_layers
from qreward_plugins.config.framework import with_framework
from qreward_plugins.config.layers import ENVIRONMENT
from qreward_plugins.groups import RunningMeans
from qreward_plugins.portal import close_process_portals

_log = logging.getLogger("slime_adapter")

POST_PROCESS_FLAG = "--custom-reward-post-process-path slime_adapter.post_process"


class Adapter:
    """The state of one configuration in this process. Raises `ConfigurationError`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.portal = process_portal(config)
        self.facts = self.portal.facts()
        self.gate = GroupGate(config.groups)
        self.last_failure = ""
        """The detail of the last failure."""
        self.means = RunningMeans()
        self._warned = False

    def warn_of_missing_hook(self, args: Any) -> None:
        """Warn once if the flag that keeps failed samples out of the groups' statistics is not set."""
        if self._warned or self.config.on_failure not in ("auto", "neutral", "exclude"):
            return
        self._warned = True
        if getattr(args, "custom_reward_post_process_path", None) is None:
            _log.warning(
                "A sample has no reward. It is masked and gets the mean of its group, but still counts in its group's "
                "standard deviation. Add %s to prevent that.",
                POST_PROCESS_FLAG,
            )


_lock = threading.Lock()
_adapters: list[tuple[tuple[Any, ...], Adapter]] = []


def adapter_of(args: Any) -> Adapter:
    """The adapter for slime's `args`; the first call for a configuration makes it.

    The tree is `args.qreward` (slime makes every top-level key of the file behind `--custom-config-path` an attribute),
    or the file that `QREWARD_CONFIG` names; without either, the reward server of `--rm-url`. Raises
    `ConfigurationError` with all mistakes.

    `framework://NAME` is the router of the model NAME that slime serves (`--sglang-config`), and `framework://reward`
    is also the server of `--rm-url`.
    """
    inline, url = getattr(args, "qreward", None), getattr(args, "rm_url", None)
    servers = _servers(args)
    key = (inline, url, os.environ.get(ENVIRONMENT), servers)
    with _lock:
        for known, adapter in _adapters:
            if known == key:
                return adapter
        settings = with_framework(_load(inline, url), servers, framework="this run of slime", remedy=_NO_SERVER)
        adapter = Adapter(settings)
        _adapters.append((copy.deepcopy(key), adapter))
        return adapter


def close() -> None:
    """Close the engines of this process; pending rewards fail. Engines that are not closed here close at exit."""
    with _lock:
        _adapters.clear()
    close_process_portals()


def _load(inline: Any, url: str | None) -> Config:
    if inline is None and not url and not os.environ.get(ENVIRONMENT):
        raise ConfigurationError(
            [
                Mistake(
                    "qreward",
                    "there is no configuration.",
                    f"Give slime `--custom-config-path FILE` with the tree below the key `qreward`, name a file in "
                    f"{ENVIRONMENT} (in the runtime environment of the Ray job), or set --rm-url.",
                )
            ],
            origin="slime's arguments",
        )
    return load_layers(inline, default=_reward_server(url) if url else None, origin="qreward")


_NO_SERVER = "Add the model to the file of --sglang-config under this name, or set --rm-url for framework://reward."


def _servers(args: Any) -> dict[str, str]:
    """The URLs of slime's servers by name (slime/rollout/sglang_rollout.py: `get_model_url`)."""
    routers = getattr(args, "sglang_model_routers", None) or {}
    servers = {str(name): f"http://{host}:{port}" for name, (host, port) in routers.items()}
    if getattr(args, "rm_url", None):
        servers.setdefault("reward", args.rm_url)
    return servers


def _reward_server(url: str) -> dict[str, Any]:
    """The server of slime's own `remote_rm`, which takes prompt, response and label (slime/rollout/rm_hub)."""
    return {
        "sources": {"rm_url": {"kind": "http", "url": url}},
        "judges": {"rm_url": {"kind": "function", "sources": ["rm_url"]}},
    }
