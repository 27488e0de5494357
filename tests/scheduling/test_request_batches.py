"""Requests that carry several calls: when they are sent, what they count, and what their failure means."""

from __future__ import annotations

import asyncio
import gc
import math
import weakref

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.config import Batch
from qreward_plugins.errors import InvalidReply, PermanentError, SampleFault, SourceUnusable, Throttled, TransientError
from qreward_plugins.quotas.ledger import MARGIN_S
from qreward_plugins.samples import Cause, Failed, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.scheduling.request_batches import RequestBatches
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

A_S, B_S = 0.1, 0.01


def batching(stage, name="a", *, max_size=8, max_wait_s=0.02, max_tokens=None, limits=None, guilty=None, **options):
    """A source that takes A_S + B_S for each call. `guilty`: a size, and the end of requests that carry such a call."""

    def takes(number, requests, now):
        if guilty is not None and any(len(request.sample.response) == guilty[0] for request in requests):
            return guilty[1]
        return A_S + B_S * len(requests)

    options = {
        "batch_behaviour": takes,
        "behaviour": lambda number, request, now: takes(number, [request], now),
    } | options
    return stage.add(
        name,
        batch=Batch(max_size=max_size, max_wait_s=max_wait_s, max_tokens=max_tokens),
        limits=limits or {},
        **options,
    )


def scored(played):
    return all(isinstance(outcome, Scored) for outcome in played.outcomes)


# When a request is sent


def test_calls_that_wait_together_go_in_full_requests(stage):
    source = batching(stage, max_size=8, limits={"concurrency": 1})
    played = stage.play([10] * 20)
    assert scored(played)
    assert source.carried == [8, 8, 4]
    assert played.finished_at == pytest.approx(3 * A_S + 20 * B_S)


def test_a_single_call_does_not_wait_for_others(stage):
    source = batching(stage, max_wait_s=5.0)
    played = stage.play([10])
    assert source.carried == [1]
    assert played.finished_at == pytest.approx(A_S + B_S)


def test_calls_are_spread_over_the_places_that_a_source_declares(stage):
    source = batching(stage, max_size=64, limits={"concurrency": 4})
    played = stage.play([10] * 40)
    assert source.carried == [10, 10, 10, 10]
    assert played.finished_at == pytest.approx(A_S + 10 * B_S)


def test_calls_are_not_spread_over_more_requests_than_the_window_has_left(stage):
    source = batching(stage, max_size=64, limits={"concurrency": 8, "requests_per_minute": 2}, requests_per_window=2)
    played = stage.play([10] * 40)
    assert source.carried == [20, 20]
    assert played.finished_at < 1


def test_a_source_that_does_not_declare_its_concurrency_gets_full_requests(stage):
    source = batching(stage, max_size=16)
    stage.play([10] * 40)
    assert source.carried == [16, 16, 8]


def test_like_sizes_go_together(stage):
    sizes = []
    source = batching(stage, max_size=4, limits={"concurrency": 1})
    source.batch_behaviour = lambda number, requests, now: sizes.append([r.size for r in requests]) or 0.1
    stage.play([1, 400, 2, 300, 3, 200, 4, 100])
    assert sizes == [[400, 300, 200, 100], [4, 3, 2, 1]]


def trickle(stage, times, **options):
    """Submit a sample at each of these times; return the latency of each."""

    async def main():
        dispatcher = stage.dispatcher(**options)
        loop = asyncio.get_running_loop()

        async def one(at):
            await asyncio.sleep(at)
            outcome = await dispatcher.score(stage.sample(), stage.judge, deadline_s=60)
            assert isinstance(outcome, Scored)
            return loop.time() - at

        latencies = await asyncio.gather(*map(one, times))
        await dispatcher.aclose()
        assert stage.idle()
        return latencies

    return run(main())


def test_single_samples_wait_for_each_other_only_while_the_source_is_busy(stage):
    source = batching(stage, max_wait_s=0.02)
    latencies = trickle(stage, [0.0, 0.001, 0.005, 0.01])
    assert source.carried == [1, 3]
    assert latencies[0] == pytest.approx(A_S + B_S)
    assert latencies[1] == pytest.approx(0.02 + A_S + 3 * B_S)  # opened at 0.001, sent 0.02 later


def test_with_max_wait_s_0_nothing_waits(stage):
    source = batching(stage, max_wait_s=0.0)
    latencies = trickle(stage, [0.0, 0.001, 0.005])
    assert source.carried == [1, 1, 1]
    assert latencies == pytest.approx([A_S + B_S] * 3)


def test_a_request_that_waits_is_sent_when_the_source_becomes_idle(stage):
    source = batching(stage, max_wait_s=10.0)
    latencies = trickle(stage, [0.0, 0.05])
    assert source.carried == [1, 1]
    assert latencies[1] == pytest.approx(A_S + B_S - 0.05 + A_S + B_S)


def test_at_concurrency_1_it_is_never_slower_than_one_by_one(new_stage):
    times = [0.013 * n for n in range(40)]
    together, alone = new_stage(), new_stage()
    batching(together, limits={"concurrency": 1})
    alone.add("a", limits={"concurrency": 1}, behaviour=lambda *_: A_S + B_S)
    batched, single = trickle(together, times), trickle(alone, times)
    assert max(b - s for b, s in zip(batched, single, strict=True)) <= B_S * 8
    assert sum(batched) < 0.3 * sum(single)


def test_more_tokens_than_max_tokens_never_go_in_one_request(stage):
    carried = []
    source = batching(stage, max_size=8, max_tokens=400, limits={"concurrency": 1})
    source.batch_behaviour = lambda number, requests, now: carried.append([r.size for r in requests]) or 0.1
    stage.play([240, 80, 80, 80, 80, 600])
    assert sum(source.carried) == 6
    assert all(sum(sizes) <= 400 for sizes in carried)
    assert len(source.carried) < 6


@pytest.mark.parametrize(("deadline_s", "at_least"), [(1.0, 6), (2.0, 20), (5.0, 75)])
def test_a_request_is_not_so_large_that_its_deadline_is_missed(stage, deadline_s, at_least):
    batching(
        stage, max_size=32, limits={"concurrency": 2}, batch_behaviour=lambda n, requests, _: 0.2 + 0.1 * len(requests)
    )
    stage.knows("a", 0.3)
    played = stage.play([10] * 100, deadline_s=deadline_s)
    assert sum(isinstance(outcome, Scored) for outcome in played.outcomes) >= at_least


def test_requests_stay_large_where_their_size_decides_no_deadline(stage):
    source = batching(stage, max_size=8, limits={"concurrency": 1}, batch_behaviour=lambda *_: 1.0)
    for size in (10, 80, 20, 40) * 20:
        stage.upstreams["a"].speed.learn(size, 1.0)
    played = stage.play([10] * 8, deadline_s=1.2)
    assert scored(played)
    assert source.carried == [8]


def test_a_source_with_a_batch_needs_send_batch():
    class Plain:
        name, model, slots, batch = "a", "m", None, Batch()

        async def send(self, request, *, on_sent): ...

        async def aclose(self): ...

    config = {
        "sources": {"a": {"kind": "openai", "base_url": "http://a/v1", "model": "m"}},
        "judges": {"j": {"kind": "llm", "instructions": "?"}},
    }
    with pytest.raises(ConfigurationError, match=r"sources\.a\.batch: Plain has no `send_batch`"):
        RewardEngine(config, sources={"a": Plain()})


# What it counts


def test_one_request_counts_once_against_the_limits(stage):
    source = batching(
        stage, max_size=10, limits={"requests_per_minute": 3, "concurrency": 2}, requests_per_window=3, concurrency=2
    )
    played = stage.play([10] * 60)
    assert scored(played)
    assert source.violations == []
    assert len(source.arrivals) == 6
    assert played.finished_at == pytest.approx(60 + MARGIN_S + 0.2 + 0.2, abs=0.3)


def test_the_tokens_of_all_calls_count(stage):
    usage = Usage(300, 0)
    source = batching(
        stage,
        max_size=16,
        limits={"tokens_per_minute": 3000},
        tokens_per_window=3000,
        answer=lambda request: Reply(text="1", usage=usage),
    )
    played = stage.play([300] * 20)
    assert scored(played)
    assert source.violations == []
    assert played.finished_at > 60


def test_a_learned_concurrency_counts_requests(stage):
    batching(stage, max_size=4)
    stage.play([10] * 64)
    before = stage.upstreams["a"].quota.concurrency
    assert before == 32  # sixteen requests never filled the window of 32
    assert stage.counted("a").peak_in_flight == 16


def test_a_429_makes_all_calls_wait_and_counts_once(stage):
    source = batching(stage, max_size=8, limits={"concurrency": 1})
    good = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: (
        Throttled("429", status=429, retry_after_s=3.0) if number == 0 else good(number, requests, now)
    )
    played = stage.play([10] * 8)
    assert scored(played)
    assert source.carried == [8, 8]
    assert played.finished_at == pytest.approx(3.0 + A_S + 8 * B_S, abs=0.01)
    assert stage.upstreams["a"].quota.use(played.finished_at).throttled == 1


def test_a_probe_never_takes_a_place_beyond_the_limit_although_others_may_join_an_open_request(stage):
    batching(stage, max_wait_s=20, limits={"concurrency": 2}, batch_behaviour=lambda *_: 30.0)
    upstream = stage.upstreams["a"]
    peak = []
    reserve = upstream.quota.reserve

    def noted(*args, **options):
        reservation = reserve(*args, **options)
        peak.append(upstream.quota.in_flight)
        return reservation

    upstream.quota.reserve = noted

    async def main():
        dispatcher = stage.dispatcher()

        async def one(at):
            await asyncio.sleep(at)
            return await dispatcher.score(stage.sample(), stage.judge, deadline_s=200)

        async def trip():
            await asyncio.sleep(1)
            assert len(upstream.request_batches.open) == 1
            upstream.breaker.trip(dispatcher.now())

        stage.sources["a"].behaviour = lambda number, request, now: 30.0 if number < 2 else 0.1
        outcomes = await asyncio.gather(one(0), one(0.5), one(1.5), trip())
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main())[:3])
    assert max(peak) == 2


def test_statistics_count_requests_and_their_calls(stage):
    batching(stage, max_size=8, limits={"concurrency": 1})
    stage.play([10] * 12)
    counted = stage.counted("a")
    assert (counted.requests, counted.batches, counted.batched, counted.mean_batch_size) == (12, 2, 12, 6.0)
    assert counted.latency_p50_s == pytest.approx(A_S + 8 * B_S)


# Failures


@pytest.mark.parametrize("retry_after_s", [None, 1.0])
def test_a_call_that_is_always_throttled_keeps_no_answer_from_its_neighbours(stage, retry_after_s):
    batching(stage, max_size=16, guilty=(77, Throttled("too large", status=429, retry_after_s=retry_after_s)))
    played = stage.play([10] * 63 + [77])
    assert [isinstance(outcome, Scored) for outcome in played.outcomes] == [True] * 63 + [False]


def test_a_server_that_throttles_large_requests_gets_smaller_ones(stage):
    source = batching(stage, max_size=16)
    source.batch_behaviour = lambda number, requests, now: (
        Throttled("too large", status=429) if len(requests) > 4 else A_S + B_S * len(requests)
    )
    assert scored(stage.play([10] * 64))


def test_requests_stay_large_after_some_throttling(stage):
    source = batching(stage, max_size=8, limits={"concurrency": 1})
    good = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: (
        Throttled("429", status=429, retry_after_s=1.0) if number in (1, 2) else good(number, requests, now)
    )
    assert scored(stage.play([10] * 40))
    assert set(source.carried) == {8}


def refusal():
    return PermanentError("400: too long", status=400)


def test_one_bad_item_is_found_by_halving_and_its_neighbours_are_scored(stage):
    source = batching(stage, max_size=16, limits={"concurrency": 1}, guilty=(77, refusal()))
    played = stage.play([10] * 15 + [77])
    bad = [outcome for outcome in played.outcomes if isinstance(outcome, Failed)]
    assert bad == [played.outcomes[15]]
    assert bad[0].reason == "no_source"
    assert "too long" in bad[0].detail
    assert source.carried[0] == 16
    assert sorted(source.carried, reverse=True)[:3] == [16, 8, 8]
    assert len(source.carried) <= 10
    assert stage.upstreams["a"].breaker.failures_in_row == 0


def test_a_refusal_by_splitting_costs_no_try_and_is_a_floor_where_one_is_wanted(stage):
    batching(stage, max_size=16, limits={"concurrency": 1}, guilty=(77, refusal()))
    stage.judge.floors = {Cause.VERDICT: 0.0}
    played = stage.play([10] * 15 + [77], max_attempts=1)
    assert scored(played)
    assert played.outcomes[15].verdict.failure.reason == "refused"


@pytest.mark.parametrize("count", [2, 3, 7, 33])
def test_every_number_of_calls_can_be_split(new_stage, count):
    stage = new_stage()
    batching(stage, max_size=64, limits={"concurrency": 1}, guilty=(77, refusal()))
    played = stage.play([10] * (count - 1) + [77])
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * (count - 1) + [True]


def test_fresh_calls_do_not_join_those_of_a_request_that_failed(stage):
    seen = []
    source = batching(stage, max_size=4, limits={"concurrency": 1})

    def takes(number, requests, now):
        seen.append(sorted(request.size for request in requests))
        return refusal() if 77 in seen[-1] else 0.1

    source.batch_behaviour = takes
    source.behaviour = lambda number, request, now: takes(number, [request], now)
    stage.play([77, 70, 70, 70, *[10] * 8])
    assert seen[0] == [70, 70, 70, 77]
    assert all(10 not in sizes or set(sizes) == {10} for sizes in seen)


@pytest.mark.parametrize("change", [lambda results: results[1:], lambda results: [*results, results[0]], lambda _: []])
def test_results_that_cannot_be_matched_are_asked_for_one_by_one(stage, change):
    source = batching(stage, max_size=8, limits={"concurrency": 1}, results=change)
    played = stage.play([10] * 8, max_attempts=1)
    assert scored(played)
    assert source.carried == [8, *[1] * 8]
    assert all(outcome.verdict.attempts == 2 for outcome in played.outcomes)


def test_a_result_of_its_own_ends_one_call_only(stage):
    source = batching(stage, max_size=8, limits={"concurrency": 1})
    source.results = lambda results: [InvalidReply("NaN"), *results[1:]]
    stage.judge.invalid_retries = 0
    played = stage.play([10] * 8)
    failed = [outcome for outcome in played.outcomes if isinstance(outcome, Failed)]
    assert [outcome.reason for outcome in failed] == ["invalid"]
    assert source.carried == [8]


def test_a_poisonous_sample_that_breaks_requests_leaves_its_neighbours_their_tries(stage):
    source = batching(stage, max_size=16, limits={"concurrency": 1}, guilty=(77, TransientError("500", status=500)))
    played = stage.play([10] * 15 + [77], max_attempts=2)
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * 15 + [True]
    assert source.carried[0] == 16
    assert all(outcome.verdict.attempts <= 4 for outcome in played.outcomes[:15])


def test_after_a_time_out_every_call_goes_alone(stage):
    batching(stage, max_size=8, limits={"concurrency": 2}, guilty=(77, 1e6), timeout_s=10)
    source = stage.sources["a"]
    played = stage.play([10] * 7 + [77], max_attempts=1, deadline_s=100)
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * 7 + [True]
    assert max(source.carried[2:]) == 1
    assert played.finished_at < 25


def test_a_failed_request_is_one_failure_of_its_source(stage):
    source = batching(stage, max_size=16, limits={"concurrency": 1})
    good = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: (
        TransientError("500", status=500) if number == 0 else good(number, requests, now)
    )
    failures = []
    breaker = stage.upstreams["a"].breaker
    noted, breaker.failed = breaker.failed, lambda *args, **kw: failures.append(kw["samples"]) or noted(*args, **kw)
    played = stage.play([10] * 16)
    assert scored(played)
    assert len(failures) == 1
    assert source.carried == [16, 8, 8]  # its calls back off together, so that they can go together again
    assert stage.counted("a").retries == 1


@pytest.mark.parametrize("guilty", [[8, 9], [9]])
def test_two_samples_that_a_firewall_blocks_open_no_circuit(stage, caplog, guilty):
    """Each failed request has one of them. The others in these requests are no further samples that were refused."""

    def takes(number, requests, now):
        if any(len(request.sample.response) in guilty for request in requests):
            return SourceUnusable("404", status=404)
        return 50.0  # so that no answer comes before the last refusal

    source = batching(
        stage,
        batch_behaviour=takes,
        behaviour=lambda number, request, now: takes(number, [request], now),
    )
    played = stage.play([30, 31, 32, *guilty])
    assert sum(isinstance(outcome, Failed) for outcome in played.outcomes) == len(guilty)
    assert source.carried[0] == 3 + len(guilty)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    assert stage.upstreams["a"].breaker.closed


def test_a_wrong_url_opens_the_circuit_also_where_calls_share_requests(stage, caplog):
    batching(
        stage,
        batch_behaviour=lambda number, requests, now: SourceUnusable("404", status=404),
        behaviour=lambda number, request, now: SourceUnusable("404", status=404),
    )
    played = stage.play([10] * 40)
    assert all(isinstance(outcome, Failed) for outcome in played.outcomes)
    assert "refuses its requests" in caplog.text


def test_a_call_whose_answer_is_here_is_not_given_up(stage, monkeypatch):
    """The end of a request frees a place, so the planner looks at the ages of calls, also of its own."""
    source = batching(stage, max_size=4)
    ended = RequestBatches._ended

    def look_at_ages(batches, batch):
        for attempt in batch.members:
            assert batch.has_answered(attempt)
            dispatchers[0]._retry_policy.giving_up._give_up(attempt, dispatchers[0].now(), "it took long")
        ended(batches, batch)

    monkeypatch.setattr(RequestBatches, "_ended", look_at_ages)
    dispatchers = []
    make = stage.dispatcher
    monkeypatch.setattr(stage, "dispatcher", lambda **options: dispatchers.append(make(**options)) or dispatchers[0])
    assert scored(stage.play([10] * 4))
    assert source.carried == [4]


def test_an_outage_does_not_make_requests_smaller_for_ever(stage):
    source = batching(stage, max_size=16, limits={"concurrency": 2})
    good = source.batch_behaviour
    down = lambda now: now < 20  # noqa: E731
    source.batch_behaviour = lambda number, requests, now: (
        TransientError("refused") if down(now) else good(number, requests, now)
    )
    source.behaviour = lambda number, request, now: TransientError("refused") if down(now) else A_S
    played = stage.play([10] * 320)
    assert scored(played)
    after = source.carried[[at < 20 for at in source.arrivals].index(False) :]
    assert sum(after) / len(after) > 4


def test_a_wrong_key_takes_the_source_out_and_fails_everything_soon(stage):
    error = SourceUnusable("401: wrong key", status=401)
    source = batching(stage, max_size=16, limits={"concurrency": 2}, guilty=(10, error))
    played = stage.play([10] * 200)
    assert all(outcome.reason == "no_source" for outcome in played.outcomes)
    assert len(source.arrivals) < 40


def test_a_response_that_a_firewall_blocks_takes_the_source_from_nobody(stage):
    error = SourceUnusable("403", status=403)
    batching(stage, max_size=16, limits={"concurrency": 2}, guilty=(77, error))
    played = stage.play([*[10] * 200, 77])
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * 200 + [True]


def test_a_hang_or_crash_of_a_local_function_is_blamed_on_its_sample_only(stage):
    error = SampleFault("its worker process died", reason="crashed")
    source = batching(stage, max_size=8, local=True, slots=2, guilty=(77, error))
    played = stage.play([10] * 15 + [77])
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * 15 + [True]
    assert played.outcomes[15].reason == "crashed"
    assert played.outcomes[15].attempts == 3  # once with others, and twice alone
    assert source.carried[:2] == [8, 8]


def test_a_call_in_company_that_hangs_locally_makes_room_for_others(stage):
    batching(stage, max_size=8, local=True, slots=1, guilty=(77, 1e6), timeout_s=60)
    stage.knows("a", 0.2, size=80)
    played = stage.play([10] * 40 + [77], deadline_s=300)
    assert [isinstance(outcome, Failed) for outcome in played.outcomes] == [False] * 40 + [True]
    assert played.outcomes[40].reason == "hung"


def test_a_bug_of_the_source_costs_no_neighbour(stage):
    source = batching(stage, max_size=4, limits={"concurrency": 1})
    source.results = lambda results: [*results[1:], "not a reply"]
    played = stage.play([10] * 4)
    assert sum(isinstance(outcome, Scored) for outcome in played.outcomes) >= 3


# Cancelling, deadlines, hedges


def held(stage, count, **options):
    """A dispatcher with `count` calls in one request under way."""
    dispatcher = stage.dispatcher(**options)
    batch = dispatcher.batches.new([None] * count)
    futures = [dispatcher.score(stage.sample(), stage.judge, deadline_s=30, batch=batch) for _ in range(count)]
    return dispatcher, futures


def test_cancelling_one_caller_leaves_the_rest(stage):
    source = batching(stage, max_size=8)

    async def main():
        dispatcher, futures = held(stage, 8)
        await asyncio.sleep(0.05)
        futures[0].cancel()
        outcomes = await asyncio.gather(*futures[1:])
        await dispatcher.aclose()
        return outcomes

    assert all(isinstance(outcome, Scored) for outcome in run(main()))
    assert (source.carried, source.cancelled) == ([8], 0)
    assert stage.idle()


def test_a_request_whose_callers_have_all_gone_is_cancelled(stage):
    source = batching(stage, max_size=8)

    async def main():
        dispatcher, futures = held(stage, 8)
        await asyncio.sleep(0.05)
        for future in futures:
            future.cancel()
        await asyncio.sleep(0.001)
        assert source.cancelled == 1
        assert stage.idle()
        await dispatcher.aclose()

    run(main())


@pytest.mark.parametrize("after_s", [0.0, 0.0005, 0.05])
def test_closing_leaves_nothing_behind(stage, after_s):
    batching(stage, max_size=8, max_wait_s=1.0)

    async def main():
        dispatcher, futures = held(stage, 8)
        if after_s:
            await asyncio.sleep(after_s)
        late = dispatcher.score(stage.sample(), stage.judge, deadline_s=30)
        if after_s:
            await asyncio.sleep(0.0001)
        await dispatcher.aclose()
        outcomes = await asyncio.gather(*futures, late)
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes

    assert {outcome.reason for outcome in run(main())} == {"closed"}
    assert stage.idle()


def test_nothing_is_sent_for_a_call_that_ended_before_its_request_was_written(stage):
    """The connection takes a while; a caller leaves meanwhile. The others go in a request without it."""
    source = batching(stage, max_size=4)
    sent = []

    class Slow:
        name, model, slots, batch = source.name, "m", None, source.batch

        async def send(self, request, *, on_sent):
            return (await self.send_batch([request], on_sent=on_sent))[0]

        async def send_batch(self, requests, *, on_sent):
            await asyncio.sleep(0.1)  # connects
            on_sent()
            sent.append(len(requests))
            await asyncio.sleep(0.1)
            return [Reply(text="1") for _ in requests]

    stage.upstreams["a"].source = Slow()

    async def main():
        dispatcher, futures = held(stage, 4)
        await asyncio.sleep(0.05)
        futures[2].cancel()
        outcomes = await asyncio.gather(*[future for future in futures if not future.cancelled()])
        await dispatcher.aclose()
        return outcomes

    assert len(run(main())) == 3
    assert sent == [3]
    assert stage.idle()


class Tracked:
    """A part of a sample whose end can be noticed."""


@pytest.mark.parametrize("fails", [None, TransientError, InvalidReply, PermanentError, Throttled])
def test_a_request_and_its_samples_are_freed_at_once(stage, fails):
    def takes(number, requests, now):
        return fails("too bad") if fails is not None and len(requests) == 8 and number < 2 else 0.1

    batching(stage, max_size=8, batch_behaviour=takes)

    async def main():
        dispatcher = stage.dispatcher()
        freed = []

        async def score():
            tracked = Tracked()
            weakref.finalize(tracked, freed.append, True)
            await dispatcher.score(stage.sample(extras={"tracked": tracked}), stage.judge, deadline_s=30)

        gc.collect()
        gc.disable()
        try:
            await asyncio.gather(*[score() for _ in range(16)])
            await asyncio.sleep(30)
            at_once = list(freed)
        finally:
            gc.enable()
        await dispatcher.aclose()
        return at_once

    assert len(run(main())) >= 15  # the last job of a batch is kept for its report


def test_late_answers_are_told_for_each_call(stage):
    late = []
    batching(stage, max_size=4, batch_behaviour=lambda *_: 5.0)

    async def main():
        dispatcher = stage.dispatcher(on_late=lambda sample, verdict: late.append(sample))
        batch = dispatcher.batches.new([None] * 4)
        futures = [
            dispatcher.score(stage.sample(), stage.judge, deadline_s=deadline_s, batch=batch)
            for deadline_s in (1.0, 1.0, 30.0, 30.0)
        ]
        outcomes = await asyncio.gather(*futures)
        await asyncio.sleep(0.1)
        await dispatcher.aclose()
        return outcomes

    outcomes = run(main())
    assert [isinstance(outcome, Scored) for outcome in outcomes] == [False, False, True, True]
    assert len(late) == 2
    assert stage.idle()


def test_a_hedge_never_shares_a_request_with_the_attempt_that_it_is_for(stage):
    source = batching(stage, "a", max_size=8, limits={"concurrency": 1})
    source.batch_behaviour = lambda number, requests, now: 60.0
    other = batching(stage, "b", max_size=8, limits={"concurrency": 1})
    twice = []
    for each in (source, other):
        takes = each.batch_behaviour

        def noted(number, requests, now, takes=takes):
            names = [id(request.sample) for request in requests]
            twice.append(len(names) != len(set(names)))
            return takes(number, requests, now)

        each.batch_behaviour = noted
    for name in ("a", "b"):
        stage.knows(name, A_S + B_S)
    played = stage.play([10] * 16, hedge=True, hedge_budget=1.0)
    assert scored(played)
    assert not any(twice)
    assert played.finished_at < 30
    assert stage.counted("b").hedges > 0


def test_a_slow_request_is_one_missing_answer_not_as_many_as_it_has_calls(stage):
    source = batching(stage, max_size=32, limits={"concurrency": 4})
    good = source.batch_behaviour
    source.batch_behaviour = lambda number, requests, now: 4.5 if number == 6 else good(number, requests, now)
    opened = []
    breaker = stage.upstreams["a"].breaker
    tripped, breaker.trip = breaker.trip, lambda now: opened.append(now) or tripped(now)
    played = stage.play([10] * 400)
    assert scored(played)
    assert opened == []


def test_the_latency_of_a_call_is_learned_from_the_whole_request(stage):
    batching(stage, max_size=16, limits={"concurrency": 1})
    stage.play([100] * 160 + [10] * 160)
    speed = stage.upstreams["a"].speed
    assert speed.expected_s(1600) == pytest.approx(A_S + 16 * B_S, rel=0.35)
    assert speed.mean_s < 0.3
    assert not math.isnan(speed.expected_s(1))


def test_the_same_seed_gives_the_same_schedule(new_stage):
    def once():
        stage = new_stage()
        source = batching(stage, max_size=8, limits={"concurrency": 3}, guilty=(77, TransientError("500", status=500)))
        stage.play([n % 50 + 1 for n in range(200)] + [77], seed=3)
        return source.arrivals, source.carried

    assert once() == once()


@pytest.mark.parametrize("strategy", ["round_robin", "weighted", "least_requests", "least_tokens"])
def test_named_strategies_fill_requests_too(new_stage, strategy):
    stage = new_stage()
    sources = [batching(stage, name, max_size=8, limits={"concurrency": 1}) for name in ("a", "b")]
    played = stage.play([10] * 64, strategy=strategy)
    assert scored(played)
    assert sum(len(source.carried) for source in sources) <= 12


def test_a_batching_and_a_plain_source_share_the_work(stage):
    batching(stage, "a", max_size=16, limits={"concurrency": 1})
    stage.add("b", limits={"concurrency": 1}, behaviour=lambda *_: A_S + B_S)
    played = stage.play([10] * 400)
    assert scored(played)
    assert played.finished_at < 1.15 * 400 / 16 * (A_S + 16 * B_S)
