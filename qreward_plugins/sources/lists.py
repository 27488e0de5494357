"""Several calls in one request: how their bodies are joined, and how the reply and its usage are divided."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..samples.spent import Usage

if TYPE_CHECKING:
    from .base import Request, Source

Items = Callable[[Any], list[Any]]


def one(value: Any) -> list[Any]:
    """The value of a key in the body of one call is one item of the list."""
    return [value]


def several(value: Any) -> list[Any]:
    """The value of a key is a list already, in the body of one call, too."""
    return list(value)


@dataclass(frozen=True)
class Lists:
    """How a server takes several calls. `keys`: the keys of the body whose values become lists, each with the function
    that turns the value of one call into items. `parts` returns the results of a reply: the index of each, None if it
    has none, and the result as the reply to one call; it may raise LookupError, TypeError or ValueError.
    """

    keys: Mapping[str, Items]
    parts: Callable[[Any], Sequence[tuple[Any, Any]]]

    def join(self, bodies: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return one body for several calls."""
        joined = {key: [item for body in bodies for item in items(body[key])] for key, items in self.keys.items()}
        return {**bodies[0], **joined}

    def take_apart(self, content: Any, count: int) -> list[Any] | str:
        """Return the results of a reply to `count` calls, in their order; or what is wrong with the reply."""
        try:
            parts = list(self.parts(content))
        except (LookupError, TypeError, ValueError, AttributeError):
            return "no list of results"
        if len(parts) != count:
            return f"{len(parts):,} results for {count} calls"
        # True is 1 in Python.
        by_index = {index: part for index, part in parts if type(index) is int}
        if by_index.keys() != set(range(count)):
            return "results whose indices are not those of the calls"
        return [by_index[index] for index in range(count)]


def listed(items: Any) -> list[Any]:
    """Return a list as it is. Raises TypeError for anything else."""
    if not isinstance(items, list):
        raise TypeError
    return items


def numbered(items: Any, part: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """The results of a server that states the index of each. Raises TypeError if `items` is no list of objects."""
    return [(item.get("index"), part(item)) for item in listed(items)]


def in_order(items: Any, part: Callable[[Any], Any]) -> list[tuple[Any, Any]]:
    """The results of a server that keeps the order and states no index."""
    return [(position, part(item)) for position, item in enumerate(listed(items))]


def divided(usage: Usage, requests: Sequence[Request], source: Source) -> list[Usage]:
    """Divide the usage of a reply among its calls, by the lengths of their prompts. The parts add up to it."""
    weights = [max(1, request.demand(source).prompt) for request in requests]
    total, done, parts = sum(weights), 0, []
    for weight in weights:
        before, done = done, done + weight
        prompt, completion = (
            tokens * done // total - tokens * before // total
            for tokens in (usage.prompt_tokens, usage.completion_tokens)
        )
        parts.append(Usage(prompt, completion))
    return parts
