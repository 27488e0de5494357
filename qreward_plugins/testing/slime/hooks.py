"""How slime finds its hooks and what it makes of their answers.

Hooks are found by dotted path and by nothing else (`pkg.mod:name` fails), and a path is looked up once in the life of
a process. A test may also give the function itself. The answers are taken as slime takes them, traps included: an
answer of a dynamic filter that is not a `DynamicFilterOutput` counts by its truth, so a look-alike always keeps.
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
    """What a dynamic sampling filter answers, as in slime's `slime.rollout.filter_hub.base_types`.

    `keep_when_insufficient`: keep the group all the same where dropping it would take another round of prompts.
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

        Raises what importing raises: `ModuleNotFoundError`, `AttributeError`, and `ValueError` without any dot.
        """
        if not isinstance(path, str):
            return path
        if path not in self._found:
            module, _, name = path.rpartition(".")
            self._found[path] = getattr(importlib.import_module(module), name)
        return self._found[path]


def ask_filter(hook: Hook | None, args: Namespace, group: list[Any]) -> DynamicFilterOutput:
    """The verdict on one group.

    Also takes slime's own class, and that of an adapter which brings its own for where slime is not installed: any
    dataclass with just these fields.
    """
    if hook is None:
        return DynamicFilterOutput(keep=True)
    answer = hook(args, group)
    if not is_dataclass(answer) or {entry.name for entry in fields(answer)} != _FILTER_FIELDS:
        return DynamicFilterOutput(keep=answer)
    return DynamicFilterOutput(**{name: getattr(answer, name) for name in _FILTER_FIELDS})


def is_dropped(answer: DynamicFilterOutput, *, remaining: int, wanted: int) -> bool:
    """Whether a group goes: `remaining` groups are under way or kept, `wanted` make a batch."""
    return not answer.keep and not (answer.keep_when_insufficient and remaining <= wanted)


def _accepted(hook: Hook, options: dict[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(hook).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return options
    return {name: value for name, value in options.items() if name in parameters}


async def apply_sample_hooks(args: Namespace, loader: HookLoader, value: Any, **options: Any) -> Any:
    """Run `--rollout-sample-hook-path` on every sample in `value`, which may be nested lists.

    A hook may be async, gets the options that it names, and replaces the sample by what it returns (None: keeps it).
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
    """The reward of one sample: by its own `custom_rm_path` (an evaluation's data set sets it), else by the flag.

    Raises `NotImplementedError` where neither is set: slime would go on with `--rm-type`, whose functions live in
    slime.
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

    Only without `--custom-rm-path` each sample is asked for by itself. So the `custom_rm_path` of an evaluation's data
    set is not heeded for samples that fan out, while the flag is set: that is slime's order.
    """
    if args.custom_rm_path is not None:
        return await loader.load(args.custom_rm_path)(args, samples)
    return await asyncio.gather(*(reward_one(args, loader, sample) for sample in samples))
