"""Builds the arguments of a reward function: keywords or a `Sample`, for one sample or a list of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from ..samples import Sample
from ..system.functions import Function, FunctionNotFound, Loader, is_async

_FIELDS = ("data_source", "solution_str", "ground_truth", "extra_info")

Convention: TypeAlias = Literal["fields", "sample"]
Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional arguments and the keyword arguments of a call."""


class FunctionArguments:
    """The arguments of one function's calls. `kwargs` are added to each; `batched`: a call gets several samples."""

    def __init__(self, function: Function, convention: Convention, kwargs: Mapping[str, Any], *, batched: bool) -> None:
        self._convention = convention
        self._kwargs = dict(kwargs)
        self._plural = batched and takes_plurals(function)

    def of(self, sample: Sample) -> Arguments:
        """Return the arguments of a call for one sample."""
        if self._convention == "sample":
            return (sample,), dict(self._kwargs)
        return (), {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": dict(sample.extras),
            **self._kwargs,
        }

    def of_batch(self, samples: Sequence[Sample]) -> Arguments:
        """Return the arguments of a call for several samples: each is a list."""
        if self._convention == "sample":
            return (list(samples),), dict(self._kwargs)
        each = [self.of(sample)[1] for sample in samples]
        named = {**self._kwargs, **{name: [fields[name] for fields in each] for name in _FIELDS}}
        return (), with_plurals(named) if self._plural else named


def is_ready_made(path: str) -> bool:
    """Whether a function at this path, or of this module, is one of the ready-made checks."""
    return path.startswith("qreward_plugins.checks")


def options_of(function: Callable[..., Any]) -> list[str]:
    """The arguments of a ready-made check that a configuration may set; empty for another function. Ready-made checks
    ignore what they do not know, because frameworks pass more than they need, so a misspelt one would be lost.
    """
    if not is_ready_made(str(getattr(function, "__module__", ""))):
        return []
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]


def arguments_taken(function: Callable[..., Any]) -> Convention:
    """Return the value of `arguments` with which a function can be called. Raises ValueError if it can be called with
    neither.
    """
    fields, sample = misfit(function, (), dict.fromkeys(_FIELDS)), misfit(function, (None,), {})
    if fields and sample:
        raise ValueError(f"{fields}, or with one Sample; let it take these, or add **_ to its parameters")
    return "sample" if fields else "fields"


def misfit(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Say what a function takes, if it cannot be called with these arguments; "" if it can."""
    try:
        # A decorator may add arguments, or leave some out.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):  # its signature cannot be read
        return ""
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        names = [*(["a Sample"] if args else []), *kwargs]
        given = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
        taken = ", ".join(map(str, signature.parameters))
        return f"it takes ({taken}), and is called with {given}" + " by name" * (not args)
    return ""


def with_plurals(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments under verl's names for lists."""
    return {f"{name}s" if name in _FIELDS else name: value for name, value in arguments.items()}


def takes_plurals(function: Callable[..., Any]) -> bool:
    """Whether a function has the parameter `solution_strs`."""
    try:
        return "solution_strs" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # its signature cannot be read
        return False


class ListLoader:
    """Loads a function in a worker process; picklable. What it returns becomes a list there, so that this process need
    not import torch to read a tensor. `batched`: a call gets lists. `unseen`: this process has not loaded the function,
    so it is checked there.
    """

    def __init__(self, loader: Loader, batched: bool, *, unseen: bool) -> None:
        self._loader = loader
        self._batched = batched
        self._unseen = unseen

    def __call__(self) -> Function:
        function = self._loader()
        if self._unseen and is_async(function):
            raise FunctionNotFound("it is async, and would run in a process without devices; define it with `def`.")
        plural = self._unseen and self._batched and takes_plurals(function)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return as_list(function(*args, **(with_plurals(kwargs) if plural else kwargs)))

        return called


def as_list(values: Any) -> Any:
    """Convert an array or a tensor to a list. Anything else is returned as it is."""
    tolist: Callable[[], Any] | None = getattr(values, "tolist", None)
    return tolist() if callable(tolist) else values
