"""Checks the order of samples at each source: of those that it may be sent now, one of the highest priority goes first.

The check sees every attempt at the moment before it starts: first tries, retries and hedges, at any number of sources.
A sample of higher priority may wait meanwhile for these reasons only, which `docs/scheduling.md` states:

- it may not go to this source now: its backoff, or it is barred there;
- it goes after all others, because it is suspect or oversize;
- the source has an open circuit, and any sample may probe it;
- the source is slow, and another one would answer the larger sample earlier;
- a call joins a request that is not sent yet, which the other one may not join: it waits for a request of its own.

Tokens that do not fit yet are no reason: they would never fit if samples of lower priority took them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from ..config import Config, priority_of, routes_of
from ..samples import Sample
from ..scheduling import Dispatcher, Job, Upstream
from ..scheduling.forecast import Forecast
from .record import Record
from .trial import Call

_MOST_RECORDED = 20
_ROUNDING_S = 1e-9


def priority_given(config: Config, sample: Sample, call: Call) -> int:
    """Return the priority that a call or the configuration gives a sample."""
    if call.priority is not None:
        return call.priority
    route = next((route for pattern, route in routes_of(config) if fnmatchcase(sample.data_source, pattern)), None)
    return 0 if route is None else priority_of(config, route, sample.split)


class Order:
    """Watches the attempts of a dispatcher, and records in `record.overtaken` each that goes before a higher priority.

    The priorities are those of the callers and of the configuration, not those that the scheduler works with.
    """

    def __init__(self, record: Record) -> None:
        self._record = record
        self._dispatcher: Dispatcher
        self._priorities: dict[str, int] = {}

    def watch(self, dispatcher: Dispatcher) -> None:
        """Check each attempt that `dispatcher` starts from now on."""
        self._dispatcher = dispatcher
        dispatcher._start_attempt = self._looking(dispatcher._start_attempt)  # type: ignore[method-assign]

    def add(self, sample: Sample, priority: int) -> None:
        """Record the priority of a sample that is submitted."""
        self._priorities[sample.id or ""] = priority

    def _looking(self, start: Callable[..., None]) -> Callable[..., None]:
        def look_and_start(job: Job, upstream: Upstream, now: float, *, hedge: bool) -> None:
            if len(self._record.overtaken) < _MOST_RECORDED and not job.ended:
                self._record.overtaken += self._overtaken(job, upstream, now, hedge=hedge)
            start(job, upstream, now, hedge=hedge)

        return look_and_start

    def _overtaken(self, job: Job, upstream: Upstream, now: float, *, hedge: bool) -> Iterator[str]:
        if not upstream.breaker.closed:
            return
        priority = self._priority(job)
        for other in self._dispatcher._jobs:
            if self._priority(other) <= priority or other is job or not self._may_go(other, upstream, now):
                continue
            if not hedge and (self._joins(job, other, upstream, now) or self._waits_for_better(other, upstream, now)):
                continue
            sent = f"sent to {upstream.name}{' as a hedge' if hedge else ''} at {now:.6f} s"
            yield (
                f"{_name(job)} (priority {priority}) was {sent}, while {_name(other)} (priority"
                f" {self._priority(other)}) waited since {other.submitted_at:.6f} s"
            )

    def _may_go(self, job: Job, upstream: Upstream, now: float) -> bool:
        """Whether a waiting job may go to a source, as far as that depends on the job."""
        name, dispatcher = upstream.name, self._dispatcher
        if job.live or job.undecided or job.ended or job in dispatcher._arrived or job.deadline_at <= now:
            return False
        if name not in job.call.sources or name in job.barred or upstream.too_large(job.request):
            return False
        if job.last or upstream.oversize(job.request):
            return False
        # A timer of this very moment may still have to run.
        return max(job.not_before, job.backoff_until.get(name, now - 1)) < now - _ROUNDING_S

    def _joins(self, job: Job, other: Job, upstream: Upstream, now: float) -> bool:
        """Whether `job` joins a request that `other` may not join, and `other` has no request of its own yet."""
        batches = upstream.request_batches
        joined = batches.admitting(job) if batches is not None else None
        if batches is None or joined is None or batches.admitting(other) is joined:
            return False
        return upstream.wait_for_s(other, now) > 0 and upstream.tokens_fit(other, now)

    def _waits_for_better(self, job: Job, upstream: Upstream, now: float) -> bool:
        """Whether another source would answer a waiting job earlier than this one, which is slow."""
        planner = self._dispatcher._planner
        if planner._choose is not None or len(self._dispatcher._upstreams) == 1:
            return False
        with _untouched(planner.forecast):
            return not planner.finishes_first(upstream, job, now)

    def _priority(self, job: Job) -> int:
        return self._priorities[_name(job)]


@contextmanager
def _untouched(forecast: Forecast) -> Iterator[None]:
    """Restore the state of a forecast afterwards, so that asking it changes nothing for the engine."""
    kept: dict[str, Any] = {name: getattr(forecast, name) for name in ("_made_at", "_made_for", "_ends")}
    unneeded = set(forecast._unneeded)
    try:
        yield
    finally:
        for name, value in kept.items():
            setattr(forecast, name, value)
        forecast._unneeded.clear()
        forecast._unneeded.update(unneeded)


def _name(job: Job) -> str:
    return job.request.sample.id or ""
