"""Looks up the judge of a data source, and the sources of a judge.

These functions are apart from the models because their defaults depend on the whole tree: judges without routes,
sources that no judge names, judges that are only parts of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final

from .models import Config, ModelRoute, Route
from .nodes import judges_named
from .registry import KindError, rooms
from .several_keys import configured_name

FOR_CLIENTS: Final = ("text", "vectors")
"""What the sources of `models` answer with."""
BY_MODEL: Final = "model:"
"""The prefix of a pattern that is matched against models instead of names."""


def routes_of(config: Config) -> tuple[tuple[str, Route], ...]:
    """Return the routes in their order, each a glob and what becomes of the data sources that match it.

    Without routes, the only judge scores everything; judges that are parts of others do not count.
    """
    if config.routes:
        return tuple(config.routes.items())
    names = judges_in_charge(config)
    return (("*", Route(judge=names[0])),) if len(names) == 1 else ()


def priority_of(config: Config, route: Route, split: str | None) -> int:
    """Return the priority that the configuration gives a sample of this route and split."""
    if route.priority is not None:
        return route.priority
    own = config.judges[route.judge].priority
    if own is not None:
        return own
    return config.engine.priority.validation if split == "val" else config.engine.priority.train


def judge_for(config: Config, data_source: str) -> str | None:
    """Return the name of the judge for a data source: that of the first route whose glob matches, case-sensitive; None
    if no route matches.
    """
    return next((route.judge for pattern, route in routes_of(config) if fnmatchcase(data_source, pattern)), None)


def judges_in_charge(config: Config) -> tuple[str, ...]:
    """Return the names of the judges that samples may go to: all except those that are only parts of others."""
    parts = {name for judge in config.judges.values() for name in judges_named(judge)}
    routed = {route.judge for route in config.routes.values()}
    return tuple(name for name in config.judges if name not in parts or name in routed)


def judges_asked(config: Config) -> tuple[str, ...]:
    """Return the names of the judges that samples may go to, and of all that these await."""
    asked: dict[str, None] = {}
    waiting = list(judges_in_charge(config))
    while waiting:
        name = waiting.pop()
        if name not in asked:
            asked[name] = None
            waiting += judges_named(config.judges[name])
    return tuple(name for name in config.judges if name in asked)


def parts_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Return the names of the judges that ask sources for a sample of this judge: itself if its kind asks, and its
    parts, each as often as it is a part.

    Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    own = (judge_name,) if asked_by(judge.kind) else ()
    return (*own, *(leaf for part in judges_named(judge) for leaf in parts_of(config, part)))


def sources_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Return the names of the sources that may answer a judge or one of its parts.

    Raises KeyError for a judge that does not exist.
    """
    parts = dict.fromkeys([judge_name, *parts_of(config, judge_name)])
    return tuple(dict.fromkeys(source for part in parts for source in own_sources(config, part)))


def own_sources(config: Config, judge_name: str) -> tuple[str, ...]:
    """Return the names of the sources that may answer a judge itself: those that it names, or otherwise all that can,
    in the order of the file. Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    asked = asked_by(judge.kind)
    fitting = {
        name: getattr(source, "model", None)
        for name, source in config.sources.items()
        if answers(source.kind, asked, dict(source))
    }
    named: tuple[str, ...] = getattr(judge, "sources", ())
    if not named:
        return tuple(fitting)
    return tuple(dict.fromkeys(name for pattern in named for name in matching(pattern, fitting)))


def sources_for_model(config: Config, model: str) -> tuple[tuple[str, ...], ModelRoute | None]:
    """Return the names of the sources that answer clients that ask for `model`, and the group that says so: the first
    of `models` whose glob matches, case-sensitive. Without `models`, those whose model it is. Empty if there is none.
    """
    fitting = {
        name: getattr(source, "model", None)
        for name, source in config.sources.items()
        if answers(source.kind, FOR_CLIENTS, dict(source))
    }
    if not config.models:
        return tuple(name for name, its_model in fitting.items() if its_model == model), None
    for pattern, group in config.models.items():
        if fnmatchcase(model, pattern):
            found = dict.fromkeys(name for named in group.sources for name in matching(named, fitting))
            return tuple(found), group
    return (), None


def asked_by(judge_kind: str | None) -> tuple[str, ...]:
    """Return what a kind of judge asks sources for; nothing if it asks no sources or the kind is unknown."""
    try:
        asks = str(rooms["judges"].load(judge_kind or "").asks)
    except KindError:
        return ()
    return (asks,) if asks else ()


def answers(source_kind: str, asked: Sequence[str], settings: Mapping[str, Any]) -> bool | None:
    """Whether a source with these settings answers one of the things that are `asked` for (`text`, `value` ...); None
    if its kind is unknown.
    """
    try:
        return not set(asked).isdisjoint(rooms["sources"].load(source_kind).answered(settings))
    except KindError:
        return None


def matching(pattern: str, sources: Mapping[str, str | None]) -> list[str]:
    """Return the names in `sources` (name to model, or None) that `pattern` selects: a name, a glob over names, or
    `model:` and a glob over models; case-sensitive.
    """
    exact = [name for name in sources if pattern in (name, configured_name(name))]
    if exact:
        return exact
    if pattern.startswith(BY_MODEL):
        models = pattern.removeprefix(BY_MODEL)
        return [name for name, model in sources.items() if model is not None and fnmatchcase(model, models)]
    return [name for name in sources if fnmatchcase(configured_name(name), pattern)] if is_glob(pattern) else []


def is_glob(pattern: str) -> bool:
    """Whether `pattern` may select several sources."""
    return pattern.startswith(BY_MODEL) or any(sign in pattern for sign in "*?[")
