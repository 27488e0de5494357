"""The statistics of an accelerated function, its debug log and its progress bar."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..observers import AttemptEnded, AttemptStarted, CallEnded, Event, SourceGauges, SourceStateChanged, Statistics
from ..scheduling import Upstream
from ..secrets import one_line

_log = logging.getLogger("qreward_plugins.accelerate")
_CHARS = 300


class DebugLog:
    """An observer that writes one line for each event of an attempt or a call, at level DEBUG."""

    def __call__(self, event: Event, /) -> None:
        if not _log.isEnabledFor(logging.DEBUG):
            return
        if isinstance(event, AttemptStarted):
            kind = "hedge" if event.hedge else "retry" if event.attempt else "attempt"
            _log.debug("%s, call %d: %s %d starts, %d in flight", *_where(event), kind, event.attempt, event.in_flight)
        elif isinstance(event, AttemptEnded):
            detail = f": {one_line(event.detail, _CHARS)}" if event.detail else ""
            _log.debug(
                "%s, call %d: attempt %d %s after %.3f s%s",
                *_where(event),
                event.attempt,
                "timed out" if event.timed_out else event.result,
                event.seconds,
                detail,
            )
        elif isinstance(event, CallEnded):
            end = event.reason or "answered"
            _log.debug("%s, call %d: %s, attempts: %d", event.judge, event.call, end, event.attempts)
        elif isinstance(event, SourceStateChanged):
            _log.debug("%s is %s: %s", event.source, event.state, one_line(event.problem, _CHARS))


def _where(event: AttemptStarted | AttemptEnded) -> tuple[str, int]:
    return event.judge, event.call


@contextmanager
def progress_of(name: str, total: int, shown: bool | None) -> Iterator[Callable[[], None] | None]:
    """Show a bar on stderr while the context is open; yields what to call for each end. `shown`: None shows it only on
    a terminal.
    """
    if shown is False or (shown is None and not sys.stderr.isatty()) or not total:
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        task = progress.add_task(name.replace("[", r"\["), total=total)
        yield lambda: progress.advance(task)


@dataclass(frozen=True, kw_only=True)
class FunctionStatistics:
    """One function so far, over all keys. Latencies are seconds of the last answered attempts; NaN before the first.

    `calls` = `answered` + `failed_total` + those `under_way`. A call that failed and returned its default counts as
    failed, and among the `defaults`.
    """

    name: str
    calls: int
    answered: int
    failed: Mapping[str, int] = field(default_factory=dict)
    """Failed calls by reason: `failed` (by its last error), `deadline`, `circuit_open`, `cancelled`, `closed`."""
    defaults: int = 0
    under_way: int = 0
    attempts: int = 0
    retries: int = 0
    hedges: int = 0
    timeouts: int = 0
    in_flight: int = 0
    """Attempts that run now."""
    peak_in_flight: int = 0
    concurrency: int | None = None
    """Most attempts at once now, of all keys together; None: any number."""
    keys: int = 0
    open_circuits: int = 0
    """Keys whose circuit is open."""
    latency_p50_s: float
    latency_p95_s: float

    @property
    def failed_total(self) -> int:
        return sum(self.failed.values())

    @classmethod
    def of(
        cls,
        name: str,
        counted: AttemptStatistics,
        upstreams: Sequence[Upstream],
        *,
        now: float,
        calls: int,
        ends: Mapping[str, int],
        defaults: int,
    ) -> FunctionStatistics:
        """Make the statistics of a function from the counts of its attempts and calls."""
        idle = SourceGauges(state="up", in_flight=0, requests_share=None, tokens_share=None, paced=False)
        source = counted.snapshot({name: idle}, waiting=0).sources[name]
        failed = {reason: count for reason, count in ends.items() if reason}
        answered = ends.get("", 0)
        under_way = calls - answered - sum(failed.values())
        most = sum(upstream.quota.concurrency for upstream in upstreams)
        return cls(
            name=name,
            calls=calls,
            answered=answered,
            failed=failed,
            defaults=defaults,
            under_way=under_way,
            attempts=source.requests,
            retries=counted.retries,
            hedges=source.hedges,
            timeouts=source.timeouts,
            in_flight=sum(len(upstream.live) for upstream in upstreams),
            peak_in_flight=source.peak_in_flight,
            concurrency=most if most < 1_000_000 else None,
            keys=len(upstreams),
            open_circuits=sum(not upstream.breaker.closed for upstream in upstreams),
            latency_p50_s=source.latency_p50_s,
            latency_p95_s=source.latency_p95_s,
        )


class AttemptStatistics(Statistics):
    """Counts attempts, and those that followed a failed one (`retries`). It reads nothing about calls and batches: a
    report of each call that is made alone would cost as much as the call.
    """

    def __init__(self) -> None:
        super().__init__()
        self.retries = 0

    def reads(self) -> Mapping[type, Callable[[Any], None]]:
        """The handler of each type of event."""
        return {AttemptStarted: self._attempt_started, AttemptEnded: self._attempt_ended}

    def _attempt_started(self, event: AttemptStarted) -> None:
        super()._attempt_started(event)
        self.retries += event.attempt > 0 and not event.hedge
