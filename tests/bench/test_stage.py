"""What peers meet in place of a network."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time

import pytest
from peers import clock
from peers.stage import HTTPFailure, NetworkFailure, Stage, weighted_cycle

from qreward_plugins.simulation import Fault, run, scenario, score_of


def a_stage(**server):
    """A stage with one server that answers as it is told to."""
    made = scenario("equal", samples=8)
    plain = {"error_share": 0.0, "requests_per_minute": None, "concurrency": None, **server}
    return Stage(dataclasses.replace(made, servers=(dataclasses.replace(made.servers[0], **plain),)))


def test_an_answer_holds_the_sample_s_score():
    stage = a_stage()
    item = stage.items[3]
    answer = run(stage.ask("a", item))
    assert answer.score == score_of(item.id)
    assert answer.prompt_tokens == item.prompt_tokens
    assert stage.counts() == (1, 0, 0)


def test_an_answer_that_is_no_verdict_has_no_score():
    stage = a_stage(invalid_share=1.0)
    answer = run(stage.ask("a", stage.items[0]))
    with pytest.raises(ValueError, match="Expecting value"):
        _ = answer.score


def test_over_a_limit_is_a_429_with_whole_seconds_to_wait():
    stage = a_stage(requests_per_minute=1)

    async def two():
        await stage.ask("a", stage.items[0])
        await asyncio.sleep(10.0)
        await stage.ask("a", stage.items[1])

    with pytest.raises(HTTPFailure) as caught:
        run(two())
    assert caught.value.status == 429
    assert caught.value.retry_after.isdigit()
    assert 1 <= caught.value.retry_after_s <= 60
    assert stage.counts() == (2, 1, 0)


def test_a_limit_that_nobody_told_of_is_counted_apart():
    stage = a_stage(requests_per_minute=1, declared=False)

    async def two():
        await asyncio.gather(*(stage.ask("a", item) for item in stage.items[:2]), return_exceptions=True)

    run(two())
    assert stage.counts() == (2, 0, 1)


def test_a_server_error_is_a_500():
    stage = a_stage(error_share=1.0)
    with pytest.raises(HTTPFailure) as caught:
        run(stage.ask("a", stage.items[0]))
    assert (caught.value.status, caught.value.retry_after) == (500, None)


def test_a_refused_connection_has_no_status():
    stage = a_stage(faults=(Fault(0.0, 60.0, "refuse"),))
    with pytest.raises(NetworkFailure):
        run(stage.ask("a", stage.items[0]))


def test_a_hang_lasts_until_the_caller_s_time_out():
    stage = a_stage(faults=(Fault(0.0, 600.0, "hang"),))

    async def ask():
        with pytest.raises(asyncio.TimeoutError):
            await stage.ask("a", stage.items[0], timeout_s=7.0)
        return asyncio.get_running_loop().time()

    assert run(ask()) == pytest.approx(7.0)


def test_faults_move_to_where_the_measured_batch_starts():
    made = scenario("dies-hanging", samples=64)
    before, after = Stage(made), Stage(made, starts_at_s=600.0)
    fault, moved = (stage.servers["a"].server.faults[0] for stage in (before, after))
    assert moved.start_s == fault.start_s + 600.0
    assert after.scenario.bound_s() == before.scenario.bound_s()


def test_all_policies_send_what_the_engine_sends():
    stage = a_stage()
    assert all(stage.item_of(list(item.messages)) is item for item in stage.items)
    assert sum(item.prompt_tokens + item.completion_tokens for item in stage.items) / 8 == stage.mean_tokens


def test_a_weighted_cycle_is_even():
    assert "".join(itertools.islice(weighted_cycle({"a": 2, "b": 1}), 9)) == "abaabaaba"


def test_all_clocks_tell_the_loop_s_time(monkeypatch):
    for name in ("time", "monotonic", "perf_counter"):
        for suffix in ("", "_ns"):
            monkeypatch.setattr(time, name + suffix, getattr(time, name + suffix))  # which puts them back afterwards
    clock.install()
    loop = clock.TickingLoop()

    async def look():
        began, began_ns = time.perf_counter(), time.monotonic_ns()
        await asyncio.sleep(100.0)
        now = clock.VirtualDateTime.now()
        assert isinstance(now, clock.VirtualDateTime)
        return time.perf_counter() - began, (time.monotonic_ns() - began_ns) / 1e9, now.second

    with clock.virtual(loop, into_minute_s=3.0):
        passed_s, passed_ns_s, second = loop.run_until_complete(look())
    loop.close()
    assert passed_s == pytest.approx(100.0, abs=0.01)
    assert passed_ns_s == pytest.approx(100.0, abs=0.01)
    assert second == 43
    assert time.time() < clock.EPOCH_S or time.time() > clock.EPOCH_S + 1000


def test_waiting_for_less_than_a_float_can_say_ends():
    loop = clock.TickingLoop()

    async def wait():
        at = loop.time() + 1000.0
        await asyncio.sleep(1000.0 - 1e-6)
        while loop.time() < at:  # noqa: ASYNC110 -- as token buckets do
            await asyncio.sleep(1e-17)

    loop.run_until_complete(wait())
    loop.close()


def test_the_executor_works_on_the_spot():
    loop = clock.TickingLoop()
    loop.set_default_executor(clock.InlineExecutor())
    assert loop.run_until_complete(loop.run_in_executor(None, lambda: 3)) == 3
    loop.close()
