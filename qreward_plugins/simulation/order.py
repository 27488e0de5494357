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

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from ..config import Config, priority_of, routes_of
from ..quotas.retries import FLOOR_PER_S, PER_SUCCESS, RESERVE
from ..samples import Sample, Scored
from ..scheduling import Dispatcher, Job, Upstream
from ..scheduling.breaker import SAMPLES_TO_OPEN
from ..scheduling.forecast import Forecast
from ..scheduling.hedging import LEAST_HEDGES
from ..scheduling.jobs import MAX_FORGIVEN, MAX_HEDGES, MAX_LIVE, MAX_RESTARTS
from .poison import poison_of
from .record import Record, Sent
from .trial import Call, Trial, judge_of

_ROUNDING_S = 1e-6


def bounded(trial: Trial, record: Record) -> Iterator[str]:
    """P4: attempts, hedges and retries keep to their budgets."""
    engines = [config["engine"] for config in record.configs]
    hedged = any(engine["scheduling"]["hedge"] for engine in engines)
    hedge_budget = max(engine["scheduling"]["hedge_budget"] for engine in engines)
    max_attempts = max(engine["max_attempts"] for engine in engines)
    per_sample = _per_sample(record)
    hedges = {name: _hedges(sent) for name, sent in per_sample.items()}
    by_server: dict[str, list[Sent]] = defaultdict(list)
    for one in record.sent:
        by_server[one.server].append(one)
    for given in record.given():
        sample, config = given.sample, record.configs[given.epoch]
        name = sample.id or ""
        sent, judge = per_sample.get(name, []), judge_of(config, sample)
        retries = config["judges"][judge]["invalid_retries"] if judge is not None else 0
        throttled = sum(one.ending == "throttled" for one in sent)
        # A request of several calls that fails is split, until the call to blame is alone.
        split = sum(one.together > 1 and one.ending in ("failed", "cancelled") for one in sent)
        # Failed attempts are bounded; probes of a source with an open circuit count once more. Attempts that the engine
        # ended do not count, nor do those at a source that failed several samples and answered none meanwhile.
        excused = sum(_excused(one, sent[0], by_server[one.server], record) for one in sent)
        excused += min(sum(one.ending == "cancelled" for one in sent), MAX_RESTARTS + MAX_FORGIVEN)
        most = 2 * max_attempts + retries + MAX_HEDGES + throttled + excused + split
        # If only poisoned samples wait, their failures look like an outage, and probes are free.
        if len(sent) > most and poison_of(sample) is None:
            yield f"{name} was sent {len(sent)} times, {throttled} of them throttled; {most} is the most"
        most_hedges = MAX_HEDGES if hedged else 0
        if hedges.get(name, 0) > most_hedges:
            yield f"{name} was hedged {hedges[name]} times; {most_hedges} is the most"
        most_live = max((_live(sent, one.started_at) for one in sent), default=0)
        if most_live > MAX_LIVE:
            yield f"{most_live} requests of {name} were in flight at once; {MAX_LIVE} is the most"
    for call in record.calls:
        if call.call.kind == "batch":
            count = sum(hedges.get(sample.id or "", 0) for sample in call.call.samples)
            most_in_batch = max(LEAST_HEDGES, hedge_budget * len(call.call.samples))
            if count > most_in_batch:
                yield f"a {call.call.describe()} was hedged {count} times; {most_in_batch:g} is the most"
    yield from _retries(record, per_sample)
    for given in record.given():
        if given.outcome is not None:
            outcome = given.outcome
            attempts = outcome.verdict.attempts if isinstance(outcome, Scored) else outcome.attempts
            count = len(per_sample.get(given.sample.id or "", []))
            if count > attempts:
                yield f"{given.sample.id} was sent {count} times, its outcome says {attempts}"


def hedges_of(record: Record) -> int:
    """The number of requests that began while another one of the same sample was in flight."""
    return sum(map(_hedges, _per_sample(record).values()))


def _per_sample(record: Record) -> dict[str, list[Sent]]:
    per_sample: dict[str, list[Sent]] = defaultdict(list)
    for sent in record.sent:
        per_sample[sent.sample].append(sent)
    return per_sample


def _excused(one: Sent, first: Sent, sent: list[Sent], record: Record) -> bool:
    """Whether a request failed at a server that had answered nobody since the `first` request of its sample, and had
    failed others. `sent`: what the server was sent.
    """

    def failed(other: Sent) -> bool:
        node = record.configs[other.epoch]["sources"].get(other.source)
        timeout_s = node["timeouts"]["total_s"] if node is not None else math.inf
        timed_out = other.ending == "cancelled" and other.ended_at - other.started_at >= timeout_s - _ROUNDING_S
        return other.ending == "failed" or timed_out

    if not failed(one):
        return False
    before = [other for other in sent if other.ended_at <= one.ended_at]
    failing = {other.sample for other in before if failed(other)}
    answered = any(other.ending in ("valid", "invalid") for other in before if other.ended_at >= first.started_at)
    return len(failing) >= SAMPLES_TO_OPEN and not answered


def _hedges(sent: list[Sent]) -> int:
    """The number of a sample's requests that began while another one was in flight."""
    count = 0
    for number, one in enumerate(sent):
        # A call may leave a request that goes on for the other calls in it.
        alone = (other for other in sent[:number] if other.together == 1)
        count += any(other.ended_at > one.started_at + _ROUNDING_S for other in alone)
    return count


def _live(sent: list[Sent], at: float) -> int:
    """The number of a sample's requests in flight."""
    return sum(one.started_at <= at and one.ended_at > at + _ROUNDING_S for one in sent if one.together == 1)


def _retries(record: Record, per_sample: dict[str, list[Sent]]) -> Iterator[str]:
    """Retries because of a source keep to that source's budget, from the start to any time."""
    again: dict[str, list[float]] = defaultdict(list)
    answered: dict[str, list[float]] = defaultdict(list)
    for sent in record.sent:
        if sent.ending in ("valid", "invalid"):
            answered[sent.server].append(sent.ended_at)
    for requests in per_sample.values():
        for number, sent in enumerate(requests):
            if sent.ending == "failed" and sent.together == 1:
                later = [other for other in requests[number + 1 :] if other.started_at >= sent.ended_at - _ROUNDING_S]
                if later and not any(
                    other.started_at < sent.ended_at < other.ended_at for other in requests if other is not sent
                ):
                    again[sent.server].append(later[0].started_at)
    for source, times in again.items():
        for number, at in enumerate(sorted(times), 1):
            successes = sum(ended_at <= at for ended_at in answered[source]) if number > RESERVE else 0
            if number > RESERVE + FLOOR_PER_S * at + PER_SUCCESS * successes + 1:
                yield f"{number} retries because of {source} until {at:.6f} s, and {successes} successes"
                break


_MOST_RECORDED = 20
_LEAST_S = 1e-9


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
        return max(job.not_before, job.backoff_until.get(name, now - 1)) < now - _LEAST_S

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
