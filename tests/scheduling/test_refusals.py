"""A source with several servers, one of which refuses a request: the source is asked once more, and then decides."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace

import pytest

from qreward_plugins.config import Batch
from qreward_plugins.errors import PermanentError, TransientError
from qreward_plugins.quotas.retries import PER_SUCCESS, RESERVE
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.scheduling import Answer, Call
from qreward_plugins.scheduling.backoff import Backoff
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


def refused(refusal=None):
    return PermanentError("answered 400: too long", status=400, refusal=refusal)


def first_refuses(*, others=1.0, asked=None):
    """One server refuses; the others answer after so many seconds, or with this error."""

    def behaviour(number, request, now):
        if asked is not None:
            asked.append(request.refusal)
        return refused("a") if request.refusal is None else others

    return behaviour


def test_another_server_of_the_source_may_answer(stage):
    asked = []
    source = stage.add("own", behaviour=first_refuses(asked=asked))
    played = stage.play([10], max_attempts=1)
    assert played.all_scored
    assert asked == [None, "a"]
    assert played.outcomes[0].verdict.spent.attempts == 2
    assert played.finished_at == pytest.approx(1.0)
    counted = stage.counted("own")
    assert (counted.requests, counted.answered, counted.permanent, counted.transient) == (2, 1, 1, 0)
    assert source.in_flight == 0


def test_a_second_refusal_is_the_request_s(stage):
    asked = []
    stage.add("own", behaviour=first_refuses(others=refused(), asked=asked))
    (outcome,) = stage.play([10]).outcomes
    assert (outcome.cause, outcome.reason) == (Cause.INFRA, "no_source")
    assert asked == [None, "a"]


def test_a_source_that_always_names_another_server_is_asked_once_more(stage):
    asked = []
    stage.add("own", behaviour=first_refuses(others=refused("b"), asked=asked))
    (outcome,) = stage.play([10]).outcomes
    assert outcome.reason == "no_source"
    assert asked == [None, "a"]


def test_what_a_source_refuses_as_a_whole_is_not_asked_there_again(stage):
    source = stage.add("own", behaviour=lambda *_: refused())
    (outcome,) = stage.play([10]).outcomes
    assert (outcome.reason, len(source.arrivals)) == ("no_source", 1)


def test_the_blame_is_clear_after_the_second_refusal(stage):
    stage.judge.floors = {Cause.VERDICT: 0.0}
    stage.add(
        "own",
        limits={"concurrency": 2},
        behaviour=lambda number, request, now: (
            1.0 if request.size != 77 else refused("a" if request.refusal is None else None)
        ),
    )
    outcomes = stage.play([77, 10, 10, 10]).outcomes
    assert [outcome.verdict.score for outcome in outcomes] == [0.0, 1.0, 1.0, 1.0]
    assert outcomes[0].verdict.failure.reason == "refused"


@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"concurrency": 1}])
def test_the_further_request_keeps_to_the_limits(stage, limits):
    strict = {
        "requests_per_window": limits.get("requests_per_minute", 10**6),
        "concurrency": limits.get("concurrency", 10**6),
    }
    source = stage.add("own", limits=limits, behaviour=first_refuses(), **strict)
    played = stage.play([10] * 3, deadline_s=1000.0)
    assert played.all_scored
    assert len(source.arrivals) == 6
    assert source.violations == []
    if "requests_per_minute" in limits:
        assert all(after - before >= 60 for before, after in zip(source.arrivals, source.arrivals[1:], strict=False))


@pytest.mark.parametrize("undecided", [False, True])
@pytest.mark.parametrize("told", ["earned", "release"])
def test_answers_queue_a_failed_job_again_unless_its_tries_are_used_up(stage, told, undecided):
    """A hedge may have used them up by an invalid reply after the first attempt failed."""
    stage.add("own")
    upstream = stage.upstreams["own"]

    async def queued():
        queues, now = [], 0.0
        job = stage.job()
        backoff = Backoff(SimpleNamespace(enqueue=queues.append), stage.upstreams, random.Random(0))
        for _ in range(int(RESERVE)):
            upstream.retries.withdraw(now)
        attempt = stage.attempt(job, "own", started_at=now, expected_s=1.0)
        backoff.after_failure(attempt, now)
        backoff.until_budget(attempt, now)
        job.ended_attempt(attempt)
        job.undecided = undecided
        for _ in range(int(1 / PER_SUCCESS)):
            upstream.retries.earn(now)
        if told == "earned":
            backoff.earned(upstream, now)
        else:
            backoff.release(upstream)
        return queues == [job]

    assert run(queued()) is not undecided


def test_a_call_that_still_waits_for_the_second_server_ends_by_its_deadline(stage):
    stage.add("own", behaviour=first_refuses(others=100.0))
    played = stage.play([10], deadline_s=5.0)
    assert [outcome.reason for outcome in played.outcomes] == ["deadline"]
    assert played.finished_at == pytest.approx(5.0)


def test_a_server_that_fails_decides_nothing(stage):
    """The request goes on with the refusal, and only failures count against the call."""
    asked = []

    def behaviour(number, request, now):
        asked.append(request.refusal)
        return (refused("a"), TransientError("502", status=502), refused())[number]

    stage.add("own", behaviour=behaviour)
    (outcome,) = stage.play([10], max_attempts=2).outcomes
    assert outcome.reason == "no_source"
    assert asked == [None, "a", "a"]


def test_another_source_may_answer_first(stage):
    stage.add("own", limits={"requests_per_minute": 1}, behaviour=first_refuses())
    other = stage.add("other", limits={"concurrency": 1}, behaviour=lambda *_: 3.0)
    stage.knows("own", 0.5)
    stage.knows("other", 3.0)
    played = stage.play([10], deadline_s=100.0)
    assert played.shares == Counter(other=1)
    assert len(other.arrivals) == 1


def replaced(source, asked, seconds=1.0, before=lambda request: None):
    """Let `source` take a while for its refusal, too."""

    async def send(request, *, on_sent):
        on_sent()
        asked.append(request.refusal)
        before(request)
        await asyncio.sleep(seconds)
        if request.refusal is None:
            raise refused("a")
        return Reply(text="1")

    source.send = send


def test_a_hedge_that_was_sent_before_the_refusal_does_not_decide(stage):
    """Both attempts may have reached the same server."""
    asked = []
    replaced(stage.add("own"), asked)

    async def main():
        dispatcher = stage.dispatcher()
        future = dispatcher.score(stage.sample(), stage.judge, deadline_s=60.0)
        await asyncio.sleep(0.5)
        (job,) = dispatcher._jobs
        dispatcher._start_attempt(job, stage.upstreams["own"], dispatcher.now(), hedge=True)
        outcome = await future
        await dispatcher.aclose()
        return outcome, dispatcher.now()

    outcome, finished_at = run(main())
    assert isinstance(outcome, Scored)
    assert asked == [None, None, "a"]
    assert finished_at == pytest.approx(2.5)


def invalid_with(asked):
    """A source with several servers, one of which answers invalidly."""

    async def send(request, *, on_sent):
        on_sent()
        asked.append(request.refusal)
        await asyncio.sleep(1.0)
        text = "bad" if request.refusal is None else "1"
        return Reply(text=text, on_judged=lambda valid, now: asked.append((valid, now)) or (None if valid else "a"))

    return send


def test_after_an_invalid_reply_another_server_is_asked(stage):
    """`Reply.on_judged` tells the source what the reply was worth."""
    asked = []
    stage.add("own").send = invalid_with(asked)
    played = stage.play([10])
    assert played.all_scored
    assert asked == [None, (False, 1.0), "a", (True, 2.0)]


@pytest.mark.parametrize(
    ("options", "result", "count"),
    [
        ({"once": True, "refusal_ends": True}, "answered", 2),
        ({"refusal_ends": True}, "answered", 2),
        ({"on_text": lambda text: None}, "answered", 2),
        ({"on_text": lambda text: None, "begins": True, "refusal_ends": True}, "refused", 1),
    ],
)
def test_what_may_be_sent_only_once_is_sent_again_after_a_refusal(stage, options, result, count):
    """A server that refuses a request has done nothing with it. A text that has begun cannot be taken back."""
    asked, told = [], []
    begins = options.pop("begins", False)
    before = (lambda request: request.on_text("piece")) if begins else lambda request: None
    replaced(stage.add("own"), asked, before=before)
    sample = stage.sample()

    class Caller:
        ended = staticmethod(told.append)

        def late(self, answer):
            raise AssertionError(answer)

    async def main():
        dispatcher = stage.dispatcher()
        member = dispatcher.batches.join(dispatcher.batches.of_singles(), None)
        plain = stage.judge.call(sample)
        dispatcher.submit(
            Call(plain.sources, plain.request, plain.read, **options), Caller(), member=member, deadline_at=30.0
        )
        await asyncio.sleep(10.0)
        dispatcher.batches.leave(member, scored=True)
        await dispatcher.aclose()

    run(main())
    assert ["answered" if isinstance(end, Answer) else end.reason for end in told] == [result]
    assert len(asked) == count


def test_calls_of_one_request_are_split_and_asked_again_alone(stage):
    """Only the refusal of a single call says which call is refused."""
    asked = []

    def takes(number, requests, now):
        asked.append([request.refusal for request in requests])
        return refused("a") if any(request.refusal is None for request in requests) else 1.0

    source = stage.add(
        "own",
        batch=Batch(max_size=4, max_wait_s=0.0),
        limits={"concurrency": 1},
        batch_behaviour=takes,
        behaviour=lambda number, request, now: takes(number, [request], now),
    )
    assert stage.play([10] * 4).all_scored
    assert Counter(map(len, asked)) == {4: 1, 2: 2, 1: 8}
    assert [each for each in asked if each != [None] * len(each)] == [["a"]] * 4
    assert source.violations == []


def test_a_call_that_one_server_refused_shares_no_request(stage):
    """Otherwise another call could be the reason for the second refusal."""
    asked = []
    source = stage.add("own", batch=Batch(max_size=4, max_wait_s=0.0), limits={"concurrency": 1})
    replaced(source, asked)

    async def send_batch(requests, *, on_sent):
        on_sent()
        asked.append([request.refusal for request in requests])
        await asyncio.sleep(1.0)
        return [Reply(text="1")] * len(requests)

    source.send_batch = send_batch

    async def main():
        dispatcher = stage.dispatcher()
        first = dispatcher.score(stage.sample(), stage.judge, deadline_s=60.0)
        await asyncio.sleep(0.5)
        others = [dispatcher.score(stage.sample(), stage.judge, deadline_s=60.0) for _ in range(3)]
        outcomes = await asyncio.gather(first, *others)
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main()))
    assert asked == [None, "a", [None] * 3]


def test_the_refusals_of_a_source_are_forgotten_with_it(stage):
    stage.add("own")

    async def main():
        job = stage.job()
        job.refusals = {"own": "a", "other": "b"}
        assert (job.request_to("own").refusal, job.request_to("third").refusal) == ("a", None)
        job.forget_sources(frozenset({"own"}))
        assert (job.request_to("own").refusal, job.request_to("other").refusal) == (None, "b")
        assert job.request_to("own") is job.request

    run(main())
