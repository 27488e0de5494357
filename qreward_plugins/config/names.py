"""Looks up what the names of sources, judges, routes and groups of models stand for, and checks them.

These functions are apart from the models because their defaults depend on the whole tree: judges without routes,
sources that no judge names, judges that are only parts of others.

pydantic validates a name where it stands (`SourceName`, `JudgeName` in `nodes`), with the `Names` of the tree as its
context. So a wrong name is reported at its place together with all other mistakes, and a bad number beside it hides
nothing.

A provider counts by key, so each key of a source with several keys needs its own quota, breaker and statistics. The
scheduler has these for each source. So a source with three keys becomes three sources that differ only in name and key
(`with_each_key`), and nothing else needs to know of keys. Verdicts and metrics give the name of the configuration
(`configured_name`).
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from graphlib import CycleError, TopologicalSorter
from typing import Any, Final

from ..errors import Mistake
from .findings import Finding, Path, cut, did_you_mean, is_plain_key, listed
from .models import Config, ModelRoute, Route
from .nodes import JudgeName, judges_named
from .registry import KindError, rooms
from .source_models import SourceConfig

FOR_CLIENTS: Final = ("text", "vectors")
"""What the sources of `models` answer with."""
BY_MODEL: Final = "model:"
"""The prefix of a pattern that is matched against models instead of names."""
_NUMBERED = re.compile(r"(.+)#([1-9][0-9]*)", re.DOTALL)


def routes_of(config: Config) -> tuple[tuple[str, Route], ...]:
    """Return the routes in their order, each a glob and what becomes of the data sources that match it.

    Without routes, the only judge scores everything; judges that are parts of others do not count.
    """
    if config.routes:
        return tuple(config.routes.items())
    names = judges_in_charge(config)
    return (("*", Route(judge=names[0])),) if len(names) == 1 else ()


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
    fitting = _that_answer(config.sources, asked_by(judge.kind))
    named: tuple[str, ...] = getattr(judge, "sources", ())
    if not named:
        return tuple(fitting)
    return tuple(dict.fromkeys(name for pattern in named for name in matching(pattern, fitting)))


def sources_for_model(config: Config, model: str) -> tuple[tuple[str, ...], ModelRoute | None]:
    """Return the names of the sources that answer clients that ask for `model`, and the group that says so: the first
    of `models` whose glob matches, case-sensitive. Without `models`, those whose model it is. Empty if there is none.
    """
    fitting = _that_answer(config.sources, FOR_CLIENTS)
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


def answers(source_kind: str, asked: Sequence[str], settings: Mapping[str, Any]) -> bool:
    """Whether a source with these settings answers one of the things that are `asked` for (`text`, `value` ...). One of
    an unknown kind may.
    """
    try:
        return not set(asked).isdisjoint(rooms["sources"].load(source_kind).answered(settings))
    except KindError:
        return True


def _that_answer(sources: Mapping[str, Any], asked: Sequence[str]) -> dict[str, str | None]:
    """Return the sources that may answer, each with its model. A source is a model, or the plain values of one."""
    settings = {name: _settings(source) for name, source in sources.items()}
    fitting = [name for name, node in settings.items() if answers(str(node.get("kind")), asked, node)]
    models = {name: settings[name].get("model") for name in fitting}
    return {name: model if isinstance(model, str) else None for name, model in models.items()}


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


def with_each_key(config: Config) -> Config:
    """Return `config` with a source `NAME#1`, `NAME#2` and so on in place of each source `NAME` with several keys."""
    if not any(map(_keys, config.sources.values())):
        return config
    sources: dict[str, SourceConfig] = {}
    for name, node in config.sources.items():
        keys = _keys(node)
        for number, key in enumerate(keys, 1):
            one = node.model_copy(update={"api_key_env": key})
            sources[name if len(keys) == 1 else f"{name}#{number}"] = one
        if not keys:
            sources[name] = node
    return config.model_copy(update={"sources": sources})


def _keys(node: SourceConfig) -> tuple[str, ...]:
    """Return the variables of several keys; empty for one key or none."""
    variables = getattr(node, "api_key_env", None)
    return variables if isinstance(variables, tuple) else ()


def without_keys(config: Config, names: Collection[str]) -> Config:
    """Return `config` with one source in place of all keys of each of `names`: its caller opened it in its own way."""
    if not any(name in names for name in map(configured_name, config.sources)):
        return config
    sources: dict[str, SourceConfig] = {}
    for name, node in config.sources.items():
        whole = configured_name(name)
        sources.setdefault(whole if whole in names else name, node)
    return config.model_copy(update={"sources": sources})


@functools.lru_cache
def configured_name(name: str) -> str:
    """Return the name in the configuration of the source `name`: without the number of its key. Each verdict asks."""
    found = _NUMBERED.fullmatch(name)
    return name if found is None else found[1]


def with_written_path(mistake: Mistake, name: str) -> Mistake:
    """Return a mistake in the source `name` with the path that its user wrote: `sources.a.api_key_env[1]` instead of
    `sources.a#2.api_key_env`.
    """
    found = _NUMBERED.fullmatch(name)
    if found is None or not mistake.path.startswith(f"sources.{name}"):
        return mistake
    rest = mistake.path.removeprefix(f"sources.{name}")
    if rest == ".api_key_env":
        rest += f"[{int(found[2]) - 1}]"
    return Mistake(f"sources.{found[1]}{rest}", mistake.problem, mistake.remedy)


class Names:
    """The sources and judges of a tree whose values are not checked yet."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self._sources = {name: _settings(node) for name, node in _entries(tree, "sources").items()}
        self._judges = _entries(tree, "judges")
        self._whole = ""
        self._judge_kind = ""
        self._asks: tuple[str, ...] = FOR_CLIENTS
        self._parts: dict[str, list[str]] = {}
        self._that_answer = functools.cache(functools.partial(_that_answer, self._sources))

    def within(self, node: Any, kind: Any) -> Names:
        """Return the names as they are checked in `node`, a source or judge of this kind."""
        inner, asks = copy.copy(self), getattr(kind, "asks", "")
        inner._whole = next((name for name, judge in self._judges.items() if judge is node), "")
        inner._judge_kind, inner._asks = str(node["kind"]), (asks,) if asks else ()
        return inner

    def problem_of(self, what: type[str], name: str) -> tuple[str, str] | None:
        """Return problem and remedy of a name; None if there is such a source or judge, and it fits."""
        return self._problem_of_judge(name) if issubclass(what, JudgeName) else self._problem_of_source(name)

    def _problem_of_judge(self, name: str) -> tuple[str, str] | None:
        if self._whole:
            self._parts.setdefault(self._whole, []).append(name)
        if name in self._judges or not self._judges:
            return None
        return _unknown("judge", name, [other for other in self._judges if other != self._whole])

    def _problem_of_source(self, name: str) -> tuple[str, str] | None:
        fitting = self._that_answer(self._asks)
        if not self._asks or not self._sources or matching(name, fitting):
            return None
        if name in self._sources:
            whom = f"a judge of kind {self._judge_kind}" if self._judge_kind else "clients of models"
            problem = f"`{cut(name)}` is a source of kind {self._sources[name].get('kind')}, which cannot answer {whom}"
            shown = f": {listed(fitting)}" if fitting else ""
            return problem, f"Name sources of kind {_kinds_that_answer(self._asks)}{shown}."
        if is_glob(name):
            remedy = "Patterns are matched against names, or against models after `model:`."
            return f"the pattern matches no source of kind {_kinds_that_answer(self._asks)}", (
                f"{remedy} Of that kind: {listed(fitting)}." if fitting else remedy
            )
        return _unknown("source", name, self._sources)

    def findings(self, wrong: Sequence[Path]) -> Iterator[Finding]:
        """Yield the mistakes that concern several names, after the values were validated. `wrong` are the paths of
        other mistakes.
        """
        for name, judge in self._judges.items():
            kind = str(_settings(judge).get("kind"))
            asked = () if _settings(judge).get("sources") else asked_by(kind)
            if asked and self._sources and not self._that_answer(asked):
                problem = f"there is no source of kind {_kinds_that_answer(asked)} to answer this judge of kind {kind}"
                yield Finding(("judges", name), problem, "Add one below `sources`.")
        cycles = list(self._cycles())
        yield from cycles
        parts = {part for parts in self._parts.values() for part in parts}
        whole = [name for name in self._judges if name not in parts]
        # The parts of a judge with mistakes may not be known.
        unsure = cycles or any(path[0] == "judges" and self._may_have_parts(path) for path in wrong if path)
        if len(whole) > 1 and not self._tree.get("routes") and not unsure:
            beside = " that are not part of another" if parts else ""
            problem = f"there are {len(whole)} judges{beside} ({listed(whole)}), and no route chooses between them"
            yield Finding(("routes",), problem, f'Add routes, e.g. `"*": {cut(whole[0])}`; the first match wins.')

    def _may_have_parts(self, path: Path) -> bool:
        judge = self._judges.get(str(path[1])) if len(path) > 1 else None
        return not asked_by(str(_settings(judge).get("kind")))

    def _cycles(self) -> Iterator[Finding]:
        graph = {name: set(parts) for name, parts in self._parts.items()}
        while True:
            try:
                TopologicalSorter(graph).prepare()
                return
            except CycleError as error:
                # Each one of the cycle is a part of the next.
                way = list(reversed(error.args[1]))
            remedy = "Name judges that do not contain this one."
            yield Finding(("judges", way[0]), f"the judge is a part of itself: {' > '.join(map(cut, way))}", remedy)
            graph[way[0]].discard(way[1])


def _unknown(what: str, name: str, names: Any) -> tuple[str, str]:
    known, hint = f"{what.capitalize()}s: {listed(names)}." if names else "", did_you_mean(name, names)
    # It may be any text, a secret among them.
    shown = hint or is_plain_key(name)
    return f"there is no {what} `{cut(name)}`" if shown else f"there is no such {what}", hint + known


def _entries(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _settings(node: Any) -> Mapping[str, Any]:
    """Return the keys of a source or judge, which may be a model."""
    return node if isinstance(node, dict) else dict(node) if hasattr(node, "model_fields_set") else {}


def _kinds_that_answer(asked: Sequence[str]) -> str:
    return " or ".join(name for name, kind in rooms["sources"].loadable() if set(asked) & set(kind.answers))
