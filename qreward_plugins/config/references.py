"""Checks what one part of the tree says of another: judges name sources, sums and routes name judges.

It works on the unchecked tree and leaves alone whatever has the wrong type, so that one bad number does not hide a
misspelt name.
"""

from __future__ import annotations

from typing import Any

from ..registry import sources as source_kinds
from .findings import Finding, cut, did_you_mean
from .routes import ASKS, answers, is_glob, matching


def check_references(tree: dict[str, Any]) -> list[Finding]:
    """What is wrong between the parts of `tree`; paths are those of `tree`."""
    sources, judges, routes = tree.get("sources"), tree.get("judges"), tree.get("routes", {})
    findings: list[Finding] = []
    if isinstance(sources, dict) and sources and isinstance(judges, dict):
        kinds = {name: _kind(source) for name, source in sources.items()}
        models = {name: _model(source) for name, source in sources.items()}
        for name, judge in judges.items():
            if isinstance(judge, dict):
                findings += _judge(name, judge, kinds, models)
    if isinstance(judges, dict) and judges:
        weights = {name: _weights(judge) for name, judge in judges.items() if _kind(judge) == "sum"}
        of_sums = [finding for name, parts in weights.items() for finding in _sum(name, parts, judges, set(weights))]
        findings += of_sums
        if isinstance(routes, dict):
            findings += _routes(routes, judges)
            if not routes and not of_sums and all(weights.values()):
                findings += _no_routes(judges, {part for parts in weights.values() for part in parts})
    return findings


def _kind(node: Any) -> str | None:
    kind = node.get("kind") if isinstance(node, dict) else None
    return kind if isinstance(kind, str) else None


def _model(node: Any) -> str | None:
    model = node.get("model") if isinstance(node, dict) else None
    return model if isinstance(model, str) else None


def _weights(node: dict[str, Any]) -> list[str]:
    weights = node.get("weights")
    return [part for part in weights if isinstance(part, str)] if isinstance(weights, dict) else []


def _awaited(name: str, judges: dict[str, Any]) -> set[str]:
    """The judges that a sum adds, those that the sums among them add, and so on; and itself."""
    found: set[str] = set()
    left = [name]
    while left:
        part = left.pop()
        if part not in found:
            found.add(part)
            left += _weights(judges[part]) if _kind(judges.get(part)) == "sum" else []
    return found


def _sum(name: str, parts: list[str], judges: dict[str, Any], sums: set[str]) -> list[Finding]:
    findings = []
    fitting = [other for other in judges if other != name]
    for part in parts:
        path = ("judges", name, "weights", part)
        whole = next((other for other in parts if part.startswith(f"{other}/")), None)
        if part not in judges:
            remedy = f"{did_you_mean(part, fitting)}Judges: {_listed(fitting)}."
            findings.append(Finding(path, f"there is no judge `{cut(part)}`", remedy))
        elif part in sums and name in _awaited(part, judges):
            problem = "a sum cannot be a part of itself"
            if part != name:
                problem = f"`{cut(part)}` is a sum of which `{cut(name)}` is a part, so that neither has an end"
            findings.append(Finding(path, problem, "Name judges that do not lead back to it."))
        elif whole is not None:
            problem = f"the name reads like a component of `{cut(whole)}`, another part of this sum"
            findings.append(Finding(path, problem, "Give the judge another name."))
    return findings


def _judge(
    name: str, judge: dict[str, Any], kinds: dict[str, str | None], models: dict[str, str | None]
) -> list[Finding]:
    findings = []
    asked = ASKS.get(_kind(judge) or "")
    answer = {other: None if asked is None or kind is None else answers(kind, asked) for other, kind in kinds.items()}
    fitting = [other for other, answered in answer.items() if answered]
    named = judge.get("sources")
    for n, source in enumerate(named if isinstance(named, list) else [named]):
        if not isinstance(source, str):
            continue
        path = ("judges", name, "sources", *((n,) if isinstance(named, list) else ()))
        if source not in kinds and is_glob(source):
            if asked and not matching(source, {other: models[other] for other in fitting}):
                problem = f"`{cut(source)}` matches no source of kind {_that_answer(asked)}"
                findings.append(Finding(path, problem, _offer(fitting)))
        elif source not in kinds:
            remedy = f"{did_you_mean(source, kinds)}Sources: {_listed(kinds)}."
            findings.append(Finding(path, f"there is no source `{cut(source)}`", remedy))
        elif asked and answer[source] is False:
            problem = f"`{cut(source)}` is a source of kind {kinds[source]}, which cannot answer a judge of kind"
            remedy = f"Name sources of kind {_that_answer(asked)}" + (f": {_listed(fitting)}." if fitting else ".")
            findings.append(Finding(path, f"{problem} {_kind(judge)}", remedy))
    if not named and asked and not fitting and None not in answer.values():
        problem = f"there is no source of kind {_that_answer(asked)} to answer this judge of kind {_kind(judge)}"
        findings.append(Finding(("judges", name), problem, "Add one below `sources`."))
    return findings


def _routes(routes: dict[str, Any], judges: dict[str, Any]) -> list[Finding]:
    return [
        Finding(
            ("routes", pattern),
            f"there is no judge `{cut(judge)}`",
            f"{did_you_mean(judge, judges)}Judges: {_listed(judges)}.",
        )
        for pattern, judge in routes.items()
        if isinstance(judge, str) and judge not in judges
    ]


def _no_routes(judges: dict[str, Any], parts: set[str]) -> list[Finding]:
    whole = [name for name in judges if name not in parts]
    if len(whole) <= 1:
        return []
    beside = " that are no part of a sum" if parts else ""
    problem = (
        f"there are {len(whole)} judges{beside} ({_listed(whole)}), and nothing says which data source goes to which"
    )
    return [Finding(("routes",), problem, f'Add routes, e.g. `"*": {cut(whole[0])}`; the first match wins.')]


def _that_answer(asked: str) -> str:
    return " or ".join(name for name, kind in source_kinds.loadable() if asked in kind.answers)


def _offer(fitting: list[str]) -> str:
    what = "Patterns are matched against names, or against models after `model:`."
    return f"{what} Of that kind: {_listed(fitting)}." if fitting else what


def _listed(names: Any) -> str:
    shown = [f"`{cut(name)}`" for name in names]
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
