"""Computes what differs between two configurations, and what becomes of each change in a reload.

Numbers are shown, and nothing else: any text may be a secret.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from ..config import Config, EndpointConfig, SourceConfig
from ..sources.kind import kind_of

_RELOADED = (
    *("judges", "routes"),
    *("engine.deadline_s", "engine.priority", "engine.max_attempts", "engine.scheduling", "engine.reload"),
    "engine.journal.reuse",
)
"""What may change outside of the sources; everything else needs a restart."""
_IN_PLACE = ("price", "weight")
"""Keys of a source that change without new connections."""
_IN_PLACE_OF_ENDPOINTS = (*_IN_PLACE, "limits", "timeouts.total_s")
"""The same for endpoints; the workers of other kinds may depend on limits and time limits."""
_FREE = frozenset({"headers", "parameters", "body", "kwargs", "extra_body"})
"""Keys below which a number may be a secret, too."""
_HIDDEN = "(not shown)"


@dataclass(frozen=True)
class Change:
    """One key that differs, or one source or judge that was added or removed."""

    path: str
    """Its place in the configuration, such as `sources.judge.limits.requests_per_minute`."""
    before: str | None
    """Its value before, as it is shown; None if it is new."""
    after: str | None
    """Its value after; None if it is removed."""
    restart: bool
    """Whether it needs a restart. A reload with such a change is refused."""

    def __str__(self) -> str:
        if self.before is None or self.after is None:
            what, value = ("added", self.after) if self.before is None else ("removed", self.before)
            return f"{self.path}: {what}" + ("" if value in (None, _HIDDEN) else f" ({value})")
        hidden = self.before == self.after == _HIDDEN
        return f"{self.path}: " + ("changed" if hidden else f"{self.before} -> {self.after}")


@dataclass(frozen=True)
class Difference:
    """What differs between two configurations; false if nothing does."""

    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "; ".join(map(str, self.changes)) or "no change"

    @property
    def refused(self) -> tuple[Change, ...]:
        """The changes that need a restart. With any of them, a reload is refused as a whole."""
        return tuple(change for change in self.changes if change.restart)


def difference(before: Config, after: Config) -> Difference:
    """Return what differs."""
    changes = [
        Change(path, _shown(path, old), _shown(path, new), _needs_restart(path, before, after))
        for path, old, new in _differing("", before, after)
    ]
    if before.routes == after.routes and list(before.routes) != list(after.routes):
        # The first pattern that matches wins.
        changes.append(Change("routes", _HIDDEN, _HIDDEN, restart=False))
    return Difference(tuple(changes))


def opened_anew(before: SourceConfig, after: SourceConfig) -> bool:
    """Return whether a source must be opened again: something differs that does not change in place."""
    return any(not _is_in_place(path, after) for path, _, _ in _differing("", before, after))


def starts_servers(config: SourceConfig) -> bool:
    """Return whether a source of this kind starts servers of its own."""
    return kind_of(config).has_servers


def _needs_restart(path: str, before: Config, after: Config) -> bool:
    room, _, rest = path.partition(".")
    if room != "sources":
        return not any(_is_below(path, each) for each in _RELOADED)
    # A name may hold dots.
    name = max((each for each in (*before.sources, *after.sources) if _is_below(rest, each)), key=len)
    old, new, key = before.sources.get(name), after.sources.get(name), rest[len(name) + 1 :]
    if _is_below(key, "budget") or (old is None and new is not None and new.budget is not None):
        return True
    if old is None or new is None:
        # Servers on the trainer's devices start and end in reward phases only, and a reload comes at any time.
        return getattr(old or new, "colocated", False)
    # Servers cannot be started a second time beside the first.
    return not _is_in_place(key, new) and (starts_servers(old) or starts_servers(new))


def _differing(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of everything that differs."""
    if before == after:
        return
    old, new = _members(before), _members(after)
    if old is None or new is None:
        yield path, before, after
        return
    for key in dict.fromkeys([*old, *new]):
        yield from _differing(f"{path}.{key}" if path else str(key), old.get(key), new.get(key))


def _members(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return value if isinstance(value, Mapping) else None


def _is_in_place(key: str, config: SourceConfig) -> bool:
    known = _IN_PLACE_OF_ENDPOINTS if isinstance(config, EndpointConfig) else _IN_PLACE
    return any(_is_below(key, each) for each in known)


def _is_below(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _shown(path: str, value: Any) -> str | None:
    if value is None:
        return None
    if not _FREE.isdisjoint(path.split(".")):
        return _HIDDEN
    numbers = value if isinstance(value, (tuple, list)) and value else (value,)
    if not all(isinstance(number, (bool, int, float)) for number in numbers):
        return _HIDDEN
    words = ", ".join(f"{number:g}" if isinstance(number, float) else str(number) for number in numbers)
    return f"[{words}]" if numbers is value else words
