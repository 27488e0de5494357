"""Who judges a data source, and who answers a judge: the look-ups that join the parts of a configuration.

They stand apart from the models because their defaults depend on the rest of the tree: who has no route, which sources
are not named, which judges are but parts of others.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from ..registry import KindError, rooms
from .models import Config
from .nodes import judges_named

BY_MODEL: Final = "model:"
"""What a pattern begins with that is matched against models instead of names."""


def judge_for(config: Config, data_source: str) -> str | None:
    """Name of the judge for a data source: the first route whose glob matches, with case. None: no route does.

    Without routes, the only judge judges everything; judges that are parts of others do not count.
    """
    if not config.routes:
        names = judges_in_charge(config)
        return names[0] if len(names) == 1 else None
    return next((judge for pattern, judge in config.routes.items() if fnmatchcase(data_source, pattern)), None)


def judges_in_charge(config: Config) -> tuple[str, ...]:
    """Names of the judges that samples may go to: all but those that are only parts of others."""
    parts = {name for judge in config.judges.values() for name in judges_named(judge)}
    return tuple(name for name in config.judges if name not in parts or name in config.routes.values())


def parts_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the judges that ask sources when a sample goes to a judge: itself if its kind asks, and those of its
    parts, as often as they are parts of it.

    Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    own = (judge_name,) if asked_by(judge.kind) else ()
    return (*own, *(leaf for part in judges_named(judge) for leaf in parts_of(config, part)))


def sources_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the sources that may answer a judge or one of its parts.

    Raises KeyError for a judge that does not exist.
    """
    parts = dict.fromkeys([judge_name, *parts_of(config, judge_name)])
    return tuple(dict.fromkeys(source for part in parts for source in own_sources(config, part)))


def own_sources(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the sources that may answer a judge itself: those it names, or else all that can, in the order of the
    file. Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    asked = asked_by(judge.kind)
    fitting = {
        name: getattr(source, "model", None)
        for name, source in config.sources.items()
        if asked and answers(source.kind, asked)
    }
    named: tuple[str, ...] = getattr(judge, "sources", ())
    if not named:
        return tuple(fitting)
    return tuple(dict.fromkeys(name for pattern in named for name in matching(pattern, fitting)))


def asked_by(judge_kind: str | None) -> str:
    """What a kind of judge asks sources for; "" if it asks none, or there is no such kind."""
    try:
        return str(rooms["judges"].load(judge_kind or "").asks)
    except KindError:
        return ""


def answers(source_kind: str, asked: str) -> bool | None:
    """Whether a kind of source answers what is `asked` for (`text`, `value`). None: there is no such kind."""
    try:
        return asked in rooms["sources"].load(source_kind).answers
    except KindError:
        return None


def matching(pattern: str, sources: Mapping[str, str | None]) -> list[str]:
    """The names in `sources` (name to model; None: it has none) that `pattern` means: a name, a glob over names, or
    `model:` and a glob over models, with case.
    """
    if pattern in sources:
        return [pattern]
    if pattern.startswith(BY_MODEL):
        models = pattern.removeprefix(BY_MODEL)
        return [name for name, model in sources.items() if model is not None and fnmatchcase(model, models)]
    return [name for name in sources if fnmatchcase(name, pattern)] if is_glob(pattern) else []


def is_glob(pattern: str) -> bool:
    """Whether `pattern` may mean several sources."""
    return pattern.startswith(BY_MODEL) or any(sign in pattern for sign in "*?[")
