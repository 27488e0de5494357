"""Who judges a data source, and who answers a judge: the two look-ups that join the parts of a configuration.

They stand apart from the models because both have defaults that depend on the rest of the tree.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

from .models import Config

SOURCE_KIND: Final = {"llm": "openai", "function": "function"}
"""The kind of source that can answer a kind of judge."""


def judge_for(config: Config, data_source: str) -> str | None:
    """Name of the judge for a data source: the first route whose glob matches, with case. None: no route does.

    Without routes, the only judge judges everything.
    """
    if not config.routes:
        return next(iter(config.judges)) if len(config.judges) == 1 else None
    return next((judge for pattern, judge in config.routes.items() if fnmatchcase(data_source, pattern)), None)


def sources_of(config: Config, judge_name: str) -> tuple[str, ...]:
    """Names of the sources that may answer a judge: those it names, or else all of its kind, in the order of the file.

    Raises KeyError for a judge that does not exist.
    """
    judge = config.judges[judge_name]
    if judge.sources:
        return tuple(dict.fromkeys(judge.sources))
    kind = SOURCE_KIND[judge.kind]
    return tuple(name for name, source in config.sources.items() if source.kind == kind)
