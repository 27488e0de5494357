"""The dispatcher in virtual time: what each kind of end means for a job, for its source and for everybody else."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins.errors import PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.samples import Cause, Failed, Scored
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply


def score(stage, sizes, *, deadline_s=300.0, **options):
    """Submit samples of these sizes at once; return (outcomes, seconds until the last)."""

    async def main():
        dispatcher = stage.dispatcher(**options)
        futures = [dispatcher.score(stage.sample(size), stage.judge, deadline_s=deadline_s) for size in sizes]
        outcomes = await asyncio.gather(*futures)
        finished = dispatcher.now()
        await dispatcher.aclose()
        assert stage.idle()
        assert dispatcher.waiting == 0
        return outcomes, finished

    return run(main())


def always(error):
    return lambda number, request, now: error


def test_a_verdict_carries_where_it_came_from(stage):
    stage.add("a", behaviour=lambda *_: 2.5, answer=lambda request: Reply(text="0.75", model="m-7"))
    outcomes, finished = score(stage, [10])
    (outcome,) = outcomes
    assert isinstance(outcome, Scored)
    verdict = outcome.verdict
    assert (verdict.score, verdict.source, verdict.model, verdict.attempts, verdict.judge) == (
        0.75,
        "a",
        "m-7",
        1,
        "plain",
    )
    assert verdict.latency_s == finished == 2.5


def test_a_batch_goes_longest_first(stage):
    stage.add("a", limits={"concurrency": 1}, behaviour=lambda number, request, now: len(request.sample.response))
    sent = []
    stage.sources["a"].answer = lambda request: sent.append(len(request.sample.response)) or Reply(text="1")
    stage.play([1, 5, 3, 4, 2])
    assert sorted(set(sent), key=sent.index) == [5, 4, 3, 2, 1]


def test_limits_are_spent_at_once_and_kept(stage):
    source = stage.add("a", limits={"requests_per_minute": 10, "concurrency": 100}, requests_per_window=10)
    outcomes, finished = score(stage, [10] * 25)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.violations == []
    assert finished == pytest.approx(2 * (60 + MARGIN_S) + 1, abs=0.01)


def test_token_limits_are_kept_by_reserving_the_most_a_reply_may_take(stage):
    from qreward_plugins.samples.spent import Usage

    source = stage.add(
        "a",
        limits={"tokens_per_minute": 1000},
        tokens_per_window=1000,
        answer=lambda request: Reply(text="1", usage=Usage(len(request.sample.response) // 3, 50)),
    )
    stage.judge.completion_tokens = 100
    outcomes, _ = score(stage, [300] * 20)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.violations == []


def test_a_request_that_is_certainly_larger_than_its_token_limit_fails_instead_of_waiting(stage):
    stage.add("a", limits={"tokens_per_minute": 100})
    stage.judge.completion_tokens = 90
    (outcome,), finished = score(stage, [3000])
    assert (outcome.cause, outcome.reason) == (Cause.INFRA, "no_source")
    assert "tokens_per_minute: it takes 113 tokens at least" in outcome.detail
    assert "allows 100" in outcome.detail
    assert finished == 0


def test_a_throttled_source_pauses_and_its_sample_moves_on_at_once(stage):
    throttling = stage.add("a", behaviour=always(Throttled("429", status=429, retry_after_s=30)))
    stage.add("b", behaviour=lambda *_: 2.0)
    stage.judge.sources = ("a", "b")
    outcomes, finished = score(stage, [10, 9, 8, 7])
    assert {outcome.verdict.source for outcome in outcomes} == {"b"}
    assert finished == pytest.approx(2.0)
    assert len(throttling.arrivals) == 2  # b took the other two


def test_being_throttled_is_not_a_failure_and_retry_after_is_kept(stage):
    source = stage.add(
        "a", behaviour=lambda number, request, now: Throttled("429", retry_after_s=7) if number < 10 else 1.0
    )
    (outcome,), finished = score(stage, [10], max_attempts=2)
    assert isinstance(outcome, Scored)
    assert finished == pytest.approx(71, abs=0.01)
    gaps = [after - before for before, after in zip(source.arrivals, source.arrivals[1:], strict=False)]
    assert gaps == pytest.approx([7.0] * 10, abs=0.01)


def test_throttles_of_requests_in_flight_add_no_growth_and_the_latest_word_of_the_server_holds(stage):
    answers = iter([1.0, 2.0, 3.0])

    def behaviour(number, request, now):
        return next(answers, 0.5)

    source = stage.add("a", behaviour=behaviour)

    async def late_throttle(request, *, on_sent):
        on_sent()
        now = asyncio.get_running_loop().time()
        number = len(source.arrivals)
        source.arrivals.append(now)
        if number < 3:
            await asyncio.sleep(number + 1)
            raise Throttled("429", retry_after_s=5)
        return Reply(text="1")

    source.send = late_throttle
    _, finished = score(stage, [10, 10, 10])
    assert finished == pytest.approx(8.0, abs=0.01)  # the last 429 came at 3 s and asked for 5


def test_a_transient_failure_goes_elsewhere_at_once(stage):
    stage.add("a", behaviour=always(TransientError("reset")))
    stage.add("b", behaviour=lambda *_: 3.0)
    (outcome,), finished = score(stage, [10])
    assert (outcome.verdict.source, outcome.verdict.attempts) == ("b", 2)
    assert finished == pytest.approx(3.0)


def test_the_only_source_is_asked_again_after_jitter(stage):
    source = stage.add("a", behaviour=lambda number, *_: TransientError("reset") if number < 3 else 1.0)
    (outcome,), _ = score(stage, [10])
    assert outcome.verdict.attempts == 4
    gaps = [after - before for before, after in zip(source.arrivals, source.arrivals[1:], strict=False)]
    assert all(0 < gap <= longest for gap, longest in zip(gaps, [0.5, 1.0, 2.0], strict=True))


def test_two_dead_sources_end_in_failure_and_not_in_a_hang(stage):
    for name in "ab":
        stage.add(name, behaviour=always(TransientError("connection refused")))
    outcomes, finished = score(stage, [10] * 50, deadline_s=300)
    assert {(outcome.cause, outcome.reason) for outcome in outcomes} <= {
        (Cause.INFRA, "exhausted"),
        (Cause.INFRA, "deadline"),
    }
    assert all(outcome.reward is None for outcome in outcomes)
    assert finished <= 300


def test_a_dead_source_does_not_burn_the_attempts_of_samples_that_a_slow_one_can_serve(stage):
    dead = stage.add("dead", behaviour=always(TransientError("connection refused")))
    stage.add("slow", behaviour=lambda *_: 10.0, limits={"concurrency": 2})
    outcomes, _ = score(stage, [10] * 40, deadline_s=900)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert len(dead.arrivals) < 40 + 1.1 * 200  # first all of them, and then a probe a second


def test_a_source_that_came_back_is_used_again(stage):
    source = stage.add("a", behaviour=lambda number, request, now: TransientError("down") if now < 30 else 1.0)
    outcomes, finished = score(stage, [10] * 8)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert 30 < finished < 80
    assert stage.upstreams["a"].breaker.closed
    assert len(source.arrivals) < 50, "a probe a second"


def test_a_hang_ends_at_the_time_limit_and_the_sample_moves_on(stage):
    hanging = stage.add("a", behaviour=lambda *_: 1e9, timeout_s=20)
    stage.add("b", behaviour=lambda *_: 3.0)
    (outcome,), finished = score(stage, [10])
    assert outcome.verdict.source == "b"
    assert finished == pytest.approx(23.0)
    assert hanging.cancelled == 1


def test_the_deadline_is_kept_whatever_a_source_does(stage):
    stage.add("a", behaviour=lambda *_: 1e9, timeout_s=1e6)
    (outcome,), finished = score(stage, [10], deadline_s=42)
    assert (outcome.cause, outcome.reason, finished) == (Cause.INFRA, "deadline", 42)
    assert outcome.reward is None


def test_a_source_that_ignores_cancellation_cannot_hold_the_outcome(stage):
    source = stage.add("a")

    async def stubborn(request, *, on_sent):
        on_sent()
        try:
            await asyncio.sleep(1e6)
        except asyncio.CancelledError:
            await asyncio.sleep(100)
        return Reply(text="1")

    source.send = stubborn

    async def main():
        dispatcher = stage.dispatcher()
        outcome = await dispatcher.score(stage.sample(), stage.judge, deadline_s=5)
        at = dispatcher.now()
        await dispatcher.aclose()
        return outcome, at

    outcome, at = run(main())
    assert isinstance(outcome, Failed)  # the late answer did not overwrite it
    assert at == 5


def test_a_rejected_request_is_not_repeated_there(stage):
    rejecting = stage.add("a", behaviour=always(PermanentError("422", status=422)))
    stage.add("b", behaviour=lambda *_: 2.0)
    (outcome,), _ = score(stage, [10])
    assert outcome.verdict.source == "b"
    assert len(rejecting.arrivals) == 1
    assert stage.upstreams["a"].health.unusable == ""


def test_an_unusable_source_is_taken_out_for_everybody(stage, caplog):
    unusable = stage.add("a", behaviour=always(SourceUnusable("401 at a: the key was refused", status=401)))
    stage.add("b", behaviour=lambda *_: 1.0, limits={"concurrency": 1})
    outcomes, _ = score(stage, [10] * 10)
    assert all(outcome.verdict.source == "b" for outcome in outcomes)
    assert len(unusable.arrivals) <= 9
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == [
        "source a refuses its requests, circuit open until it answers a probe: 401 at a: the key was refused"
    ]


def test_no_usable_source_left_fails_everything_at_once(stage):
    stage.add("a", behaviour=always(SourceUnusable("401 at a", status=401)), limits={"concurrency": 1})
    outcomes, finished = score(stage, [10] * 100)
    assert {(outcome.cause, outcome.reason) for outcome in outcomes} == {(Cause.INFRA, "no_source")}
    assert all("401" in outcome.detail for outcome in outcomes)
    assert finished == 0


def test_an_invalid_verdict_is_retried_once_elsewhere(stage):
    stage.add("a", answer=lambda request: Reply(text="bad"))
    stage.add("b", answer=lambda request: Reply(text="0.5"))
    (outcome,), _ = score(stage, [10])
    assert (outcome.verdict.source, outcome.verdict.attempts) == ("b", 2)


@pytest.mark.parametrize(("floors", "reward"), [({}, None), ({Cause.VERDICT: -1.0}, -1.0)])
def test_invalid_twice_is_a_failure_of_the_verdict_with_the_floor_that_is_configured(stage, floors, reward):
    for name in "ab":
        stage.add(name, answer=lambda request: Reply(text="bad" if len(request.sample.response) == 13 else "1"))
    stage.judge.floors = floors
    outcomes, _ = score(stage, [10] * 20 + [13])
    assert all(isinstance(outcome, Scored) for outcome in outcomes[:-1])
    assert (outcomes[-1].failure.cause, outcomes[-1].failure.attempts, outcomes[-1].reward) == (
        Cause.VERDICT,
        2,
        reward,
    )


def test_sources_that_answer_everybody_with_garbage_are_an_infra_failure(stage):
    for name in "ab":
        stage.add(name, answer=lambda request: Reply(text="bad"))
    stage.judge.floors = {Cause.VERDICT: 0.0}
    outcomes, _ = score(stage, [10] * 60)
    assert outcomes[-1].cause is Cause.INFRA
    assert outcomes[-1].reward is None
    assert sum(outcome.cause is Cause.INFRA for outcome in outcomes) > 40


def test_cancelling_the_future_cancels_the_attempt(stage):
    source = stage.add("a", behaviour=lambda *_: 100.0, limits={"concurrency": 1}, timeout_s=200)

    async def main():
        dispatcher = stage.dispatcher()
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=300) for _ in range(3)]
        await asyncio.sleep(1)
        futures[0].cancel()
        futures[1].cancel()
        outcome = await futures[2]
        return outcome, dispatcher.now()

    outcome, at = run(main())
    assert isinstance(outcome, Scored)
    assert at == pytest.approx(101)
    assert (source.cancelled, len(source.arrivals)) == (1, 2)
    assert stage.idle()


def test_closing_gives_every_sample_an_outcome_and_leaves_nothing(stage):
    stage.add("a", behaviour=lambda *_: 100.0, limits={"concurrency": 2})

    async def main():
        dispatcher = stage.dispatcher()
        futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=300) for _ in range(5)]
        await asyncio.sleep(1)
        await dispatcher.aclose()
        assert all(future.done() for future in futures)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return [future.result().reason for future in futures]

    assert run(main()) == ["closed"] * 5
    assert stage.idle()


def test_a_bug_in_a_judge_costs_one_sample(stage, caplog):
    stage.add("a")
    plain = stage.judge.verdict

    def verdict(request, reply):
        if len(request.sample.response) == 13:
            raise ZeroDivisionError("oops")
        return plain(request, reply)

    stage.judge.verdict = verdict
    outcomes, _ = score(stage, [10, 13, 11])
    assert [type(outcome) for outcome in outcomes] == [Scored, Failed, Scored]
    assert "ZeroDivisionError" in outcomes[1].detail
    assert "unexpected ZeroDivisionError" in caplog.text


def test_a_large_job_is_not_starved_by_small_ones(stage):
    stage.add("a", limits={"tokens_per_minute": 1200})
    order = []
    stage.sources["a"].answer = lambda request: order.append(len(request.sample.response)) or Reply(text="1")
    score(stage, [900] + [90] * 30, deadline_s=3000)
    assert order.index(900) == 0


def test_two_judges_over_different_sources_do_not_block_each_other(stage, new_stage):
    from dataclasses import replace

    stage.add("a", limits={"requests_per_minute": 1})
    stage.add("b", behaviour=lambda *_: 1.0)
    slow, quick = replace(stage.judge, sources=("a",)), replace(stage.judge, sources=("b",))

    async def main():
        dispatcher = stage.dispatcher()
        waiting = [dispatcher.score(stage.sample(99), slow, deadline_s=3000) for _ in range(5)]
        await asyncio.gather(*[dispatcher.score(stage.sample(1), quick, deadline_s=300) for _ in range(5)])
        at = dispatcher.now()
        await asyncio.gather(*waiting)
        return at

    assert run(main()) == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_schedule(new_stage):
    def trace(seed):
        stage = new_stage()
        source = stage.add(
            "a",
            behaviour=lambda number, *_: TransientError("x") if number % 2 == 0 else 1.0 + number % 3,
            limits={"requests_per_minute": 30, "concurrency": 4},
        )
        outcomes, _ = score(stage, list(range(1, 40)), seed=seed)
        return source.arrivals, outcomes

    assert trace(1) == trace(1)
    assert trace(1)[0] != trace(2)[0]


def test_a_request_that_is_sent_late_has_its_time_limit_from_then_on(stage):
    source = stage.add("a", timeout_s=10.0)
    ended = []

    async def connects_slowly(request, *, on_sent):
        await asyncio.sleep(11.0)
        on_sent()
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(asyncio.get_running_loop().time())

    source.send = connects_slowly
    stage.play([10], deadline_s=1000, max_attempts=1)
    assert ended == [21.0]


def test_a_call_started_while_its_deadline_expires_others_ends_by_it(stage):
    """Event loops run a timer up to a nanosecond early, when the deadline has not come yet."""
    stage.add("a", behaviour=lambda number, request, now: 1e6, timeout_s=1e7)
    deadline_at, ended = 10.0, []

    async def main():
        loop = asyncio.get_running_loop()
        dispatcher = stage.dispatcher()

        def start(again):
            caller = Asker(again)
            member = dispatcher.batches.join(dispatcher.batches.of_singles(), None)
            dispatcher.submit(stage.judge.call(stage.sample()), caller, member=member, deadline_at=deadline_at)

        class Asker:
            def __init__(self, again):
                self.again = again

            def ended(self, result):
                ended.append(loop.time())
                if self.again:
                    start(False)

        start(True)
        start(False)
        loop.call_at(deadline_at - 5e-10, lambda: None)
        await asyncio.sleep(100)
        await dispatcher.aclose()

    run(main())
    assert ended == pytest.approx([deadline_at] * 3, abs=1e-6)
