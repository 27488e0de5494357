"""Defines `plan`: it predicts the duration, the cost and the bottleneck of a step."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean, quantiles
from typing import Any

from ..config import Config, load_config
from ..errors import ConfigurationError, EngineError, InputError
from ..observers.batch_report import percentile
from ..sources import kind_of
from ..system.processes import process_pool, terminate
from .advice import Advice, Bottleneck, Wait, advice_of, bottleneck_of, listed, variations, waits_of
from .picture import Timeline
from .rehearsal import Rehearsal, Run, SourceUse
from .rollouts import Lengths
from .setting import Assumptions, set_up, sources_asked

FEWEST_SEEDS = 2
SAMPLES_A_CHANGE = 4096
"""Samples over which a change is rehearsed; they determine the number of seeds, which is smaller than the plan's."""
WORTH_PROCESSES = 2000
"""Processes are started if at least this many samples are rehearsed."""

Progress = Callable[[int, int], None]
"""Called with the finished rehearsals and all rehearsals known so far."""


@dataclass(frozen=True)
class Spread:
    """A number over all rehearsals."""

    p50: float
    p95: float


@dataclass(frozen=True)
class Plan:
    """What one training step does with a configuration. Times are seconds, costs US dollars."""

    samples: int
    judged: Mapping[str, float]
    """Samples by the judge that reads them."""
    seeds: int
    step_s: Spread
    first_step_s: float | None
    """The median of a run's first step, which waits until the servers of sources of kind `replicas` have started; None
    if there are none, or their start is unknown."""
    cost_usd: Spread | None
    """None: no source has a price."""
    attempts: float
    """Attempts per sample. A request of several calls is an attempt of each."""
    deadline_s: float
    late: float
    """Part of the samples whose reward comes after the deadline, and is lost."""
    failed: Mapping[str, float]
    """Part of the samples that no source has judged for other reasons, by cause and reason."""
    bottleneck: Bottleneck
    waits: tuple[Wait, ...]
    sources: tuple[SourceUse, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    """The assumptions and remarks, as sentences."""
    timeline: Timeline
    """The timeline of the rehearsal with the median duration."""

    def to_dict(self) -> dict[str, Any]:
        """Return everything except the timeline, for JSON."""
        data = asdict(replace(self, timeline=None))  # type: ignore[arg-type]
        del data["timeline"]
        for advice, entry in zip(self.advice, data["advice"], strict=True):
            entry["saved_s"] = advice.saved_s
        return data


def plan(
    config: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *,
    samples: int,
    lengths: Lengths | None = None,
    assumptions: Assumptions | None = None,
    data_sources: Sequence[tuple[str, float]] = (),
    seeds: int = 5,
    workers: int = 1,
    start_s: float | None = None,
    advise: bool = True,
    processes: int = 1,
    progress: Progress | None = None,
    origin: str | None = None,
) -> Plan:
    """Rehearse a step of `samples` samples over `seeds` seeds, and possible changes over fewer seeds.

    `config` is what `load_config` takes. `lengths` are the lengths of rollouts; default: those in the configuration's
    journal, or else lognormal with a mean of 800 tokens. `data_sources` are names and shares; default: those of the
    rollouts of a file, or one that the route `"*"` matches. `workers` engines divide the samples, and share the limits
    through one keeper, as those of a job do. `start_s` are the seconds in which servers that the engine starts itself
    load their models. `processes` is the number of processes that rehearse; with
    more than 1, the caller's main module must be importable (`if __name__ == "__main__"`). `progress` is called after
    every rehearsal in the calling thread; an error of it ends the plan. `origin` is the name of the configuration in
    messages; default: its path.

    It blocks, and must not be called in a running event loop (use `asyncio.to_thread` there).

    The same arguments give the same plan. Raises `ConfigurationError` as the engine does, `InputError` for samples
    that no judge scores, and `JournalError` for a journal that cannot be read.
    """
    if min(samples, seeds, workers) < 1:
        raise InputError(f"a plan needs 1 sample, 1 seed and 1 worker or more, not {samples}, {seeds} and {workers}")
    loaded = load_config(config)
    try:
        rehearsal, judged, notes = set_up(loaded, samples, lengths, assumptions or Assumptions(), data_sources, workers)
        rehearsal.check()
    except ConfigurationError as error:
        path = os.fsdecode(config) if isinstance(config, (str, os.PathLike)) else "configuration"
        raise ConfigurationError(error.mistakes, origin=origin or path) from None
    asked = sources_asked(loaded, judged)
    starting = [name for name in asked if kind_of(loaded.sources[name]).has_servers]
    if start_s is not None and not starting:
        raise InputError("no source of kind replicas is asked, so no servers start; leave out --start (start_s)")
    priced = not all(source.price.is_zero for source in loaded.sources.values())
    with _runner(processes if samples * seeds >= WORTH_PROCESSES else 1, progress) as rehearse:
        runs = rehearse([(rehearsal, seed) for seed in range(seeds)])
        _check_scored(runs, drawn=not rehearsal.rollouts.lengths.rollouts)
        waits = waits_of(runs)
        step_s = _spread([run.makespan_s for run in runs])
        cost_usd = _spread([run.cost_usd for run in runs]) if priced else None
        advice: tuple[Advice, ...] = ()
        if advise:
            options = variations(rehearsal, runs, waits)
            few = range(min(seeds, max(FEWEST_SEEDS, SAMPLES_A_CHANGE // samples)))
            tried = rehearse([(option, seed) for option in options.values() for seed in few])
            grouped = {change: tried[n * len(few) : (n + 1) * len(few)] for n, change in enumerate(options)}
            cost = cost_usd.p50 if cost_usd is not None else None
            advice = advice_of(grouped, runs, step_s=step_s.p50, cost_usd=cost)
    notes += [
        f"{name}: not asked, because no judge of these samples uses it" for name in loaded.sources if name not in asked
    ]
    if starting and start_s is None:
        notes.append(
            f"the first step waits, in addition, until the servers of {listed(starting)} have started (--start)"
        )
    failures = sorted({name for run in runs for name in run.failed})
    by_time = sorted(runs, key=lambda run: (run.makespan_s, run.seed))
    return Plan(
        samples=samples,
        judged=judged,
        seeds=seeds,
        step_s=step_s,
        first_step_s=None if start_s is None else start_s + step_s.p50,
        cost_usd=cost_usd,
        attempts=fmean(run.attempts for run in runs) / samples,
        deadline_s=loaded.engine.deadline_s,
        late=fmean(run.late for run in runs) / samples,
        failed={name: fmean(run.failed.get(name, 0) for run in runs) / samples for name in failures},
        bottleneck=bottleneck_of(waits),
        waits=waits,
        sources=tuple(_mean_use([run.uses[name] for run in runs]) for name in loaded.sources),
        advice=advice,
        notes=tuple(notes),
        timeline=by_time[(len(by_time) - 1) // 2].timeline,
    )


@contextmanager
def _runner(
    processes: int, progress: Progress | None
) -> Iterator[Callable[[Sequence[tuple[Rehearsal, int]]], list[Run]]]:
    """Yield what runs rehearsals with these seeds, and returns the results in order. The number of processes does not
    change a result; they end with the context. An error of `progress` passes through.

    Raises `EngineError` if a process dies.
    """
    pool = process_pool(processes) if processes > 1 else None
    tell = progress or (lambda done, total: None)
    done = total = 0

    def rehearse(tasks: Sequence[tuple[Rehearsal, int]]) -> list[Run]:
        nonlocal done, total
        total += len(tasks)
        tell(done, total)
        found = []
        for run in (map if pool is None else pool.map)(Rehearsal.run, *zip(*tasks, strict=True)):
            found.append(run)
            done += 1
            tell(done, total)
        return found

    try:
        yield rehearse
    except BrokenProcessPool:
        raise EngineError("a rehearsal process died, maybe for lack of memory; plan fewer samples") from None
    finally:
        if pool is not None:
            terminate(pool)
            pool.shutdown(cancel_futures=True)


def _check_scored(runs: Sequence[Run], *, drawn: bool) -> None:
    """Raise `InputError` if all samples fail, or if a judge finds nothing to ask about in a made-up response: it would
    seem to cost nothing.
    """
    unasked = drawn and any(name.endswith(("/input", "/empty")) for run in runs for name in run.failed)
    if unasked or not any(run.scored or run.late for run in runs):
        remedy = "; give real rollouts with --tokens file:PATH" if drawn else ""
        raise InputError(f"samples cannot be scored: {runs[0].example or 'all of them fail'}{remedy}")


def _mean_use(uses: Sequence[SourceUse]) -> SourceUse:
    requests = fmean(use.requests for use in uses)
    calls = fmean(use.requests * use.calls_per_request for use in uses)
    means = {name: _mean([getattr(use, name) for use in uses]) for name in _MEANS}
    return replace(
        uses[0],
        requests=requests,
        calls_per_request=calls / requests if requests else 1.0,
        peak_in_flight=max(use.peak_in_flight for use in uses),
        **means,
    )


_MEANS = ("tokens", "requests_used", "tokens_used", "out_of_places", "cost_usd")


def _mean(shares: Iterable[float | None]) -> Any:
    """The mean; None if there is no such limit or price."""
    known = [share for share in shares if share is not None]
    return fmean(known) if known else None


def _spread(values: Sequence[float]) -> Spread:
    # Interpolated: otherwise the 95th percentile of five values would be their maximum.
    p95 = quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]
    return Spread(percentile(values, 0.5), p95)
