"""Checks P4 against the record of a trial: attempts, retries and hedges keep to their budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..quotas.retries import FLOOR_PER_S, PER_SUCCESS, RESERVE
from ..samples import Scored
from ..scheduling.breaker import SAMPLES_TO_OPEN
from ..scheduling.hedging import LEAST_HEDGES
from ..scheduling.jobs import MAX_FORGIVEN, MAX_HEDGES, MAX_LIVE
from .poison import poison_of
from .record import Record, Sent
from .trial import Trial, judge_of

_ROUNDING_S = 1e-6


def bounded(trial: Trial, record: Record) -> Iterator[str]:
    """P4: attempts, hedges and retries keep to their budgets."""
    engine = trial.config["engine"]
    hedged, hedge_budget = engine["scheduling"]["hedge"], engine["scheduling"]["hedge_budget"]
    per_sample = _per_sample(record)
    hedges = {name: _hedges(sent) for name, sent in per_sample.items()}
    by_source: dict[str, list[Sent]] = defaultdict(list)
    for one in record.sent:
        by_source[one.source].append(one)
    for given in record.given():
        sample = given.sample
        name = sample.id or ""
        sent = per_sample.get(name, [])
        retries = trial.config["judges"][judge_of(trial.config, sample)]["invalid_retries"]
        throttled = sum(one.ending == "throttled" for one in sent)
        # A request of several calls that fails is split, until the call to blame is alone.
        split = sum(one.together > 1 and one.ending in ("failed", "cancelled") for one in sent)
        # Failed attempts are bounded; probes of a source with an open circuit count once more. Attempts that the engine
        # ended do not count, nor do those at a source that failed several samples and answered none meanwhile.
        excused = sum(_excused(one, sent[0], by_source[one.source], trial) for one in sent)
        excused += min(sum(one.ending == "cancelled" for one in sent), MAX_FORGIVEN)
        most = 2 * engine["max_attempts"] + retries + MAX_HEDGES + throttled + excused + split
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


def _excused(one: Sent, first: Sent, sent: list[Sent], trial: Trial) -> bool:
    """Whether a request failed at a server that had answered nobody since the `first` request of its sample, and had
    failed others. `sent`: what the server was sent.
    """

    def failed(other: Sent) -> bool:
        timeout_s = trial.config["sources"][other.source]["timeouts"]["total_s"]
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
            answered[sent.source].append(sent.ended_at)
    for requests in per_sample.values():
        for number, sent in enumerate(requests):
            if sent.ending == "failed" and sent.together == 1:
                later = [other for other in requests[number + 1 :] if other.started_at >= sent.ended_at - _ROUNDING_S]
                if later and not any(
                    other.started_at < sent.ended_at < other.ended_at for other in requests if other is not sent
                ):
                    again[sent.source].append(later[0].started_at)
    for source, times in again.items():
        for number, at in enumerate(sorted(times), 1):
            successes = sum(ended_at <= at for ended_at in answered[source]) if number > RESERVE else 0
            if number > RESERVE + FLOOR_PER_S * at + PER_SUCCESS * successes + 1:
                yield f"{number} retries because of {source} until {at:.6f} s, and {successes} successes"
                break
