"""Loads the configuration of a verl run, and its reward function as a source.

The tree may be inline (`+qreward.sources...`, or a config group `+qreward=name`), in a file that `+qreward.config` or
the environment variable `QREWARD_CONFIG` names, or in both; inline keys win. A tree without judges gets one that runs
verl's reward function, so a user who has a function needs no configuration.

Sync functions run in worker processes, which can be killed. The function that verl passes is often not picklable (it
comes from a file that is no importable module). So a worker loads it by its path. It does not import verl for that,
which takes seconds and 400 MB at each start of a worker.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins import Config
from qreward_plugins.adapters import (
    FunctionSource,
    environment_secrets,
    load_layers,
    secrets_in,
    with_framework,
    with_secrets,
)

ComputeScore = Callable[..., Any]

COMPUTE_SCORE = "verl_adapter:compute_score"
"""The `function` of a source that stands for the reward function of this verl run, default or custom."""

_DEFAULT = "verl.utils.reward_score:default_compute_score"
_SHORTEST_SECRET_CHARS = 8


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


def open_reward_functions(
    settings: Config,
    *,
    trainer: DictConfig | None,
    compute_score: ComputeScore | None,
    kwargs: Mapping[str, Any] = MappingProxyType({}),
    processes: int = 1,
) -> dict[str, FunctionSource]:
    """The sources of `settings` that run verl's reward function, by name.

    Args:
        settings: their configuration; sync functions run in worker processes unless a source has `mode: thread`.
        trainer: verl's configuration, from which a worker process loads the function.
        compute_score: the function that verl loaded in this process.
        kwargs: what verl adds to every call (the router's address and the reward model's tokenizer).
        processes: the number of reward workers; together they start no more worker processes than there are processors.
    """
    secrets = reward_secrets(trainer, compute_score)
    custom = _custom_reward_function(trainer)
    bound_to_this_process = bool(kwargs) or (custom is None and isinstance(compute_score, partial))
    path, arguments = _DEFAULT, kwargs
    if custom is not None:
        path = f"{_place(str(custom['path']))}:{custom.get('name')}"
        arguments = {**kwargs, **(custom.get("reward_kwargs") or {})}
    here = None if compute_score is None else partial(compute_score, **kwargs)
    opened = {}
    is_async = inspect.iscoroutinefunction(compute_score)
    for name, node in settings.sources.items():
        if not isinstance(node, FunctionSource.Config) or node.function != COMPUTE_SCORE:
            continue
        if node.workers is None and not node.devices:
            node = node.model_copy(update={"workers": max(1, (os.cpu_count() or 1) // processes)})
        if here is not None and not node.devices and (is_async or bound_to_this_process):
            node = node if is_async else node.model_copy(update={"mode": "thread"})
            opened[name] = FunctionSource(name, node, loader=lambda: here, secrets=secrets)
        else:
            node = node.model_copy(update={"function": path, "kwargs": {**node.kwargs, **with_secrets(arguments)}})
            opened[name] = FunctionSource(name, node, secrets=secrets)
    return opened


def reward_secrets(trainer: DictConfig | None, compute_score: ComputeScore | None = None) -> tuple[str, ...]:
    """The secrets among the arguments that verl binds to its reward function.

    These are values under a key whose name suggests a secret (`reward_kwargs.api_key`), and values of environment
    variables with such a name. Of a URL only the password and the query count. verl resolves its configuration, so a
    value from the environment is recognised by its text. Older versions of verl pass only `compute_score`, to which the
    arguments are bound.
    """
    given = [_container(value) for value in _bound(compute_score) if isinstance(value, Mapping)]
    given.append((_custom_reward_function(trainer) or {}).get("reward_kwargs"))
    url = None if trainer is None else OmegaConf.select(trainer, "reward.sandbox_fusion.url")
    found = [str(url)] if url else []
    variables = [value for value in environment_secrets() if len(value) >= _SHORTEST_SECRET_CHARS]
    for tree in given:
        found += secrets_in(with_secrets(tree))
        texts = list(secrets_in(with_secrets(tree, secret=True)))  # all that there are
        found += [text for text in texts if "://" in text]
        found += [value for text in texts for value in variables if value in text]
    return tuple(dict.fromkeys(found))


def _bound(function: Any) -> Iterator[Any]:
    """The mappings of arguments bound to a function, by `partial`, or in its closure (verl 0.4 and 0.5)."""
    while isinstance(function, partial):
        yield from (function.keywords, *function.args)
        function = function.func
    for cell in getattr(function, "__closure__", None) or ():
        with suppress(ValueError):  # still empty
            yield cell.cell_contents


def _container(value: Any) -> Any:
    """The value as plain mappings and lists."""
    if OmegaConf.is_config(value):
        return OmegaConf.to_container(value, resolve=True)
    if isinstance(value, Mapping):
        return {key: _container(item) for key, item in value.items()}
    return [_container(item) for item in value] if isinstance(value, (list, tuple)) else value


def _place(path: str) -> str:
    """The module or the file that a path of verl names (utils/import_utils.py: `load_module`)."""
    if path.startswith("pkg://"):
        return path.removeprefix("pkg://").replace("/", ".")
    return path.removeprefix("file://")


def _custom_reward_function(trainer: DictConfig | None) -> Mapping[str, Any] | None:
    if trainer is None:
        return None
    for key in ("reward.custom_reward_function", "custom_reward_function"):
        node = OmegaConf.select(trainer, key)
        if node is not None and node.get("path"):
            return OmegaConf.to_container(node, resolve=True)  # type: ignore[return-value]
    return None
