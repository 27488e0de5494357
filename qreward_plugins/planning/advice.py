"""Tries changes of the configuration or the rollouts, and ranks those that matter.

Every change costs a simulation, so only changes that could matter are tried: a limit that is not used up is not raised.
Limits are doubled, because a smaller raise may not save a whole window. Each change is compared with the same seeds
without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from ..config import AskingConfig, Batch
from ..errors import ConfigurationError
from ..quotas.concurrency import UNDECLARED_CONCURRENCY
from ..sources import kind_of
from .bottleneck import Resource, Wait, listed, used_up
from .rehearsal import Rehearsal, Run

MOST = 12
"""Most changes that are tried."""
_SHORTER = 0.5

_LIMITS: Mapping[str, tuple[Resource, str]] = {
    "requests_per_minute": ("requests", "requests/min"),
    "tokens_per_minute": ("tokens", "tokens/min"),
    "concurrency": ("places", "concurrency"),
}

ChangeKind = Literal["raise", "add", "shorten", "settings"]


@dataclass(frozen=True)
class Variation:
    """One change: its description, and the rehearsal with it."""

    kind: ChangeKind
    change: str
    rehearsal: Rehearsal


def variations(rehearsal: Rehearsal, runs: Sequence[Run], waits: Sequence[Wait]) -> list[Variation]:
    """Return the changes to try after these runs, at most `MOST`; sources with the longest waits come first."""
    in_use = [name for name in rehearsal.config.sources if any(run.uses[name].requests for run in runs)]
    waited = {name: sum(wait.seconds for wait in waits if wait.source == name) for name in in_use}
    used = {
        name: frozenset[Resource]().union(*(used_up(rehearsal.config, run, name) for run in runs)) for name in in_use
    }
    found = list(_added(rehearsal, runs))
    for name in sorted(in_use, key=lambda name: -waited[name]):
        found += [*_batched(rehearsal, name, used[name]), *_raised(rehearsal, name, used[name])]
    shortened = replace(rehearsal, rollouts=replace(rehearsal.rollouts, kept=_SHORTER))
    return [*found[: MOST - 1], Variation("shorten", "rollouts half as long", shortened)]


def _batched(rehearsal: Rehearsal, name: str, used: frozenset[Resource]) -> Iterator[Variation]:
    """Let a request to the source carry several calls, unless it does already or cannot, its requests take nothing
    once, or it used up neither its requests nor its concurrency.
    """
    source = rehearsal.config.sources[name]
    if not rehearsal.truths[name].fixed_s or getattr(source, "batch", Batch()) is not None:
        return
    if used.isdisjoint(("requests", "places")):
        return
    changed = source.model_copy(update={"batch": Batch()})
    try:
        asyncio.run(kind_of(changed)(name, changed).aclose())
    except ConfigurationError as error:
        # A key that is not set here does not matter.
        if any(mistake.path.startswith(f"sources.{name}.batch") for mistake in error.mistakes):
            return
    change = f"batch: {{max_size: {Batch().max_size}}} on {name}, which must take lists"
    yield Variation("settings", change, _with_source(rehearsal, name, changed))


def _raised(rehearsal: Rehearsal, name: str, used: frozenset[Resource]) -> Iterator[Variation]:
    """Double the limits that a source used up, each alone and all together."""
    limits = rehearsal.config.sources[name].limits
    declared = {key: getattr(limits, key) for key, (resource, _) in _LIMITS.items() if resource in used}
    doubled = {key: 2 * limit for key, limit in declared.items() if limit is not None}
    words = {key: f"+{limit / 2:,.0f} {_LIMITS[key][1]}" for key, limit in doubled.items()}
    for key, limit in doubled.items():
        yield Variation("raise", f"{words[key]} on {name}", _with_limits(rehearsal, name, {key: limit}))
    if len(doubled) > 1:
        change = f"{listed(list(words.values()))} on {name}"
        yield Variation("raise", change, _with_limits(rehearsal, name, doubled))
    if limits.concurrency is None and "places" in used:
        yield _more_places(rehearsal, name)


def _more_places(rehearsal: Rehearsal, name: str) -> Variation:
    """Raise the concurrency of a source that does not declare it."""
    slots = rehearsal.truths[name].slots
    if slots is not None:
        truths = {**rehearsal.truths, name: replace(rehearsal.truths[name], slots=2 * slots)}
        return Variation("raise", f"{2 * slots} workers for {name}", replace(rehearsal, truths=truths))
    most = 8 * UNDECLARED_CONCURRENCY
    change = f"concurrency: {most} declared for {name}, if it bears that"
    return Variation("raise", change, _with_limits(rehearsal, name, {"concurrency": most}))


def _added(rehearsal: Rehearsal, runs: Sequence[Run]) -> Iterator[Variation]:
    """Add a second source like the model or service with the most answers, to every judge that asks it."""
    config = rehearsal.config
    answered = {
        name: sum(run.uses[name].answered for run in runs)
        for name, source in config.sources.items()
        if not kind_of(source).local
    }
    name = max(answered, key=lambda name: answered[name], default="")
    if not name or not answered[name]:
        return
    twin = f"{name} (2nd)"
    judges = {
        key: judge.model_copy(update={"sources": (*judge.sources, twin)})
        if isinstance(judge, AskingConfig) and name in judge.sources
        else judge
        for key, judge in config.judges.items()
    }
    added = config.model_copy(update={"sources": {**config.sources, twin: config.sources[name]}, "judges": judges})
    truths = {**rehearsal.truths, twin: rehearsal.truths[name]}
    yield Variation("add", f"another source like {name}", replace(rehearsal, config=added, truths=truths))


def _with_limits(rehearsal: Rehearsal, name: str, update: Mapping[str, Any]) -> Rehearsal:
    source = rehearsal.config.sources[name]
    changed = source.model_copy(update={"limits": source.limits.model_copy(update=dict(update))})
    return _with_source(rehearsal, name, changed)


def _with_source(rehearsal: Rehearsal, name: str, source: Any) -> Rehearsal:
    config = rehearsal.config.model_copy(update={"sources": {**rehearsal.config.sources, name: source}})
    return replace(rehearsal, config=config)


MATTERS = 0.04
"""The smallest saving that matters, as a share of the step's duration or cost."""


@dataclass(frozen=True)
class Advice:
    """A change, and the duration and cost of a step with it. Costs are US dollars; None without prices.

    `now_s` and `now_usd` are the values without the change. A change is tried over some of the plan's seeds; the ratio
    to the same seeds without it is applied to these values.
    """

    kind: ChangeKind
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
    tried: Sequence[tuple[Variation, Sequence[Run]]], now: Sequence[Run], *, step_s: float, cost_usd: float | None
) -> tuple[Advice, ...]:
    """Return the changes that matter for a step of `step_s` seconds and `cost_usd` dollars, largest saving first.

    A change matters if it saves time, or if it saves money without costing time.
    """
    by_seed = {run.seed: run for run in now}
    found = []
    for variation, runs in tried:
        # A change with which fewer samples are scored is not an improvement, even if it is faster.
        if not runs or sum(run.scored for run in runs) < sum(by_seed[run.seed].scored for run in runs):
            continue
        before = [by_seed[run.seed] for run in runs]
        found.append(
            Advice(
                kind=variation.kind,
                change=variation.change,
                step_s=_changed(step_s, [run.makespan_s for run in runs], [run.makespan_s for run in before]),
                now_s=step_s,
                cost_usd=None
                if cost_usd is None
                else _changed(cost_usd, [run.cost_usd for run in runs], [run.cost_usd for run in before]),
                now_usd=cost_usd,
            )
        )
    return tuple(sorted(filter(_matters, found), key=lambda advice: -advice.saved_s))


def _changed(now: float, after: Sequence[float], before: Sequence[float]) -> float:
    """Scale `now` by the ratio of the means `after` and `before`."""
    return now * fmean(after) / fmean(before) if fmean(before) else fmean(after)


def _matters(advice: Advice) -> bool:
    if advice.saved_s >= max(MATTERS * advice.now_s, 0.05):
        return True
    no_slower = advice.saved_s >= -MATTERS / 2 * advice.now_s
    return no_slower and advice.saved_usd > MATTERS * (advice.now_usd or 0.0) > 0
