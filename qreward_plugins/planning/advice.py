"""Tries changes of the configuration or the rollouts, and ranks those that matter.

Every change costs a simulation, so only changes that could matter are tried: a limit that is not used up is not raised.
Limits are doubled, because a smaller raise may not save a whole window. Each change is compared with the same seeds
without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from ..config import AskingConfig
from ..observers.batch_report import PartKind
from ..sources import kind_of

if TYPE_CHECKING:
    from .rehearsal import Rehearsal, Run, SourceUse

Resource = Literal["requests", "tokens", "places", "latency", "stragglers", "failures", "pauses", "nothing"]
_WORDS = {"requests": "requests a minute", "tokens": "tokens a minute", "places": "concurrency"}
"""The resources whose name does not say enough, in words."""
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

    @property
    def describes(self) -> str:
        """A description for messages."""
        words = _WORDS.get(self.resource, self.resource)
        return f"{words} of {listed(self.sources)}" if self.sources else words


def waits_of(runs: Sequence[Run]) -> tuple[Wait, ...]:
    """Return the waits of the step, the longest first."""
    seconds: dict[tuple[str, Resource], float] = {}
    for run in runs:
        for part in run.report.parts if run.report else ():
            key = part.source, _resource(run, part.kind, part.source)
            seconds[key] = seconds.get(key, 0.0) + part.seconds / len(runs)
    waits = [Wait(source, resource, spent) for (source, resource), spent in seconds.items() if resource != "nothing"]
    return tuple(sorted(waits, key=lambda wait: -wait.seconds))


def bottleneck_of(waits: Sequence[Wait]) -> Bottleneck:
    """Return the resource that takes most of the step."""
    by_resource: dict[Resource, list[Wait]] = {}
    for wait in waits:
        by_resource.setdefault(wait.resource, []).append(wait)
    if not by_resource:
        return Bottleneck("nothing", (), 0.0)
    resource, shared = max(by_resource.items(), key=lambda item: sum(wait.seconds for wait in item[1]))
    names = tuple(wait.source for wait in shared if wait.seconds >= shared[0].seconds / 3)
    return Bottleneck(resource, names, sum(wait.seconds for wait in shared))


def _resource(run: Run, kind: PartKind, name: str) -> Resource:
    """Return the resource of a part of the critical path.

    The engine reports that a quota is spent, but not which one, and it may report a lack of tokens as a queue. So a
    queue at a source that had concurrency left most of the time counts as a wait for tokens.
    """
    if name in run.uses and kind in ("queue", "quota"):
        used = used_up(run.uses[name])
        had_places = run.uses[name].out_of_places < 0.5
        if "tokens" in used and (had_places if kind == "queue" else "requests" not in used):
            return "tokens"
    return _RESOURCES[kind]


def used_up(use: SourceUse) -> frozenset[Resource]:
    """Return the limits of a source that a step used up."""
    full: dict[Resource, bool] = {
        "requests": (use.requests_used or 0.0) >= FULL,
        "tokens": (use.tokens_used or 0.0) >= FULL,
        "places": use.out_of_places > 0.02,
    }
    return frozenset(resource for resource, used in full.items() if used)


def listed(names: Sequence[str], last: str = "and") -> str:
    """ "a", "a and b", "a, b and c"."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1]))) if names else ""


MOST = 12
"""Most changes that are tried."""
_SHORTER = 0.5

_LIMITS: Mapping[str, tuple[Resource, str]] = {
    "requests_per_minute": ("requests", "requests/min"),
    "tokens_per_minute": ("tokens", "tokens/min"),
    "concurrency": ("places", "concurrency"),
}


def variations(rehearsal: Rehearsal, runs: Sequence[Run], waits: Sequence[Wait]) -> dict[str, Rehearsal]:
    """Return the changes to try after these runs, at most `MOST`, each with the rehearsal that has it; sources with the
    longest waits come first.
    """
    in_use = [name for name in rehearsal.config.sources if any(run.uses[name].requests for run in runs)]
    waited = {name: sum(wait.seconds for wait in waits if wait.source == name) for name in in_use}
    found = _added(rehearsal, runs)
    for name in sorted(in_use, key=lambda name: -waited[name]):
        used = frozenset[Resource]().union(*(used_up(run.uses[name]) for run in runs))
        found |= _raised(rehearsal, name, used)
    shortened = replace(rehearsal, rollouts=replace(rehearsal.rollouts, kept=_SHORTER))
    return {**dict(islice(found.items(), MOST - 1)), "rollouts half as long": shortened}


def _raised(rehearsal: Rehearsal, name: str, used: frozenset[Resource]) -> dict[str, Rehearsal]:
    """Double the limits that a source used up, each alone and all together."""
    limits = rehearsal.config.sources[name].limits
    declared = {key: getattr(limits, key) for key, (resource, _) in _LIMITS.items() if resource in used}
    doubled = {f"+{limit:,.0f} {_LIMITS[key][1]}": {key: 2 * limit} for key, limit in declared.items() if limit}
    if len(doubled) > 1:
        doubled[listed(list(doubled))] = {key: limit for each in doubled.values() for key, limit in each.items()}
    return {f"{change} on {name}": _with_limits(rehearsal, name, update) for change, update in doubled.items()}


def _added(rehearsal: Rehearsal, runs: Sequence[Run]) -> dict[str, Rehearsal]:
    """Add a second source like the model or service with the most calls, to every judge that asks it."""
    config = rehearsal.config
    calls = {
        name: sum(run.uses[name].requests * run.uses[name].calls_per_request for run in runs)
        for name, source in config.sources.items()
        if not kind_of(source).local
    }
    name = max(calls, key=lambda name: calls[name], default="")
    if not name or not calls[name]:
        return {}
    twin = f"{name} (2nd)"
    judges = {
        key: judge.model_copy(update={"sources": (*judge.sources, twin)})
        if isinstance(judge, AskingConfig) and name in judge.sources
        else judge
        for key, judge in config.judges.items()
    }
    added = config.model_copy(update={"sources": {**config.sources, twin: config.sources[name]}, "judges": judges})
    truths = {**rehearsal.truths, twin: rehearsal.truths[name]}
    return {f"another source like {name}": replace(rehearsal, config=added, truths=truths)}


def _with_limits(rehearsal: Rehearsal, name: str, update: Mapping[str, Any]) -> Rehearsal:
    config, source = rehearsal.config, rehearsal.config.sources[name]
    changed = source.model_copy(update={"limits": source.limits.model_copy(update=dict(update))})
    return replace(rehearsal, config=config.model_copy(update={"sources": {**config.sources, name: changed}}))


MATTERS = 0.04
"""The smallest saving that matters, as a share of the step's duration."""


@dataclass(frozen=True)
class Advice:
    """A change, and the duration and cost of a step with it. Costs are US dollars; None without prices.

    `now_s` and `now_usd` are the values without the change. A change is tried over some of the plan's seeds; the ratio
    to the same seeds without it is applied to these values.
    """

    change: str
    step_s: float
    now_s: float
    cost_usd: float | None
    now_usd: float | None

    @property
    def saved_s(self) -> float:
        return self.now_s - self.step_s

    @property
    def saved_usd(self) -> float:
        return (self.now_usd or 0.0) - (self.cost_usd or 0.0)


def advice_of(
    tried: Mapping[str, Sequence[Run]], now: Sequence[Run], *, step_s: float, cost_usd: float | None
) -> tuple[Advice, ...]:
    """Return the changes that matter for a step of `step_s` seconds and `cost_usd` dollars, largest saving first."""
    by_seed = {run.seed: run for run in now}
    found = []
    for change, runs in tried.items():
        # A change with which fewer samples are scored is not an improvement, even if it is faster.
        if not runs or sum(run.scored for run in runs) < sum(by_seed[run.seed].scored for run in runs):
            continue
        before = [by_seed[run.seed] for run in runs]
        found.append(
            Advice(
                change=change,
                step_s=_changed(step_s, [run.makespan_s for run in runs], [run.makespan_s for run in before]),
                now_s=step_s,
                cost_usd=None
                if cost_usd is None
                else _changed(cost_usd, [run.cost_usd for run in runs], [run.cost_usd for run in before]),
                now_usd=cost_usd,
            )
        )
    matter = (advice for advice in found if advice.saved_s >= max(MATTERS * advice.now_s, 0.05))
    return tuple(sorted(matter, key=lambda advice: -advice.saved_s))


def _changed(now: float, after: Sequence[float], before: Sequence[float]) -> float:
    """Scale `now` by the ratio of the means `after` and `before`."""
    return now * fmean(after) / fmean(before) if fmean(before) else fmean(after)
