"""Loads slime's hooks, and treats their results as slime does.

Hooks are loaded by dotted path only (`pkg.mod:name` fails), once in a process. A test may also pass the function
itself. As in slime, a result of a dynamic filter that is not a `DynamicFilterOutput` counts by its truth value, so
another object with such fields always keeps the group.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeAlias

from .samples import SlimeSample

Hook: TypeAlias = Callable[..., Any]


@dataclass
class DynamicFilterOutput:
    """The result of a dynamic sampling filter, as in slime's `slime.rollout.filter_hub.base_types`.

    `keep_when_insufficient`: keep the group anyway if dropping it would need another round of prompts.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


_FILTER_FIELDS = {entry.name for entry in fields(DynamicFilterOutput)}


class HookLoader:
    """Functions by dotted path, each looked up once."""

    def __init__(self) -> None:
        self._found: dict[str, Hook] = {}

    def load(self, path: str | Hook) -> Hook:
        """The function named by `path`; a function is returned as it is.

        Raises the errors of the import: `ModuleNotFoundError`, `AttributeError`, and `ValueError` without any dot.
        """
        if not isinstance(path, str):
            return path
        if path not in self._found:
            module, _, name = path.rpartition(".")
            self._found[path] = getattr(importlib.import_module(module), name)
        return self._found[path]


def ask_filter(hook: Hook | None, args: Namespace, group: list[Any]) -> DynamicFilterOutput:
    """The filter's result for one group.

    It accepts any dataclass with exactly these fields, so also slime's own class, and an adapter's own for use without
    slime.
    """
    if hook is None:
        return DynamicFilterOutput(keep=True)
    answer = hook(args, group)
    if not is_dataclass(answer) or {entry.name for entry in fields(answer)} != _FILTER_FIELDS:
        return DynamicFilterOutput(keep=answer)
    return DynamicFilterOutput(**{name: getattr(answer, name) for name in _FILTER_FIELDS})


def is_dropped(answer: DynamicFilterOutput, *, remaining: int, wanted: int) -> bool:
    """Whether a group is dropped. `remaining` groups are running or kept; `wanted` make a batch."""
    return not answer.keep and not (answer.keep_when_insufficient and remaining <= wanted)


def _accepted(hook: Hook, options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(hook).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


async def apply_sample_hooks(args: Namespace, loader: HookLoader, value: Any, **options: Any) -> Any:
    """Run `--rollout-sample-hook-path` on every sample in `value`, which may be nested lists.

    A hook may be async, gets the options that it names, and may return another sample, or None to keep the sample.
    Raises `TypeError` if it returns anything else.
    """
    if not args.rollout_sample_hook_path:
        return value
    if isinstance(value, list):
        return [await apply_sample_hooks(args, loader, item, **options) for item in value]
    for path in args.rollout_sample_hook_path:
        hook = loader.load(path)
        answer = hook(args, value, **_accepted(hook, options))
        if inspect.isawaitable(answer):
            answer = await answer
        if answer is not None:
            if not isinstance(answer, SlimeSample):
                raise TypeError(f"the sample hook {path!r} returned {type(answer).__name__}: return the sample or None")
            value = answer
    return value


async def reward_one(args: Namespace, loader: HookLoader, sample: SlimeSample) -> Any:
    """The reward of one sample, by its own `custom_rm_path` (which an evaluation's data set sets), else by the flag.

    Raises `NotImplementedError` if neither is set: slime would use `--rm-type`, whose functions are part of slime.
    """
    path = sample.custom_rm_path or args.custom_rm_path
    if path:
        return await loader.load(path)(args, sample)
    metadata = sample.metadata if isinstance(sample.metadata, dict) else {}
    rm_type = (metadata.get("rm_type") or args.rm_type or "").strip()
    if rm_type:
        raise NotImplementedError(
            f"rm_type {rm_type!r} is a function inside slime: test it with slime, or set custom_rm_path"
        )
    raise NotImplementedError("no reward is specified: set custom_rm_path")


async def reward_many(args: Namespace, loader: HookLoader, samples: list[Any]) -> Any:
    """The rewards of a group, or of the samples that one generation fanned out into: one call with the list.

    Without `--custom-rm-path` there is one call for each sample. So, as in slime, with the flag the `custom_rm_path` of
    an evaluation's data set is ignored for samples that fan out.
    """
    if args.custom_rm_path is not None:
        return await loader.load(args.custom_rm_path)(args, samples)
    return await asyncio.gather(*(reward_one(args, loader, sample) for sample in samples))
