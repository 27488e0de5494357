"""Finds what a step waits for: adds up the critical paths of the last rewards over all rehearsals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import Config
from ..observers.batch_report import PartKind
from ..sources import kind_of
from .rehearsal import Rehearsal, Run

Resource = Literal["requests", "tokens", "places", "latency", "stragglers", "failures", "pauses", "deadline", "nothing"]
FULL = 0.9
"""The share of a limit from which on the limit counts as used up."""

_RESOURCES: Mapping[PartKind, Resource] = {
    "quota": "requests",
    "queue": "places",
    "service": "latency",
    "straggler": "stragglers",
    "retry": "failures",
    "pause": "pauses",
    "arrival": "nothing",
}


@dataclass(frozen=True)
class Wait:
    """Mean seconds, over the rehearsals, that the step's critical path waits for a resource of a source."""

    source: str
    resource: Resource
    seconds: float


@dataclass(frozen=True)
class Bottleneck:
    """The resource that takes most of a step. `sources` are those that it waits for, the longest wait first."""

    resource: Resource
    sources: tuple[str, ...]
    seconds: float
    describes: str
    """A description for messages."""


def waits_of(rehearsal: Rehearsal, runs: Sequence[Run]) -> tuple[Wait, ...]:
    """Return the waits of the step, the longest first."""
    seconds: dict[tuple[str, Resource], float] = {}
    for run in runs:
        for part in run.report.parts if run.report else ():
            resource = _resource(rehearsal.config, run, part.kind, part.source)
            key = part.source, resource
            seconds[key] = seconds.get(key, 0.0) + part.seconds / len(runs)
    waits = [Wait(source, resource, spent) for (source, resource), spent in seconds.items() if resource != "nothing"]
    return tuple(sorted(waits, key=lambda wait: -wait.seconds))


def bottleneck_of(config: Config, waits: Sequence[Wait]) -> Bottleneck:
    """Return the resource that takes most of the step."""
    by_resource: dict[Resource, list[Wait]] = {}
    for wait in waits:
        by_resource.setdefault(wait.resource, []).append(wait)
    if not by_resource:
        return Bottleneck("nothing", (), 0.0, "nothing: no sample goes to a source")
    resource, shared = max(by_resource.items(), key=lambda item: sum(wait.seconds for wait in item[1]))
    names = tuple(wait.source for wait in shared if wait.seconds >= shared[0].seconds / 3)
    seconds = sum(wait.seconds for wait in shared)
    return Bottleneck(resource, names, seconds, _words(config, resource, names))


def _resource(config: Config, run: Run, kind: PartKind, name: str) -> Resource:
    """Return the resource of a part of the critical path.

    The engine reports that a quota is spent, but not which one, and it may report a lack of tokens as a queue. So a
    queue at a source that had concurrency left most of the time counts as a wait for tokens.
    """
    if name in run.uses and kind in ("queue", "quota"):
        used = used_up(config, run, name)
        had_places = run.uses[name].held_s.get("queue", 0.0) < 0.5 * run.makespan_s
        if "tokens" in used and (had_places if kind == "queue" else "requests" not in used):
            return "tokens"
    return _RESOURCES[kind]


def used_up(config: Config, run: Run, name: str) -> frozenset[Resource]:
    """Return the limits of a source that a step used up."""
    limits, use = config.sources[name].limits, run.uses[name]
    found: set[Resource] = set()
    window = limits.window_s / 60
    if limits.requests_per_minute is not None and use.most_requests >= FULL * limits.requests_per_minute * window:
        found.add("requests")
    if limits.tokens_per_minute is not None and use.most_tokens >= FULL * limits.tokens_per_minute * window:
        found.add("tokens")
    if use.held_s.get("queue", 0.0) > 0.02 * run.makespan_s:
        found.add("places")
    return frozenset(found)


def _words(config: Config, resource: Resource, names: tuple[str, ...]) -> str:
    named = listed(names)
    many = len(names) > 1
    if resource in ("requests", "tokens"):
        key = f"{resource}_per_minute"
        limits = [f"{getattr(config.sources[name].limits, key) or 0:,.0f}" for name in names]
        each = f"{limits[0]}" if len(set(limits)) == 1 else listed(limits)
        return f"the {each} {resource} a minute of {'each of ' if many and each == limits[0] else ''}{named}"
    if resource == "places":
        return "the places of " + listed([f"{name} ({_places(config, name)})" for name in names])
    return {
        "latency": f"the answers of {named}",
        "stragglers": f"stragglers at {named}",
        "failures": f"failed requests at {named}, and trying them again",
        "pauses": f"pauses that {named} {'ask' if many else 'asks'} for",
    }.get(resource, str(resource))


def _places(config: Config, name: str) -> str:
    source = config.sources[name]
    declared = source.limits.concurrency
    if declared is not None:
        return f"concurrency {declared:,}"
    return "its workers" if kind_of(source).local else "concurrency not declared"


def listed(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""
