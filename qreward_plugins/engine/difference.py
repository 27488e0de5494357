"""Computes what differs between two configurations, and what becomes of each change in a reload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, SecretStr

from ..config import Config, EndpointConfig, SourceConfig
from ..secrets import one_line
from ..sources.opening import kind_of

Effect: TypeAlias = Literal["at once", "new samples", "drains", "restart"]
"""What becomes of a change. `at once`: it holds for everything that is sent from then on. `new samples`: samples under
way keep what they began with. `drains`: attempts under way end at the source as it was, and nothing new starts there.
`restart`: it needs one, and the reload is refused.
"""

IN_PLACE = frozenset({"limits", "timeouts.total_s", "price", "weight"})
"""Keys of an endpoint that change without new connections."""
IN_PLACE_OF_ALL = frozenset({"price", "weight"})
"""The same for all other kinds: their workers may depend on limits and time limits."""

_ENGINE: Mapping[str, Effect] = {
    "deadline_s": "new samples",
    "max_attempts": "at once",
    "scheduling": "at once",
    "reload": "at once",
    "priority": "new samples",
    "journal.reuse": "at once",
}
"""What becomes of a change below `engine`; every other key needs a restart."""

_TOP: Mapping[str, Effect] = {"judges": "new samples", "routes": "new samples"}

_HIDDEN = frozenset(
    {"api_key", "api_keys", "headers", "parameters", "body", "kwargs", "proxy", "cert_password", "extra_body"}
)
"""Keys whose values are never shown, because they may hold secrets."""
_SHOWN_CHARS = 60
NOT_SHOWN = "(not shown)"
"""Stands for a value that may be a secret."""


@dataclass(frozen=True)
class Change:
    """One key that differs, or one source or judge that was added or removed."""

    path: str
    """Its place in the configuration, such as `sources.judge.limits.requests_per_minute`."""
    before: str | None
    """Its value before, as it is shown; None if it is new."""
    after: str | None
    """Its value after; None if it is removed."""
    effect: Effect


@dataclass(frozen=True)
class Difference:
    """What differs between two configurations; false if nothing does."""

    changes: tuple[Change, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __str__(self) -> str:
        return "; ".join(f"{change.path}: {_arrow(change)}" for change in self.changes) or "no change"

    @property
    def refused(self) -> tuple[Change, ...]:
        """The changes that need a restart. With any of them, a reload is refused as a whole."""
        return tuple(change for change in self.changes if change.effect == "restart")


def difference(before: Config, after: Config) -> Difference:
    """Return what differs. Values that may be secrets are not shown."""
    changes: list[Change] = []
    for name in Config.model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if name in ("sources", "judges"):
            changes += _of_parts(name, old, new)
        else:
            changes += _of_values(name, old, new)
    if before.routes == after.routes and list(before.routes) != list(after.routes):
        # The first pattern that matches wins.
        changes.append(Change("routes", ", ".join(before.routes), ", ".join(after.routes), "new samples"))
    return Difference(tuple(changes))


def opened_anew(before: SourceConfig, after: SourceConfig) -> bool:
    """Return whether a source must be opened again: something differs that does not change in place."""
    return any(
        not _is_in_place(path, after)
        for path, old, new in _differing("", before, after)
        if old is not None or new is not None
    )


def _of_parts(room: str, before: Mapping[str, BaseModel], after: Mapping[str, BaseModel]) -> Iterator[Change]:
    for name in dict.fromkeys([*before, *after]):
        path, old, new = f"{room}.{name}", before.get(name), after.get(name)
        if old is None or new is None:
            yield Change(path, _kind(old), _kind(new), _of_whole(room, old, new))
            continue
        for key, one, other in _differing("", old, new):
            effect: Effect
            if room == "judges":
                effect = "new samples"
            else:
                assert isinstance(old, SourceConfig)
                assert isinstance(new, SourceConfig)
                effect = "at once" if _is_in_place(key, new) else _of_source(old, new)
            hidden = _is_hidden(key)
            yield Change(f"{path}.{key}", _shown(one, hidden=hidden), _shown(other, hidden=hidden), effect)


def _of_whole(room: str, before: BaseModel | None, after: BaseModel | None) -> Effect:
    """Return what becomes of a source or judge that is added or removed.

    Servers on the trainer's devices may start and end in reward phases only, and a reload comes at any time.
    """
    if getattr(before or after, "colocated", False):
        return "restart"
    return "new samples" if room == "judges" else "at once" if before is None else "drains"


def _of_source(before: SourceConfig, after: SourceConfig) -> Effect:
    """Return what becomes of a change that does not happen in place.

    Servers that a source has started cannot be started a second time beside the first.
    """
    return "restart" if starts_servers(before) or starts_servers(after) else "drains"


def starts_servers(config: SourceConfig) -> bool:
    """Return whether a source of this kind starts servers of its own."""
    return kind_of(config).has_servers


def _of_values(name: str, before: Any, after: Any) -> Iterator[Change]:
    for path, old, new in _differing(name, before, after):
        effect = _TOP.get(name, "restart")
        if name == "engine":
            key = path.removeprefix("engine.")
            effect = next((what for known, what in _ENGINE.items() if _is_below(key, known)), "restart")
        yield Change(path, _shown(old, hidden=False), _shown(new, hidden=False), effect)


def _differing(path: str, before: Any, after: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield path, old and new value of everything that differs."""
    if before == after:
        return
    old, new = _members(before), _members(after)
    if old is None or new is None:
        yield path, before, after
        return
    for key in dict.fromkeys([*old, *new]):
        yield from _differing(f"{path}.{key}".lstrip("."), old.get(key), new.get(key))


def _members(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, BaseModel):
        return {name: getattr(value, name) for name in type(value).model_fields}
    return value if isinstance(value, Mapping) else None


def _is_in_place(path: str, config: SourceConfig) -> bool:
    keys = IN_PLACE if isinstance(config, EndpointConfig) else IN_PLACE_OF_ALL
    return any(_is_below(path, key) for key in keys)


def _is_below(path: str, key: str) -> bool:
    return path == key or path.startswith(f"{key}.")


def _is_hidden(path: str) -> bool:
    return not _HIDDEN.isdisjoint(path.split("."))


def _kind(node: BaseModel | None) -> str | None:
    return None if node is None else str(getattr(node, "kind", "set"))


def _shown(value: Any, *, hidden: bool) -> str | None:
    if value is None:
        return None
    if hidden or _holds_secret(value):
        return NOT_SHOWN
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json", exclude_defaults=True)
    return one_line(f"{value:g}" if isinstance(value, float) else str(value), _SHOWN_CHARS)


def _holds_secret(value: Any) -> bool:
    if isinstance(value, SecretStr):
        return True
    members = _members(value)
    below = members.values() if members is not None else value if isinstance(value, (list, tuple)) else ()
    return any(map(_holds_secret, below))


def _arrow(change: Change) -> str:
    if change.before is None:
        return "added" if change.after in (None, NOT_SHOWN) else f"added ({change.after})"
    if change.after is None:
        return "removed"
    return f"{change.before} -> {change.after}"
