"""What ROLL's `DataProto` and the fake's make of the same calls: results, and errors. For ROLL's process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .twins import KINDS, PROMPT_LENGTH, PROMPTS, difference, prompts


def _after(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The data itself, after something was done to it."""

    def then(data: Any) -> Any:
        act(data)
        return data

    return then


def _with(data: Any, tensors: dict[str, torch.Tensor], **meta_info: Any) -> Any:
    return type(data).from_dict(tensors, meta_info=meta_info)


OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda data: data[1:4],
    "a row": lambda data: data[2],
    "rows": lambda data: data[[3, 1]],
    "rows of a mask": lambda data: data[torch.tensor([1, 0, 1, 0, 0, 1]).bool()],
    "rows of an array": lambda data: data[np.array([5, 0])],
    "repeat": lambda data: data.repeat(3),
    "repeat as a whole": lambda data: data.repeat(2, interleave=False),
    "pop": lambda data: data.pop(["input_ids"], ["length"]),
    "what pop leaves": _after(lambda data: data.pop(["input_ids"], ["length"])),
    "rename": lambda data: data.rename("input_ids", "tokens"),
    "select": lambda data: data.select(["input_ids"], ["length"], ["step"]),
    "reorder": _after(lambda data: data.reorder(torch.arange(PROMPTS).flip(0))),
    "union": lambda data: data.union(
        type(data).from_dict({"new": torch.arange(PROMPTS)}, {"letter": list("abcdef")}, {"step": 1, "more": [1]})
    ),
}

REFUSED: dict[str, Callable[[Any], Any]] = {
    "more chunks than rows": lambda data: data.chunk(PROMPTS + 1),
    "a union of tensors that differ": lambda data: data.union(
        _with(data, {"input_ids": torch.zeros(PROMPTS, PROMPT_LENGTH, dtype=torch.long)})
    ),
    "a union of meta_info that differs": lambda data: data.union(_with(data, {"new": torch.zeros(PROMPTS)}, step=2)),
    "a union of other length": lambda data: data.union(_with(data, {"new": torch.zeros(PROMPTS - 1)})),
    "a tensor of other length": lambda data: data.batch.__setitem__("new", torch.zeros(PROMPTS - 1)),
    "no tensors": lambda data: type(data).from_dict({}),
    "a list as a column": lambda data: type(data).from_single_dict({"letter": [1]}),
    "a concatenation of other tensors": lambda data: type(data).concat(
        [data[:2], data[2:].rename("input_ids", "tokens")]
    ),
    "a row that is no number": lambda data: data[1.5],
    "a tensor that is not there": lambda data: data.batch["nowhere"],
    "a tensor for no batch": lambda data: type(data)().batch.__setitem__("new", torch.zeros(1)),
    "a size of columns": lambda data: data.non_tensor_batch.batch_size,
}


def operations() -> dict[str, str]:
    return {name: difference(*(act(prompts(kind)) for kind in KINDS)) for name, act in OPERATIONS.items()}


def refusals() -> dict[str, str]:
    """Each is an error, of the same type for both."""
    told = {}
    for name, act in REFUSED.items():
        real, fake = (_error(act, prompts(kind)) for kind in KINDS)
        told[name] = "" if real == fake != "none" else f"{fake}, not {real}"
    return told


def _error(act: Callable[[Any], Any], data: Any) -> str:
    try:
        act(data)
    except Exception as error:
        return type(error).__name__
    return "none"


def groups() -> dict[str, str]:
    told = {}
    for keys in ("domain", "length", ["domain", "length"]):
        real, fake = (prompts(kind).group_by(keys) for kind in KINDS)
        told[f"by {keys}"] = "" if list(real) == list(fake) else f"{list(fake)}, not {list(real)}"
        told |= {f"by {keys}: {name}": difference(real[name], fake[name]) for name in real if name in fake}
    return told


def chunks() -> dict[str, str]:
    return {
        f"{place} of {count}": difference(*pair)
        for count in (1, 2, 4, PROMPTS)
        for place, pair in enumerate(zip(*(prompts(kind).chunk(count) for kind in KINDS), strict=True))
    }


def concatenations() -> dict[str, str]:
    """Metrics are gathered into lists, of the same and of other names, once and again."""
    return {
        name: difference(real, fake)
        for name, real, fake in zip(("first", "second", "both"), *map(_concatenated, KINDS), strict=True)
    }


def _concatenated(kind: Any) -> list[Any]:
    data = prompts(kind)
    parts = [data[[row]] for row in range(PROMPTS)]
    for row, part in enumerate(parts):
        part.meta_info = {
            "row": row,
            "metrics": {"number": float(row), f"numbers{row % 2}": [row, row], "word": "text"},
        }
    first, second = kind.concat(parts[:3]), kind.concat(parts[3:])
    return [first, second, kind.concat([first, second])]
