"""Custom reward functions, found and bound as verl does it (trainer/ppo/reward.py, utils/import_utils.py)."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

_PACKAGE, _FILE = "pkg://", "file://"


def load_extern_object(module_path: str, object_name: str) -> Any:
    """An object out of `pkg://a.b`, `/x.py` or `file:///x.py`.

    Raises `FileNotFoundError`, `RuntimeError` where the file cannot be executed, and `AttributeError`.
    """
    module = _module(module_path)
    return getattr(module, object_name)


def get_custom_reward_fn(config: Any) -> Callable[..., Any] | None:
    """The function that `reward.custom_reward_function` names, with its `reward_kwargs`. None: it names none."""
    node = config.reward.get("custom_reward_function") or {}
    path = node.get("path")
    if not path:
        return None
    name = node.get("name")
    assert name is not None
    return bind(load_extern_object(path, name), dict(node.get("reward_kwargs", {})))


def bind(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[..., Any]:
    """The function with arguments that take precedence over those of a call."""
    call = _call_async if inspect.iscoroutinefunction(function) else _call
    return partial(call, function, dict(arguments))


def default_compute_score(data_source: Any, *_: Any, **__: Any) -> Any:
    """verl's own reward function has graders for its data sets; there are none here."""
    raise NotImplementedError(
        f"Reward function is not implemented for {data_source=} (FakeVerlTrainer has none of verl's graders: hand it a "
        "function as `reward`, or set reward.custom_reward_function.path)"
    )


def _call(function: Callable[..., Any], extra: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
    return function(*arguments, **{**named, **extra})


async def _call_async(function: Callable[..., Any], extra: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
    return await function(*arguments, **{**named, **extra})


def _module(path: str) -> Any:
    if path.startswith(_PACKAGE):
        return importlib.import_module(path[len(_PACKAGE) :].replace("/", "."))
    path = path.removeprefix(_FILE)
    if not os.path.exists(path):
        raise FileNotFoundError(f"Custom module file not found: module_path={path!r}")
    spec = importlib.util.spec_from_file_location("custom_module", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RuntimeError(f"Error loading module from module_path={path!r}") from error
    return module
