"""Checks the names by which parts of the tree refer to each other: sources of judges, judges of sums and routes.

It works on the unchecked tree and skips values of the wrong type, so that a bad number does not hide a misspelt name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import Any

from . import shape
from .findings import Finding, Path, cut, did_you_mean
from .keys import Named
from .nodes import JudgeName, SourceName
from .registry import KindError, rooms
from .routes import TEXT, answers, answers_of, asked_by, is_glob, matching


def check_references(tree: dict[str, Any], names: Sequence[Named], *, unsure: Iterable[Path] = ()) -> list[Finding]:
    """Return the wrong references in `tree`, with paths in `tree`.

    `names` are all names of judges and sources in it. `unsure` are the paths of earlier mistakes: a value there may
    have been meant as a name.
    """
    sources, judges, routes = tree.get("sources"), tree.get("judges"), tree.get("routes", {})
    findings: list[Finding] = []
    if isinstance(sources, dict) and sources and isinstance(judges, dict):
        asking = _Asking(sources)
        named: dict[Any, list[Named]] = {}
        for one in names:
            if one.path[0] == "judges" and one.what == SourceName.__name__:
                named.setdefault(one.path[1], []).append(one)
        for name, judge in judges.items():
            if isinstance(judge, dict):
                findings += asking.check(name, judge, named.get(name, []))
    if isinstance(sources, dict) and sources and isinstance(tree.get("models"), dict):
        findings += _models(tree["models"], sources, names)
    if isinstance(judges, dict) and judges:
        parts = [one for one in names if one.path[0] == "judges" and one.what == JudgeName.__name__]
        of_parts = _parts(parts, judges)
        findings += of_parts
        if isinstance(routes, dict):
            findings += _routes(routes, judges)
            doubted = {path[1] for path in unsure if path[0] == "judges" and len(path) > 1}
            if not routes and not of_parts and not any(map(_names_judges, (judges.get(name) for name in doubted))):
                findings += _no_routes(judges, {one.name for one in parts})
    return findings


def _names_judges(judge: Any) -> bool:
    """Whether a judge is of a kind that may have other judges as parts."""
    try:
        return shape.holds(shape.of_kind("judges", _kind(judge) or ""), "names", JudgeName.__name__)
    except KindError:
        return True


def _kind(node: Any) -> str | None:
    kind = node.get("kind") if isinstance(node, dict) else None
    return kind if isinstance(kind, str) else None


def _model(node: Any) -> str | None:
    model = node.get("model") if isinstance(node, dict) else None
    return model if isinstance(model, str) else None


def _parts(names: Sequence[Named], judges: dict[str, Any]) -> list[Finding]:
    endless = _endless(names)
    findings = []
    for one in names:
        whole = str(one.path[1])
        if one.name not in judges:
            fitting = [other for other in judges if other != whole]
            remedy = f"{did_you_mean(one.name, fitting)}Judges: {_listed(fitting)}."
            findings.append(Finding(one.path, f"there is no judge `{cut(one.name)}`", remedy))
        elif endless.issuperset((whole, one.name)):
            problem = "a judge cannot be a part of itself"
            if one.name != whole:
                problem = f"`{cut(whole)}` and `{cut(one.name)}` are parts of each other, which is a cycle"
            findings.append(Finding(one.path, problem, "Name a judge that does not contain it."))
    return findings


def _endless(names: Sequence[Named]) -> set[str]:
    """The judges that are parts of themselves, directly or through others, and those between two such judges."""
    left = {name for one in names for name in (str(one.path[1]), one.name)}
    for upwards in (True, False):
        # Sorting removes judges without parts first, then judges that are no parts; it stops at cycles.
        sorter: TopologicalSorter[str] = TopologicalSorter()
        for one in names:
            whole, part = str(one.path[1]), one.name
            if left.issuperset((whole, part)):
                sorter.add(*((whole, part) if upwards else (part, whole)))
        with suppress(CycleError):
            sorter.prepare()
        while ready := sorter.get_ready():
            left.difference_update(ready)
            sorter.done(*ready)
    return left


class _Asking:
    """Checks which sources judges ask."""

    def __init__(self, sources: dict[str, Any]) -> None:
        self._kinds = {name: _kind(source) for name, source in sources.items()}
        self._settings = {name: source if isinstance(source, dict) else {} for name, source in sources.items()}
        self._models = {name: _model(source) for name, source in sources.items()}
        self._answers: dict[str, tuple[dict[str, bool | None], list[str]]] = {}

    def check(self, name: str, judge: dict[str, Any], named: Sequence[Named]) -> list[Finding]:
        findings = []
        asked = asked_by(_kind(judge))
        answer, fitting = self._answer(asked)
        for one in named:
            path, source = one.path, one.name
            if source not in answer and is_glob(source):
                if asked and not matching(source, {other: self._models[other] for other in fitting}):
                    problem = f"`{cut(source)}` matches no source of kind {_that_answer(asked)}"
                    findings.append(Finding(path, problem, _offer(fitting)))
            elif source not in answer:
                remedy = f"{did_you_mean(source, answer)}Sources: {_listed(answer)}."
                findings.append(Finding(path, f"there is no source `{cut(source)}`", remedy))
            elif asked and answer[source] is False:
                kind = self._kinds[source]
                problem = (
                    f"`{cut(source)}` is a source of kind {kind}, which cannot answer a judge of kind {_kind(judge)}"
                )
                remedy = f"Name sources of kind {_that_answer(asked)}" + (f": {_listed(fitting)}." if fitting else ".")
                findings.append(Finding(path, problem, remedy))
        if not judge.get("sources") and asked and not fitting and None not in answer.values():
            problem = f"there is no source of kind {_that_answer(asked)} to answer this judge of kind {_kind(judge)}"
            findings.append(Finding(("judges", name), problem, "Add one below `sources`."))
        return findings

    def _answer(self, asked: str) -> tuple[dict[str, bool | None], list[str]]:
        """Return whether each source can answer (None if unknown), and the names of those that can."""
        if asked not in self._answers:
            by_kind = {kind: answers_of(kind) if asked and kind else None for kind in set(self._kinds.values())}
            answer: dict[str, bool | None] = {}
            for source, kind in self._kinds.items():
                found = by_kind[kind]
                answer[source] = None if found is None else asked in found(self._settings[source])
            self._answers[asked] = answer, [source for source, answered in answer.items() if answered]
        return self._answers[asked]


def _models(models: dict[str, Any], sources: dict[str, Any], names: Sequence[Named]) -> list[Finding]:
    """Check the sources and the weights of the groups of models."""
    able = {
        name: answers(_kind(source) or "", TEXT, source if isinstance(source, dict) else {})
        for name, source in sources.items()
    }
    fitting = {name: _model(sources[name]) for name, is_able in able.items() if is_able is not False}
    findings = []
    found: dict[Any, set[str]] = {}
    for one in names:
        if one.path[0] != "models" or one.what != SourceName.__name__:
            continue
        meant = matching(one.name, fitting)
        found.setdefault(one.path[1], set()).update(meant)
        if meant:
            continue
        if able.get(one.name) is False:
            problem = f"`{cut(one.name)}` is a source of kind {_kind(sources[one.name])}, which gives no text"
            findings.append(Finding(one.path, problem, f"Name sources of kind {_that_answer(TEXT)}."))
        elif is_glob(one.name):
            problem = f"`{cut(one.name)}` matches no source of kind {_that_answer(TEXT)}"
            findings.append(Finding(one.path, problem, _offer(list(fitting))))
        else:
            remedy = f"{did_you_mean(one.name, sources)}Sources: {_listed(sources)}."
            findings.append(Finding(one.path, f"there is no source `{cut(one.name)}`", remedy))
    for pattern, group in models.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        for name in weights if isinstance(weights, dict) else ():
            if isinstance(name, str) and pattern in found and name not in found[pattern]:
                problem = f"`{cut(name)}` is not among the sources of this group"
                remedy = f"{did_you_mean(name, found[pattern])}Its sources: {_listed(sorted(found[pattern]))}."
                findings.append(Finding(("models", pattern, "weights", name), problem, remedy))
    return findings


def _routes(routes: dict[str, Any], judges: dict[str, Any]) -> list[Finding]:
    findings = []
    for pattern, route in routes.items():
        whole = isinstance(route, dict)
        judge, path = (route.get("judge"), ("routes", pattern, "judge")) if whole else (route, ("routes", pattern))
        if isinstance(judge, str) and judge not in judges:
            remedy = f"{did_you_mean(judge, judges)}Judges: {_listed(judges)}."
            findings.append(Finding(path, f"there is no judge `{cut(judge)}`", remedy))
    return findings


def _no_routes(judges: dict[str, Any], parts: set[str]) -> list[Finding]:
    whole = [name for name in judges if name not in parts]
    if len(whole) <= 1:
        return []
    beside = " that are not part of another" if parts else ""
    problem = f"there are {len(whole)} judges{beside} ({_listed(whole)}), and no route chooses between them"
    return [Finding(("routes",), problem, f'Add routes, e.g. `"*": {cut(whole[0])}`; the first match wins.')]


def _that_answer(asked: str) -> str:
    return " or ".join(name for name, kind in rooms["sources"].loadable() if asked in kind.answers)


def _offer(fitting: list[str]) -> str:
    what = "Patterns are matched against names, or against models after `model:`."
    return f"{what} Of that kind: {_listed(fitting)}." if fitting else what


def _listed(names: Any) -> str:
    shown = [f"`{cut(name)}`" for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
