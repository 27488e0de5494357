"""Checks the names by which parts of a configuration refer to each other: sources, judges, routes, groups of models.

pydantic validates a name where it stands (`SourceName`, `JudgeName` in `nodes`), with the `Names` of the tree as its
context. So a wrong name is reported at its place together with all other mistakes, and a bad number beside it hides
nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any

from .findings import Finding, Path, cut, listed, nearest
from .nodes import JudgeName
from .registry import rooms
from .routes import FOR_CLIENTS, answers, asked_by, is_glob, matching


class Names:
    """The sources and judges of a tree whose values are not checked yet."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self._tree = tree
        self._sources = {name: _settings(node) for name, node in _entries(tree, "sources").items()}
        self._judges = _entries(tree, "judges")
        self._whole = ""
        self._judge_kind = ""
        self._asks: tuple[str, ...] = FOR_CLIENTS
        self._fitting: dict[Sequence[str], dict[str, str | None]] = {}
        self._parts: dict[str, list[str]] = {}

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

    def _that_answer(self, asked: tuple[str, ...]) -> dict[str, str | None]:
        """Return the sources that may answer, each with its model. Those of an unknown kind may."""
        if asked not in self._fitting:
            able = {
                name: answers(str(node.get("kind")), asked, node) is not False for name, node in self._sources.items()
            }
            self._fitting[asked] = {name: _text(self._sources[name].get("model")) for name in able if able[name]}
        return self._fitting[asked]

    def findings(self, wrong: Sequence[Path]) -> Iterator[Finding]:
        """Yield the mistakes that concern several names, after the values were validated. `wrong` are the paths of
        other mistakes.
        """
        for name, judge in self._judges.items():
            kind = str(_settings(judge).get("kind"))
            asked = asked_by(kind)
            if asked and self._sources and not _settings(judge).get("sources") and not self._that_answer(asked):
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
    near = nearest(name, names)
    known = f"{what.capitalize()}s: {listed(names)}." if names else ""
    if near is None:
        return f"there is no such {what}", known
    return f"there is no {what} `{cut(name)}`", f"Did you mean `{cut(near)}`? {known}"


def _entries(tree: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = tree.get(key)
    return found if isinstance(found, dict) else {}


def _settings(node: Any) -> Mapping[str, Any]:
    """Return the keys of a source or judge, which may be a model."""
    return node if isinstance(node, dict) else dict(node) if hasattr(node, "model_fields_set") else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _kinds_that_answer(asked: Sequence[str]) -> str:
    return " or ".join(name for name, kind in rooms["sources"].loadable() if set(asked) & set(kind.answers))
