"""Makes variations of a rehearsal: each changes one thing in the configuration or the rollouts.

Every variation costs a simulation, so only changes that could matter are tried: a limit that is not used up is not
raised. Limits are doubled, because a smaller raise may not save a whole window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from ..config import AskingConfig, Batch, Config, EndpointConfig, JudgeConfig, Limits, SourceConfig, sources_of
from ..errors import ConfigurationError
from ..quotas.concurrency import UNDECLARED_CONCURRENCY
from ..sources import kind_of
from .bottleneck import Wait, listed, used_up
from .rehearsal import Rehearsal, Run

MOST = 12
MOST_DROPPED = 3
_SHORTER = 0.5

_LIMITS = {"requests_per_minute": "requests/min", "tokens_per_minute": "tokens/min", "concurrency": "concurrency"}
_RESOURCES = ("requests", "tokens", "places")

ChangeKind = Literal["raise", "add", "drop", "shorten", "settings"]


@dataclass(frozen=True)
class Variation:
    """One change: its description, and the rehearsal with it."""

    kind: ChangeKind
    change: str
    rehearsal: Rehearsal


def variations(rehearsal: Rehearsal, runs: Sequence[Run], waits: Sequence[Wait]) -> list[Variation]:
    """Return the changes to try after these runs, at most `MOST`; sources with the longest waits come first."""
    config = rehearsal.config
    in_use = [name for name in config.sources if any(run.uses[name].requests for run in runs)]
    waited = {name: sum(wait.seconds for wait in waits if wait.source == name) for name in in_use}
    in_use.sort(key=lambda name: -waited[name])
    found = [*_settings(rehearsal)]
    if (busiest := _busiest(rehearsal, runs)) is not None:
        found.append(_added(rehearsal, busiest))
    found += [batched for name in in_use if (batched := _batched(rehearsal, runs, name)) is not None]
    found += _raised_everywhere(rehearsal, runs, in_use)
    found += [dropped for name in _dearest(runs, in_use) if (dropped := _dropped(rehearsal, name)) is not None]
    for name in in_use:
        found += _raised(rehearsal, runs, name)
    shortened = replace(rehearsal, rollouts=replace(rehearsal.rollouts, kept=_SHORTER))
    rest = Variation("shorten", "rollouts half as long", shortened)
    return [*found[: MOST - 1], rest]


def _settings(rehearsal: Rehearsal) -> Iterator[Variation]:
    scheduling = rehearsal.config.engine.scheduling
    several = len(rehearsal.config.sources) > 1
    better: list[tuple[str, dict[str, Any]]] = []
    if not scheduling.hedge and several:
        better.append(("engine.scheduling.hedge: true", {"hedge": True}))
    if scheduling.strategy != "earliest_finish" and several:
        better.append(("engine.scheduling.strategy: earliest_finish", {"strategy": "earliest_finish"}))
    if scheduling.prefer == "cost" and several:
        better.append(("engine.scheduling.prefer: speed", {"prefer": "speed"}))
    for change, update in better:
        engine = rehearsal.config.engine.model_copy(update={"scheduling": scheduling.model_copy(update=update)})
        config = rehearsal.config.model_copy(update={"engine": engine})
        yield Variation("settings", change, replace(rehearsal, config=config))


def _batched(rehearsal: Rehearsal, runs: Sequence[Run], name: str) -> Variation | None:
    """Let a request to the source carry several calls; None if it does already or cannot, if its requests take nothing
    once, or if it used up neither its requests nor its concurrency.
    """
    source = rehearsal.config.sources[name]
    if not rehearsal.truths[name].fixed_s or getattr(source, "batch", Batch()) is not None:
        return None
    used = frozenset[str]().union(*(used_up(rehearsal.config, run, name) for run in runs))
    if used.isdisjoint(("requests", "places")):
        return None
    changed = source.model_copy(update={"batch": Batch()})
    try:
        asyncio.run(kind_of(changed)(name, changed).aclose())
    except ConfigurationError as error:
        # A key that is not set here does not matter.
        if any(mistake.path.startswith(f"sources.{name}.batch") for mistake in error.mistakes):
            return None
    config = rehearsal.config.model_copy(update={"sources": {**rehearsal.config.sources, name: changed}})
    change = f"batch: {{max_size: {Batch().max_size}}} on {name}, which must take lists"
    return Variation("settings", change, replace(rehearsal, config=config))


def _raised_everywhere(rehearsal: Rehearsal, runs: Sequence[Run], names: Sequence[str]) -> Iterator[Variation]:
    """Raise a limit that several sources used up, on all of them: on one of many, it would change little.

    They are listed in the order of the configuration: which of several equal sources waits longest is chance.
    """
    doubled = {name: _doubled(rehearsal, runs, name) for name in rehearsal.config.sources if name in names}
    for key, words in _LIMITS.items():
        several = [name for name in doubled if key in doubled[name]]
        if len(several) > 1:
            more = rehearsal
            for name in several:
                more = _with_limits(more, name, {key: doubled[name][key]})
            yield Variation("raise", f"twice the {words} on {listed(several)}", more)


def _raised(rehearsal: Rehearsal, runs: Sequence[Run], name: str) -> Iterator[Variation]:
    """Raise the limits that a source used up, each alone and all together. The places of a source with several servers
    are raised by more servers; its rates are taken for those of a provider, which more servers do not raise.
    """
    doubled = _doubled(rehearsal, runs, name)
    words = {key: f"+{limit / 2:,.0f} {_LIMITS[key]}" for key, limit in doubled.items()}
    count = replicas_of(rehearsal.config.sources[name])
    if count is not None and "concurrency" in doubled:
        words["concurrency"] = f"{count} -> {2 * count} replicas"
    for key, limit in doubled.items():
        on = "of" if key == "concurrency" and count is not None else "on"
        yield Variation("raise", f"{words[key]} {on} {name}", _with_limits(rehearsal, name, {key: limit}))
    if len(doubled) > 1:
        change = f"{listed(list(words.values()))} on {name}"
        yield Variation("raise", change, _with_limits(rehearsal, name, doubled))
    undeclared = rehearsal.config.sources[name].limits.concurrency is None
    if undeclared and any("places" in used_up(rehearsal.config, run, name) for run in runs):
        yield _more_places(rehearsal, name)


def replicas_of(source: SourceConfig) -> int | None:
    """Return how many servers a source has; None for one that is asked at a single URL, or at none."""
    started = getattr(source, "data_parallel", None)
    if isinstance(started, int):
        return started
    urls = source.urls if isinstance(source, EndpointConfig) else ()
    return len(urls) if len(urls) > 1 else None


def _doubled(rehearsal: Rehearsal, runs: Sequence[Run], name: str) -> dict[str, float]:
    """Return twice the declared limits of a source that a step used up, by key."""
    limits = rehearsal.config.sources[name].limits
    used = frozenset[str]().union(*(used_up(rehearsal.config, run, name) for run in runs))
    found = {key: getattr(limits, key) for key, what in zip(_LIMITS, _RESOURCES, strict=True) if what in used}
    return {key: 2 * limit for key, limit in found.items() if limit is not None}


def _more_places(rehearsal: Rehearsal, name: str) -> Variation:
    """Raise the concurrency of a source that does not declare it."""
    slots = rehearsal.truths[name].slots
    if slots is not None:
        truths = {**rehearsal.truths, name: replace(rehearsal.truths[name], slots=2 * slots)}
        return Variation("raise", f"{2 * slots} workers for {name}", replace(rehearsal, truths=truths))
    most = 8 * UNDECLARED_CONCURRENCY
    change = f"concurrency: {most} declared for {name}, if it bears that"
    return Variation("raise", change, _with_limits(rehearsal, name, {"concurrency": most}))


def _busiest(rehearsal: Rehearsal, runs: Sequence[Run]) -> str | None:
    """Return the model or service with the most answers, which is the fastest one within its limits."""
    answered = {
        name: sum(run.uses[name].answered for run in runs)
        for name, source in rehearsal.config.sources.items()
        if not kind_of(source).local
    }
    best = max(answered, key=lambda name: answered[name], default=None)
    return best if best is not None and answered[best] else None


def _added(rehearsal: Rehearsal, name: str) -> Variation:
    """Add a second source like `name` to every judge that asks `name`."""
    twin = f"{name} (2nd)"
    config = rehearsal.config
    judges = _asking(config, lambda names: (*names, twin) if name in names else names)
    added = config.model_copy(update={"sources": {**config.sources, twin: config.sources[name]}, "judges": judges})
    truths = {**rehearsal.truths, twin: rehearsal.truths[name]}
    return Variation("add", f"another source like {name}", replace(rehearsal, config=added, truths=truths))


def _dearest(runs: Sequence[Run], names: Sequence[str]) -> list[str]:
    """Return the sources to try dropping: the most expensive first; of equal prices, the ones with fewest answers."""

    def worth(name: str) -> tuple[float, int]:
        uses = [run.uses[name] for run in runs]
        answered = sum(use.answered for use in uses)
        return -sum(use.cost_usd for use in uses) / (answered or 1), answered

    return sorted(names, key=worth)[:MOST_DROPPED]


def _dropped(rehearsal: Rehearsal, name: str) -> Variation | None:
    """Drop the source `name`; None if a judge would have no source left."""
    config = rehearsal.config
    if any(set(sources_of(config, judge)) == {name} for judge in config.judges):
        return None
    judges = _asking(config, lambda names: tuple(source for source in names if source != name))
    sources = {key: source for key, source in config.sources.items() if key != name}
    without = config.model_copy(update={"sources": sources, "judges": judges})
    return Variation("drop", f"without {name}", replace(rehearsal, config=without))


def _asking(config: Config, changed: Callable[[tuple[str, ...]], tuple[str, ...]]) -> dict[str, JudgeConfig]:
    """Return the judges with their sources replaced by `changed(sources)`."""
    return {
        key: judge.model_copy(update={"sources": changed(judge.sources)}) if isinstance(judge, AskingConfig) else judge
        for key, judge in config.judges.items()
    }


def _with_limits(rehearsal: Rehearsal, name: str, update: Mapping[str, Any]) -> Rehearsal:
    source = rehearsal.config.sources[name]
    limits: Limits = source.limits.model_copy(update=dict(update))
    changed = source.model_copy(update={"limits": limits})
    config: Config = rehearsal.config.model_copy(update={"sources": {**rehearsal.config.sources, name: changed}})
    return replace(rehearsal, config=config)
