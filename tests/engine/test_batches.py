"""Batches from the outside, and requests that carry several calls: when they are sent, what they count, and what their
failure means.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import pytest

from qreward_plugins import Cause, Cutoff, EngineError, InvalidReply, Scored, SourceStateChanged
from qreward_plugins.config import Batch
from qreward_plugins.errors import PermanentError, SampleRefused, SourceUnusable, Throttled, TransientError
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply

from ..kit import NEVER_S, MemoryJournal, Recorder, Stage, each_of, fails, hangs, make_sample, make_samples, now

LOGGER = "qreward_plugins.scheduling"


def test_the_last_batch_says_what_it_waited_for(caplog):
    async def main(engine):
        assert engine.last_batch() is None
        await engine.score_all(make_samples(8))
        return engine.last_batch()

    with caplog.at_level(logging.INFO, logger=LOGGER):
        report = Stage(options={"limits": {"a": {"concurrency": 2}}}).run(main)
    assert (report.samples, report.scored, report.failed, report.attempts) == (8, 8, 0, 8)
    assert report.makespan_s == 4.0
    assert sum(part.seconds for part in report.parts) == pytest.approx(4.0)
    assert sum(part.seconds for part in report.parts if part.kind == "queue") == pytest.approx(3.0)
    lines = [record for record in caplog.records if record.message == report.describe()]
    assert [(record.levelno, record.name) for record in lines] == [(logging.INFO, LOGGER)]
    assert report.describe().startswith("8 samples in 4.0 s; waited 4.0 s on a: 3.0 queue, 1.0 service")


@each_of(
    ("behaviour", "queued_s"),
    [
        (hangs, 0.0),
        # It hangs after the first answers, which come once a second.
        (lambda number, request, now: 1.0 if number < 4 else NEVER_S, 3.5),
        # It is slow, and answers.
        (lambda number, request, now: 10.0, 25.0),
    ],
)
@pytest.mark.parametrize("at_once", [True, False], ids=["at_once", "one_by_one"])
def test_time_in_which_a_source_answered_nobody_is_no_queue(behaviour, queued_s, at_once):
    """More concurrency would not help. The sample that ends last may have been sent, or not."""

    async def main(engine):
        if at_once:
            await engine.score_all(make_samples(10))
        else:
            await asyncio.gather(*(engine.score(sample) for sample in make_samples(10)))
        return engine.last_batch()

    options = {"limits": {"a": {"concurrency": 2}}, "total_s": 60.0, "engine": {"deadline_s": 25.0}}
    spent = Stage({"a": behaviour}, options=options).run(main).by_source()
    assert [*spent] == ["a"]
    assert sum(spent["a"].values()) == pytest.approx(25.0)
    assert spent["a"].get("queue", 0.0) == pytest.approx(queued_s, abs=0.1)


def test_samples_that_are_scored_one_by_one_are_one_batch_while_they_overlap():
    async def main(engine):
        scoring = []
        for response in ("a", "b", "c"):
            scoring.append(asyncio.ensure_future(engine.score(make_sample(response=response))))
            await asyncio.sleep(0.5)
        await asyncio.gather(*scoring)
        together = engine.last_batch()
        await asyncio.sleep(100)
        await engine.score(make_sample())
        return together, engine.last_batch()

    together, alone = Stage().run(main)
    assert (together.samples, together.makespan_s) == (3, pytest.approx(2.0))
    assert (alone.samples, alone.makespan_s) == (1, pytest.approx(1.0))


def ends(number, request, now):
    """A source whose answer depends on the response."""
    return {"hangs": NEVER_S, "refused": SampleRefused("too long")}.get(request.sample.response, 1.0)


def test_a_batch_is_cut_off_and_its_outcomes_keep_their_order():
    batch = [make_sample(response="good" if number % 3 else "hangs", group_id=f"g{number % 2}") for number in range(12)]
    options = {"total_s": 300, "engine": {"scheduling": {"hedge": False}}}
    played = Stage({"a": ends}, options=options).play(batch, cutoff=Cutoff(5.0, quorum=0.5))
    assert played.finished_s == 5.0
    for each, outcome in zip(batch, played.outcomes, strict=True):
        if each.response == "hangs":
            assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.INFRA, "cutoff", None)
        else:
            assert isinstance(outcome, Scored)
    assert (played.report.scored, played.report.failed, played.report.makespan_s) == (8, 4, 5.0)


@each_of(
    ("responses", "groups", "quorum", "reason", "finished_s"),
    [
        # A group that is not in is waited for.
        (["good"] * 9 + ["hangs"], "aaaaaaaaab", 0.5, "deadline", 20.0),
        # The quorum is of those that can still have a reward.
        (["good"] * 4 + ["refused"] * 5 + ["hangs"], "aaaaaaaaaa", 0.8, "cutoff", 5.0),
    ],
)
def test_what_a_cutoff_waits_for(responses, groups, quorum, reason, finished_s):
    batch = [make_sample(response=each, group_id=group) for each, group in zip(responses, groups, strict=True)]
    played = Stage({"a": ends}).play(batch, cutoff=Cutoff(5.0, quorum=quorum), deadline_s=20.0)
    assert (played.outcomes[-1].reason, played.finished_s) == (reason, finished_s)


def test_a_journal_that_does_not_answer_gets_half_of_the_time():
    played = Stage(journal=MemoryJournal(seconds=1e6)).play(make_samples(3), deadline_s=4.0)
    assert (played.all_scored, played.finished_s) == (True, 3.0)


def test_calls_go_elsewhere_or_wait_while_a_source_is_held_by_hand():
    seen, stage = Recorder(), Stage({"a": 1.0, "b": 1.0})

    async def main(engine):
        under_way = asyncio.ensure_future(engine.score_all(make_samples(8)))
        await asyncio.sleep(0.5)
        engine.hold("a")
        assert engine.statistics().sources["a"].state == "held"
        await engine.score_all(make_samples(4))
        engine.hold("b")
        later = asyncio.ensure_future(engine.score_all(make_samples(2)))
        await asyncio.sleep(10)
        assert not later.done()
        engine.release("a")
        with pytest.raises(EngineError, match="unknown source 'c'"):
            engine.release("c")
        return [*await under_way, *await later]

    assert all(outcome.reward is not None for outcome in stage.run(main, seen))
    after = [each for each in stage.sent if each.at >= 0.5]
    assert [each.source for each in after] == ["b"] * 4 + ["a"] * 2
    assert min(each.at for each in after if each.source == "a") > 10
    changes = [(each.source, each.state) for each in seen.of(SourceStateChanged)]
    assert changes == [("a", "held"), ("b", "held"), ("a", "up")]


def test_the_last_try_of_a_sample_does_not_wait_for_a_source_that_is_held():
    """It goes to another source, if one is up."""
    stage = Stage({"a": fails(TransientError("503", status=503), times=1), "b": 1.0})
    stage.options = {"engine": {"max_attempts": 2}}

    async def main(engine):
        engine.hold("b")
        return await engine.score(make_sample(), deadline_s=60.0)

    assert stage.run(main).reward is not None
    assert stage.sent_by_source == {"a": 2}


# Requests that carry several calls


A_S, B_S = 0.1, 0.01
GUILTY = "guilty"


def batching(*, max_size=8, max_wait_s=0.02, limits=None, guilty=None, results=lambda results: results, **engine):
    """A stage with one source that takes A_S + B_S for each call. `guilty`: the end of requests with such a sample."""

    def takes(number, requests, now):
        if guilty is not None and any(request.sample.response.startswith(GUILTY) for request in requests):
            return guilty
        return A_S + B_S * len(requests)

    batch = {"max_size": max_size, "max_wait_s": max_wait_s}
    tree = {
        "sources": {
            "rm": {"kind": "http", "url": "http://rm.invalid/", "version": "1", "batch": batch}
            | {"limits": limits or {}, "timeouts": {"total_s": 20}}
        },
        "judges": {"right": {"kind": "function"}},
        "engine": {"seed": 7, "deadline_s": 300.0, "scheduling": {"hedge": False}, **engine},
    }
    source = SimulatedSource(
        "rm",
        behaviour=lambda number, request, now: takes(number, [request], now),
        batch_behaviour=takes,
        answer=lambda request: Reply(value=0.5),
        batch=Batch(**batch),
        results=results,
    )
    return Stage({"rm": source}, tree=tree), source


def guilty_ones(count):
    return [make_sample(1000 + number, response=f"{GUILTY} {number}") for number in range(count)]


def test_calls_that_wait_go_in_full_requests_spread_over_the_declared_places():
    for max_size, limits, count, carried in (
        (8, {"concurrency": 1}, 20, [8, 8, 4]),
        (64, {"concurrency": 4}, 40, [10] * 4),
        (64, {"concurrency": 8, "requests_per_minute": 2}, 40, [20, 20]),
        (16, {}, 40, [16, 16, 8]),
    ):
        stage, source = batching(max_size=max_size, limits=limits)
        played = stage.play(make_samples(count))
        assert played.all_scored
        assert source.carried == carried
        counted = played.statistics.sources["rm"]
        assert (counted.batches, counted.batched, counted.requests) == (len(carried), count, count)


def test_single_samples_wait_for_each_other_only_while_the_source_is_busy():
    def trickle(times, **options):
        stage, source = batching(**options)

        async def main(engine):
            async def one(number, at):
                await asyncio.sleep(at)
                await engine.score(make_sample(number))
                return asyncio.get_running_loop().time() - at

            return await asyncio.gather(*(one(number, at) for number, at in enumerate(times)))

        return stage.run(main), source.carried

    latencies, carried = trickle([0.0, 0.001, 0.005, 0.01])
    assert carried == [1, 3]
    assert latencies[:2] == pytest.approx([A_S + B_S, 0.02 + A_S + 3 * B_S])
    assert trickle([0.0, 0.001, 0.005], max_wait_s=0.0)[1] == [1, 1, 1]
    latencies, carried = trickle([0.0, 0.05], max_wait_s=10.0)  # it is sent when the source becomes idle
    assert carried == [1, 1]
    assert latencies[1] == pytest.approx(2 * (A_S + B_S) - 0.05)


@pytest.mark.parametrize(
    ("end", "most"),
    [
        (PermanentError("answered 400", status=400), 1 + 2 * 4 + 4),
        (TransientError("answered 500", status=500), 40),
        (NEVER_S, 40),
    ],
    ids=["refused", "broken", "hangs"],
)
def test_the_one_that_fails_a_request_is_found_by_splitting_and_costs_no_neighbour(end, most):
    stage, source = batching(max_size=16, limits={"concurrency": 2}, guilty=end, max_attempts=2)
    played = stage.play(make_samples(31) + guilty_ones(1))
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [True] * 31 + [False]
    assert len(source.carried) <= most
    assert max(outcome.verdict.attempts for outcome in played.outcomes[:31]) <= 6
    assert played.statistics.sources["rm"].state == "up"


def test_an_outage_takes_the_source_out():
    stage, source = batching(max_size=8, limits={"concurrency": 2}, max_attempts=2)
    takes, down = source.batch_behaviour, TransientError("answered 503", status=503)
    source.batch_behaviour = lambda number, requests, now: down if now < 60.0 else takes(number, requests, now)
    source.behaviour = lambda number, request, now: source.batch_behaviour(number, [request], now)
    played = stage.play(make_samples(64))
    assert played.all_scored
    assert sum(at < 60.0 for at in source.arrivals) < 90
    assert played.finished_s < 70.0


def test_results_that_cannot_be_matched_are_asked_for_one_by_one_and_one_bad_result_is_its_own():
    for change in (lambda results: results[:-1], lambda results: [*results, results[0]], lambda results: "no list"):
        stage, source = batching(max_size=8, limits={"concurrency": 1}, results=change)
        assert stage.play(make_samples(8)).all_scored
        assert source.carried == [8] + [1] * 8
    bad = InvalidReply("no number")
    stage, source = batching(max_size=8, results=lambda results: [bad, *results[1:]] if len(results) > 1 else results)
    assert stage.play(make_samples(8)).all_scored
    assert source.carried == [8, 1]


def test_a_429_makes_all_calls_wait_and_counts_once_and_too_large_requests_become_smaller():
    stage, source = batching(limits={"concurrency": 1})
    takes = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: (
        Throttled("429", status=429, retry_after_s=3.0) if number == 0 else takes(number, requests, now)
    )
    played = stage.play(make_samples(8))
    assert played.all_scored
    assert source.carried == [8, 8]
    assert played.finished_s == pytest.approx(3.0 + A_S + 8 * B_S, abs=0.05)

    stage, source = batching(max_size=16, limits={"concurrency": 1})
    takes = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: (
        Throttled("429: too large", status=429) if len(requests) > 4 else takes(number, requests, now)
    )
    assert stage.play(make_samples(32)).all_scored


def test_a_refused_key_fails_everything_soon_and_a_blocked_response_takes_the_source_from_nobody():
    stage, source = batching(limits={"concurrency": 2}, guilty=SourceUnusable("answered 403", status=403))
    played = stage.play(make_samples(63) + guilty_ones(1))
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [True] * 63 + [False]
    stage, source = batching(limits={"concurrency": 2})
    source.behaviour = source.batch_behaviour = lambda *_: SourceUnusable("answered 401", status=401)
    played = stage.play(make_samples(64))
    assert {outcome.label for outcome in played.outcomes} == {"infra/no_source"}
    assert played.finished_s < 30.0


def test_cancelling_one_caller_leaves_the_rest_and_cancelling_all_ends_the_request():
    for doomed in (1, 4):
        stage, source = batching(max_size=4, limits={"concurrency": 1})
        source.batch_behaviour = lambda *_: 10.0

        async def main(engine, doomed=doomed):
            tasks = [asyncio.ensure_future(engine.score(sample)) for sample in make_samples(4)]
            await asyncio.sleep(1.0)
            for task in tasks[:doomed]:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        outcomes = stage.run(main)
        assert sum(isinstance(outcome, Scored) for outcome in outcomes) == 4 - doomed
        assert source.cancelled == (doomed == 4)


@pytest.mark.parametrize("steps", range(5))
def test_a_call_that_is_dropped_before_its_request_is_written_is_not_written(steps):
    """However many steps of the event loop pass between the two."""
    stage, source = batching(max_size=4, limits={"concurrency": 1})
    connected, written = asyncio.Event(), []

    async def send_batch(requests, *, on_sent):
        await connected.wait()
        on_sent()
        written.append([request.sample.response for request in requests])
        return [Reply(value=0.5) for _ in requests]

    async def main(engine):
        doomed, *others = (asyncio.ensure_future(engine.score(make_sample(response=each))) for each in "xabc")
        await asyncio.sleep(1.0)
        doomed.cancel()
        for _ in range(steps):
            await asyncio.sleep(0)
        connected.set()
        return await asyncio.gather(*others)

    source.send_batch = send_batch
    assert all(isinstance(outcome, Scored) for outcome in stage.run(main))
    assert written == [[*"abc"]]


def test_a_request_that_swallows_its_cancellation_is_abandoned_when_the_engine_is_closed(caplog):
    stage, source = batching(max_size=4, limits={"concurrency": 1})

    async def send_batch(requests, *, on_sent):
        on_sent()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(NEVER_S)

    async def main(engine):
        scoring = [asyncio.ensure_future(engine.score(sample)) for sample in make_samples(4)]
        await asyncio.sleep(1.0)
        await engine.aclose()
        assert now() < 20.0
        assert engine.upstreams["rm"].quota.in_flight == 0
        return await asyncio.gather(*scoring)

    source.send_batch = send_batch
    assert {outcome.label for outcome in stage.run(main)} == {"infra/closed"}
    assert [record.message for record in caplog.records if "abandoned" in record.message] == [
        "source rm: a request did not end within 5 s of being cancelled, and is abandoned"
    ]
