"""Checks P4 against the record of a trial: attempts, retries and hedges keep to their budgets."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from ..quotas.retries import FLOOR_PER_S, PER_SUCCESS, RESERVE
from ..samples import Scored
from ..scheduling.hedging import LEAST_HEDGES
from ..scheduling.jobs import MAX_FORGIVEN, MAX_RESTARTS
from .poison import poison_of
from .record import Record, Sent
from .trial import Trial, judge_of

_ROUNDING_S = 1e-6


def bounded(trial: Trial, record: Record) -> Iterator[str]:
    """P4: attempts <= N * (1 + retry budget + hedge budget); a batch and a source keep to their own budgets, too.

    Requests that a source refused do not count, nor those of several calls, which are split until the call to blame is
    alone. If only poisoned samples wait, their failures look like an outage, and probes are free.
    """
    engine = trial.config["engine"]
    hedge_budget = engine["scheduling"]["hedge_budget"] if engine["scheduling"]["hedge"] else 0.0
    per_sample = _per_sample(record)
    attempts = most = 0
    for given in record.given():
        sent = per_sample.get(given.sample.id or "", [])
        if given.outcome is not None:
            outcome = given.outcome
            counted = outcome.verdict.attempts if isinstance(outcome, Scored) else outcome.attempts
            if len(sent) > counted:
                yield f"{given.sample.id} was sent {len(sent)} times, its outcome says {counted}"
        if poison_of(given.sample) is None:
            attempts += sum(one.ending != "throttled" and one.together == 1 for one in sent) - _hedges(sent)
            judge = trial.config["judges"][judge_of(trial.config, given.sample)]
            # The first attempt is one of `max_attempts`. Some are forgiven: at a source that fails for everybody, and
            # those that are given up for their age.
            given_up = sum(one.ending == "cancelled" for one in sent)
            most += engine["max_attempts"] + judge["invalid_retries"] + MAX_FORGIVEN + min(given_up, MAX_RESTARTS)
    if attempts > most:
        yield f"{attempts} requests were sent, without hedges; {most} is the most"
    for call in record.calls:
        if call.call.kind == "batch":
            count = sum(_hedges(per_sample.get(sample.id or "", [])) for sample in call.call.samples)
            most_in_batch = max(LEAST_HEDGES, hedge_budget * len(call.call.samples)) if hedge_budget else 0
            if count > most_in_batch:
                yield f"a {call.call.describe()} was hedged {count} times; {most_in_batch:g} is the most"
    yield from _retries(record, per_sample)


def hedges_of(record: Record) -> int:
    """The number of requests that began while another one of the same sample was in flight."""
    return sum(map(_hedges, _per_sample(record).values()))


def _per_sample(record: Record) -> dict[str, list[Sent]]:
    per_sample: dict[str, list[Sent]] = defaultdict(list)
    for sent in record.sent:
        per_sample[sent.sample].append(sent)
    return per_sample


def _hedges(sent: list[Sent]) -> int:
    """The number of a sample's requests that began while another one was in flight."""
    count = 0
    for number, one in enumerate(sent):
        # A call may leave a request that goes on for the other calls in it.
        alone = (other for other in sent[:number] if other.together == 1)
        count += any(other.ended_at > one.started_at + _ROUNDING_S for other in alone)
    return count


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
