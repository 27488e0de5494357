"""Checks the promises against the record of a trial.

Only promises that a client can keep are checked. So three complaints of a strict server do not count: undeclared limits
and undeclared token buckets, which the engine can learn only by exceeding them, and places that a server keeps for
cancelled requests. Instead, the checks use what the client knows: it never awaits more requests than the declared
concurrency, and by the sending times of its requests it never overdraws a declared bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any

from ..quotas.pauses import SHORTEST_PACE_S
from ..samples import Cause, Failed, Scored
from ..scheduling.hedging import LEAST_HEDGES
from ..scheduling.jobs import MAX_FORGIVEN, MAX_RESTARTS
from .draws import poison_of, score_of
from .servers import Server
from .simulated_server import Sent, most_at_once
from .strict_limits import TokenBucket
from .trial import EMPTY, Trial, judge_of
from .trial_player import CallRecord, Given, Record

_ROUNDING_S = 1e-6
_MARGIN = 1.2
"""More than the engine's own margin on windows."""
_PLANS_AGAIN_S = 1.5
"""More than the engine leaves a source idle before it chooses again, and more than calls wait for a full request."""


@dataclass(frozen=True)
class Broken:
    """A promise that a trial broke."""

    promise: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.what}"


def broken_promises(trial: Trial, record: Record) -> list[Broken]:
    """Every broken promise, with its first few cases; empty if all were kept."""
    if record.aborted:
        # An aborted trial proves nothing else.
        return [Broken("liveness", record.aborted)]
    found: list[Broken] = []
    for promise, check in _CHECKS.items():
        found += [Broken(promise, what) for what in islice(check(trial, record), _MOST_SAID)]
    return found


def _answered(trial: Trial, record: Record) -> Iterator[str]:
    """P1: one outcome for each sample, in order, by its deadline."""
    for call in record.calls:
        complete = not call.broken_off
        if complete and len(call.given) != len(call.call.samples):
            yield f"{len(call.given)} of {len(call.call.samples)} samples of a {call.call} were taken"
        for given in call.given:
            name = given.sample.id
            if given.outcome is None:
                if complete:
                    yield f"{name} has no outcome"
                continue
            if given.ended_at > given.due_at + _ROUNDING_S:
                yield f"{name} was due at {given.due_at:.6f} s, its outcome came at {given.ended_at:.6f} s"
            # A batch may be given to its caller later than each sample was known, and a stream when it is drawn.
            known_at = given.ended_at if call.call.kind == "single" else max(given.ended_at, given.due_at)
            if call.call.kind != "stream" and given.returned_at > known_at + _ROUNDING_S:
                yield f"{name} was answered at {given.ended_at:.6f} s, its caller knew at {given.returned_at:.6f} s"
            if given.ended_at > record.closed_at + _ROUNDING_S:
                yield f"{name} has an outcome of {given.ended_at:.6f} s, after the engine was closed"
            if isinstance(given.outcome, Failed) and given.outcome.reason == "deadline":
                early = given.due_at - given.ended_at
                if early > _ROUNDING_S:
                    yield f"{name} was failed {early:.6f} s before its deadline, because of its deadline"
        yield from _cut_off(call)
    if record.ended > len(record.given()):
        yield f"{len(record.given())} samples were taken, and there are more outcomes: {record.ended}"


def _cut_off(call: CallRecord) -> Iterator[str]:
    """A cut-off batch ends when its time is over and every group has its quorum, and not before."""
    if call.call.cutoff is None or call.broken_off:
        return
    after_s, quorum = call.call.cutoff
    groups: dict[str | None, list[Given]] = defaultdict(list)
    for given in call.given:
        groups[given.sample.group_id].append(given)
    in_at = max((_in_at(group, quorum) for group in groups.values()), default=0.0)
    over_at = max(call.started_at + after_s, in_at)
    for given in call.given:
        if given.ended_at > over_at + _ROUNDING_S:
            yield f"{given.sample.id} ended at {given.ended_at:.6f} s, its batch was to be cut off at {over_at:.6f} s"
        if isinstance(given.outcome, Failed) and given.outcome.reason == "cutoff":
            early = over_at - given.ended_at
            if early > _ROUNDING_S:
                yield f"{given.sample.id} was cut off {early:.6f} s before its batch's quorum was in"


def _in_at(group: list[Given], quorum: float) -> float:
    """When the share `quorum` of a group's samples, without those failed by then, had a reward; infinity: never.

    Samples that were cut off do not count as failed, because this checks the cut-off.
    """
    rewarded, expected = 0, len(group)
    if math.ceil(quorum * expected - 1e-9) <= 0:
        return 0.0
    for given in sorted(group, key=lambda given: given.ended_at):
        outcome = given.outcome
        if outcome is None or (isinstance(outcome, Failed) and outcome.reason == "cutoff"):
            continue
        if outcome.reward is None:
            expected -= 1
        else:
            rewarded += 1
        if rewarded >= math.ceil(quorum * expected - 1e-9):
            return given.ended_at
    return math.inf


def _true(trial: Trial, record: Record) -> Iterator[str]:
    """P2: every score is the server's score of that sample, or the floor of its judge."""
    answers = {(sent.source, sent.sample, round(sent.ended_at, 6)) for sent in record.sent if sent.ending == "valid"}
    for given in record.given():
        sample, outcome = given.sample, given.outcome
        if outcome is None:
            continue
        name = judge_of(trial.config, sample)
        node = trial.config["judges"][name]
        if outcome.failure is not None:
            yield from _failure(node, given, outcome.failure)
            continue
        assert isinstance(outcome, Scored)
        verdict = outcome.verdict
        if sample.response == EMPTY:
            yield f"{sample.id} was scored, and is empty"
            continue
        low, high = node["reward_range"]
        right = low + (high - low) * score_of(sample.id or "") / 10.0
        if not (isinstance(verdict.score, float) and abs(verdict.score - right) <= 1e-9):  # NaN is not right, either
            yield f"{sample.id} has the score {verdict.score!r}, the server gave {right!r}"
        if verdict.judge != name or verdict.source not in node["sources"]:
            yield f"{sample.id} was scored by {verdict.judge} at {verdict.source}, not by {name}"
        elif (verdict.source, sample.id, round(given.ended_at, 6)) not in answers:
            yield f"{sample.id} was scored at {given.ended_at:.6f} s, and {verdict.source} gave no valid answer then"


def _failure(node: Mapping[str, Any], given: Given, failed: Failed) -> Iterator[str]:
    sample, outcome = given.sample, given.outcome
    assert outcome is not None
    policy = failed.cause is Cause.POLICY
    has_floor = policy or (failed.cause is Cause.VERDICT and node["on_invalid"] == "floor")
    right = node["reward_range"][0] if has_floor else None
    if outcome.reward != right or (isinstance(outcome, Scored) and outcome.verdict.basis != "floor"):
        yield f"{sample.id} failed ({failed.describe()}) with a reward of {outcome.reward!r}, not {right!r}"
    if (sample.response == EMPTY) != policy:
        yield f"the response of {sample.id} is {sample.response[:10]!r}, and it is {failed.describe()}"
    if failed.reason not in _REASONS:
        yield f"{sample.id} failed for no known reason: {failed.describe()} {failed.detail}"


def _limited(trial: Trial, record: Record) -> Iterator[str]:
    """P3: no declared limit is broken."""
    for server in trial.servers:
        watched = record.servers[server.name]
        if not server.declared:
            continue
        known_bucket = server.window == "bucket" and server.declares_window
        for at, limit in watched.violations:
            # A client cannot know an undeclared bucket, nor the jitter of the network.
            if limit == "requests" and server.window == "bucket":
                continue
            if limit == "concurrency" and not server.cancel_frees:
                continue
            yield f"{server.name} was over its {limit} at {at:.6f} s"
        awaited = most_at_once(sent for sent in record.sent if sent.source == server.name)
        if server.concurrency is not None and awaited > server.concurrency:
            yield f"{awaited} requests were in flight at {server.name}, its limit is {server.concurrency}"
        if known_bucket and server.requests_per_minute is not None:
            bucket = TokenBucket(server.requests_per_minute / 60.0, float(server.burst))
            for sent in record.sent:
                if sent.source == server.name and sent.leads:
                    if bucket.excess(1, sent.started_at):
                        yield f"the bucket of {server.name} was overdrawn at {sent.started_at:.6f} s"
                    bucket.enter(1, sent.started_at)


def _bounded(trial: Trial, record: Record) -> Iterator[str]:
    """P4: attempts <= N * (1 + retry budget + hedge budget).

    Requests that a source refused do not count, nor those of several calls, which are split until the call to blame is
    alone. Probes of a source that is down are free (`_probes`). If only poisoned samples wait, their failures look like
    an outage.
    """
    engine = trial.config["engine"]
    hedge_budget = engine["scheduling"]["hedge_budget"] if engine["scheduling"]["hedge"] else 0.0
    per_sample = _per_sample(record)
    probes = _probes(record)
    attempts = most = 0
    for given in record.given():
        sent = per_sample[given.sample.id or ""]
        if (outcome := given.outcome) is not None:
            counted = outcome.verdict.attempts if isinstance(outcome, Scored) else outcome.attempts
            if len(sent) > counted:
                yield f"{given.sample.id} was sent {len(sent)} times, its outcome says {counted}"
        if poison_of(given.sample) is None:
            own = [one for one in sent if one.ending != "throttled" and one.together == 1 and id(one) not in probes]
            attempts += len(own) - _hedges(sent)
            judge = trial.config["judges"][judge_of(trial.config, given.sample)]
            # The first attempt is one of `max_attempts`. Some are forgiven: at a source that fails for everybody, and
            # those that are given up for their age.
            given_up = sum(one.ending == "cancelled" for one in sent)
            most += engine["max_attempts"] + judge["invalid_retries"] + MAX_FORGIVEN + min(given_up, MAX_RESTARTS)
    if attempts > most:
        yield f"{attempts} requests were sent, without hedges; {most} is the most"
    for call in record.calls:
        if call.call.kind == "batch":
            count = sum(_hedges(per_sample[sample.id or ""]) for sample in call.call.samples)
            most_in_batch = max(LEAST_HEDGES, hedge_budget * len(call.call.samples)) if hedge_budget else 0
            if count > most_in_batch:
                yield f"a {call.call} was hedged {count} times; {most_in_batch:g} is the most"


def hedges_of(record: Record) -> int:
    """The number of requests that began while another one of the same sample was in flight."""
    return sum(map(_hedges, _per_sample(record).values()))


def _probes(record: Record) -> set[int]:
    """The requests, by `id`, that probed a source: alone there, half a second or more after one that failed."""
    probes = set()
    at_source: dict[str, list[Sent]] = defaultdict(list)
    for sent in record.sent:
        at_source[sent.source].append(sent)
    for requests in at_source.values():
        busy_until, last = -math.inf, None
        for sent in sorted(requests, key=lambda one: one.started_at):
            if last is not None and last.ending not in ("valid", "throttled"):
                may_probe_at = max(busy_until, last.started_at + SHORTEST_PACE_S - _ROUNDING_S)
                if sent.started_at >= may_probe_at:
                    probes.add(id(sent))
            busy_until = max(busy_until, sent.ended_at)
            last = sent
    return probes


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


def _clean(trial: Trial, record: Record) -> Iterator[str]:
    """P5: nothing is left behind, and nothing unexpected happens."""
    yield from record.left
    yield from record.alarms
    for sent in record.sent:
        if sent.started_at > record.closed_at + _ROUNDING_S:
            yield f"{sent.sample} was sent to {sent.source} at {sent.started_at:.6f} s, after the engine was closed"
        elif sent.ending == "under way" or sent.ended_at > record.ended_at:
            yield f"the request of {sent.sample} to {sent.source} at {sent.started_at:.6f} s never ended"


def _final(trial: Trial, record: Record) -> Iterator[str]:
    """P6: an outcome never changes, is that of the first valid answer, and no attempt of it follows.

    A request of several calls goes on until all of them are over, so its end says nothing about one of them.
    """
    ended_at: dict[str, float] = {}
    complete: set[str] = set()
    for call in record.calls:
        for given in call.given:
            name = given.sample.id or ""
            ended_at[name] = call.ended_at if given.outcome is None else given.ended_at
            if given.outcome is not None:
                complete.add(name)
                if repr(given.outcome) != given.words:
                    yield f"the outcome of {name} was {given.words}, and has become {given.outcome!r}"
    for sent in record.sent:
        over_at = ended_at.get(sent.sample, math.nan)
        where = f"{sent.sample} was over at {over_at:.6f} s, and its request to {sent.source}"
        if sent.started_at > over_at + _ROUNDING_S:
            yield f"{where} was sent at {sent.started_at:.6f} s"
        elif sent.together > 1:
            continue
        elif sent.ended_at > over_at + _ROUNDING_S:
            yield f"{where} was under way until {sent.ended_at:.6f} s"
        elif sent.ending == "valid" and sent.ended_at < over_at - _ROUNDING_S and sent.sample in complete:
            yield f"{where} gave a valid answer at {sent.ended_at:.6f} s"


def _unharmed(trial: Trial, record: Record) -> Iterator[str]:
    """P11: a fault that a response provokes costs only its sample."""
    if not trial.poisoned:
        return
    for given in record.given():
        sample = given.sample
        to_be_scored = sample.response != EMPTY and poison_of(sample) is None
        if to_be_scored and not isinstance(given.outcome, Scored):
            ending = given.outcome.describe() if given.outcome is not None else "without an outcome"
            yield f"{sample.id} is not poisoned, and is {ending}"


def _alive(trial: Trial, record: Record) -> Iterator[str]:
    """No sample waits while nothing is under way and a server of its judge is sure to have room.

    A server is sure to have it if it has given nothing but valid answers, its limits are declared, and its windows are
    empty. A sample counts before its first request: later it may rest in a backoff.
    """
    if trial.config["engine"]["scheduling"]["prefer"] == "cost":
        return  # it may wait for a cheaper server
    first_sent: dict[str | None, float] = {}
    for sent in record.sent:
        first_sent.setdefault(sent.sample, sent.started_at)
    rests = {sent.source for sent in record.sent if sent.ending != "valid"}
    emptied_s = {each.name: math.inf if each.name in rests else _emptied_s(each) for each in trial.servers}
    for start_s, end_s in _idle(record):
        if end_s - start_s <= min(emptied_s.values()):
            continue
        for call in record.calls:
            for given in call.given:
                over_at = call.ended_at if given.outcome is None else given.ended_at
                until_s = min(end_s, over_at, first_sent.get(given.sample.id, math.inf))
                waited_s = until_s - max(start_s, given.submitted_at)
                sources = trial.config["judges"][judge_of(trial.config, given.sample)]["sources"]
                if waited_s > min(emptied_s[name] for name in sources):
                    yield f"until {until_s:.6f} s {given.sample.id} waited {waited_s:.6f} s, and nothing was under way"


def _idle(record: Record) -> Iterator[tuple[float, float]]:
    """The stretches in which no request is under way."""
    busy_until = 0.0
    for sent in sorted(record.sent, key=lambda sent: sent.started_at):
        if sent.started_at > busy_until:
            yield busy_until, sent.started_at
        busy_until = max(busy_until, sent.ended_at)
    yield busy_until, record.closed_at


def _emptied_s(server: Server) -> float:
    """How long nothing must be sent to a server until it is sure to have room; infinity if that is never sure."""
    unknown = not server.declared or (server.window == "bucket" and not server.declares_window)
    if unknown or server.announces == "wrong":
        return math.inf
    return _MARGIN * max(server.window_s, server.burst) + _PLANS_AGAIN_S


def _blamed(trial: Trial, record: Record) -> Iterator[str]:
    """The parts of a batch's report add up to its makespan, and its counts to its samples."""
    for report in record.reports:
        total_s = math.fsum(part.seconds for part in report.parts)
        if abs(total_s - report.makespan_s) > _ROUNDING_S:
            yield f"the parts of {report} add up to {total_s:.6f} s"
        if any(not part.seconds > 0 for part in report.parts):
            yield f"a part of {report} is empty or negative"
        if report.scored + report.failed != report.samples:
            yield f"{report} does not add up"


_CHECKS: dict[str, Callable[[Trial, Record], Iterator[str]]] = {
    "P1 one outcome by the deadline": _answered,
    "P2 only the servers' scores": _true,
    "P3 no limit broken": _limited,
    "P4 attempts within their budgets": _bounded,
    "P5 nothing left behind": _clean,
    "P6 an outcome stays": _final,
    "P11 a response costs only its own sample": _unharmed,
    "liveness": _alive,
    "blame adds up": _blamed,
}
REPLAY = "P7 the same seed, the same schedule"

_MOST_SAID = 3
_REASONS = ("cutoff", "deadline", "closed", "empty", "exhausted", "invalid", "refused", "garbage", "no_source")
"""All but `bug`."""


def replay_differs(first: Record, second: Record) -> Broken | None:
    """P7: the first difference between two plays of a trial."""
    one, other = first.text(), second.text()
    if one == other:
        return None
    lines = enumerate(zip_longest(one.splitlines(), other.splitlines()), 1)
    line, (was, became) = next((line, pair) for line, pair in lines if pair[0] != pair[1])
    return Broken(REPLAY, f"line {line} was {was!r} and became {became!r}")
