"""Who judges a data source, and who answers a judge: the look-ups that join the parts of a configuration.

They stand apart from the models because their defaults depend on the rest of the tree: who has no route, which sources
are not named, which judges are but parts of a sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Final

from ..registry import KindError
from ..registry import sources as source_kinds
from .models import Config, SumJudge

ASKS: Final = {"llm": "text", "function": "value"}
"""What a kind of judge asks its sources for."""

BY_MODEL: Final = "model:"
"""What a pattern begins with that is matched against models instead of names."""


def judge_for(config: Config, data_source: str) -> str | None:
    """Name of the judge for a data source: the first route whose glob matches, with case. None: no route does.

    Without routes, the only judge judges everything; judges that are parts of a sum do not count.
    """
    if not config.routes:
        names = judges_in_charge(config)
        return names[0] if len(names) == 1 else None
    return next((judge for pattern, judge in config.routes.items() if fnmatchcase(data_source, pattern)), None)


def judges_in_charge(config: Config) -> tuple[str, ...]:
    """Names of the judges that samples may go to: all but those that are only parts of a sum."""
    parts = {name for judge in config.judges.values() if isinstance(judge, SumJudge) for name in judge.weights}
    return tuple(name for name in config.judges if name not in parts or name in config.routes.values())


def parts_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the judges that ask sources when a sample goes to a judge: of a sum those of its parts, as
    often as they are parts of it, else itself.

    Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    if isinstance(judge, SumJudge):
        return tuple(leaf for part in judge.weights for leaf in parts_of(config, part))
    return (judge_name,)


def sources_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the sources that may answer a judge: those it names, or else all that can, in the order of the file. Of
    a sum those of its parts.

    Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    if isinstance(judge, SumJudge):
        return tuple(dict.fromkeys(source for part in judge.weights for source in sources_of(config, part)))
    fitting = {
        name: getattr(source, "model", None)
        for name, source in config.sources.items()
        if answers(source.kind, ASKS[judge.kind])
    }
    if not judge.sources:
        return tuple(fitting)
    return tuple(dict.fromkeys(name for pattern in judge.sources for name in matching(pattern, fitting)))


def answers(source_kind: str, asked: str) -> bool | None:
    """Whether a kind of source answers what is `asked` for (`text`, `value`). None: there is no such kind."""
    try:
        return asked in source_kinds.load(source_kind).answers
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
