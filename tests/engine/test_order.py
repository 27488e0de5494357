"""Which sample goes where, and when: size, windows, deadlines, speeds, strategies and cost. In virtual time."""

from __future__ import annotations

import asyncio
import itertools

from qreward_plugins import InvalidReply, TransientError, Usage
from qreward_plugins.sources import Reply

from ..kit import Stage, fails, make_sample, make_samples, scored_text

CALM = {"engine": {"scheduling": {"hedge": False}, "deadline_s": 3000.0}, "total_s": 600}


def calm(limits=None, **scheduling):
    return {**CALM, "limits": limits or {}, "engine": {**CALM["engine"], "scheduling": {"hedge": False, **scheduling}}}


def sized(*sizes):
    return [make_sample(number, response="x" * size) for number, size in enumerate(sizes)]


def by_size(seconds_per_kb, base=0.0):
    return lambda number, request, now: base + seconds_per_kb * len(request.sample.response) / 1000


def order_of(stage):
    return [int(each.id.removeprefix("sample-")) for each in stage.sent]


def test_a_batch_goes_longest_first_and_retries_before_the_rest():
    sizes = [100, 400, 200, 300]
    stage = Stage(options=calm({"a": {"concurrency": 1}}))
    assert stage.play(sized(*sizes)).all_scored
    assert order_of(stage) == [1, 3, 2, 0]
    stage = Stage({"a": fails(InvalidReply("no verdict"), times=1)}, options=calm({"a": {"concurrency": 1}}))
    assert stage.play(sized(*sizes)).all_scored
    assert order_of(stage) == [1, 1, 3, 2, 0]


def test_a_batch_of_several_windows_begins_each_with_short_samples():
    """A slot that is used early in a window is free early in the next one."""
    limits = {name: {"requests_per_minute": 20} for name in "ab"}
    sizes = [100 * number for number in range(1, 51)]
    stage = Stage({name: by_size(2.0) for name in "ab"}, options=calm(limits))
    played = stage.play(sized(*sizes))
    assert played.all_scored
    assert max(order_of(stage)[:5]) < 30
    assert order_of(stage).index(49) >= 5
    assert played.finished_s < 60 + 10


def test_samples_one_by_one_keep_their_order_whatever_their_size():
    stage = Stage({"a": 1.0}, options=calm({"a": {"concurrency": 1}}))

    async def main(engine):
        tasks = []
        for number in range(30):
            sample = make_sample(number, response="x" * (1 + number % 7 * 500))
            tasks.append(asyncio.ensure_future(engine.score(sample)))
            await asyncio.sleep(0.5)
        await asyncio.gather(*tasks)

    stage.run(main)
    while_more_came = order_of(stage)[: sum(each.at < 15.0 for each in stage.sent)]
    assert while_more_came == sorted(while_more_came)
    assert len(while_more_came) == 15


def test_a_sample_in_a_hurry_does_not_wait_for_a_batch_that_has_time():
    stage = Stage({"a": 1.0}, options=calm({"a": {"concurrency": 1}}))

    async def main(engine):
        batch = asyncio.ensure_future(engine.score_all(make_samples(60)))
        await asyncio.sleep(5.5)
        outcome = await engine.score(make_sample(99), deadline_s=10.0)
        at = asyncio.get_running_loop().time()
        await batch
        return outcome.reward, at

    reward, at = stage.run(main)
    assert reward == 0.5
    assert at <= 15.5


def test_of_a_batch_that_cannot_end_in_time_samples_of_all_sizes_are_missing():
    stage = Stage({"a": by_size(1.0)}, options=calm({"a": {"concurrency": 2}}))

    async def main(engine):
        await engine.score_all(sized(*[1000] * 20))  # it gets to know the source
        return await engine.score_all(sized(*[200 + 20 * (number % 90) for number in range(300)]), deadline_s=80.0)

    outcomes = stage.run(main)
    scored = [number % 90 for number, outcome in enumerate(outcomes) if outcome.reward is not None]
    assert 100 < len(scored) < 250
    thirds = [sum(low <= size < low + 30 for size in scored) for low in (0, 30, 60)]
    assert min(thirds) > 0.15 * len(scored)


def test_a_slow_source_takes_short_samples_and_idles_when_it_would_end_last():
    stage = Stage(
        {"fast": by_size(1.0), "slow": by_size(6.0)},
        options=calm({name: {"concurrency": 4} for name in ("fast", "slow")}),
    )
    sizes = [500 + 50 * (number * 7 % 40) for number in range(120)]

    async def main(engine):
        await engine.score_all(sized(*sizes))
        del stage.sent[:]
        began = asyncio.get_running_loop().time()
        await engine.score_all(sized(*sizes))
        return asyncio.get_running_loop().time() - began

    took_s = stage.run(main)
    assert took_s < 1.15 * sum(sizes) / 1000 / 4 / (1 + 1 / 6)
    sent = {name: [sizes[int(each.id[7:])] for each in stage.sent if each.source == name] for name in ("fast", "slow")}
    assert 8 <= len(sent["slow"]) <= 40
    assert sum(sent["slow"]) / len(sent["slow"]) < sum(sent["fast"]) / len(sent["fast"])


def test_named_strategies_share_a_batch_in_their_own_way():
    slow_gets = {}
    for strategy in ("round_robin", "weighted", "least_requests", "least_tokens"):
        options = calm({name: {"concurrency": 8} for name in "ab"}, strategy=strategy)
        played = Stage({"a": 1.0, "b": 1.0}, options=options).play(make_samples(100))
        assert played.shares == {"a": 50, "b": 50}, strategy
        played = Stage({"a": 1.0, "b": 4.0}, options=options).play(make_samples(200))
        slow_gets[strategy] = played.shares["b"]
        assert played.finished_s < 24.0, strategy  # nothing waits for a source while another one is free
    assert max(slow_gets.values()) <= 50


def test_nothing_waits_while_a_source_is_free_and_what_is_too_large_for_one_goes_to_the_other():
    for strategy in ("earliest_finish", "round_robin", "least_requests"):
        limits = {"small": {"tokens_per_minute": 2000}, "large": {"tokens_per_minute": 200_000}}
        stage = Stage({"small": 1.0, "large": 1.0}, options=calm(limits, strategy=strategy))
        played = stage.play(sized(30_000, 30, 30))
        assert played.all_scored, strategy
        assert [each.source for each in stage.sent if each.id == "sample-0"] == ["large"]
        assert played.finished_s < 70


def test_cheap_sources_serve_a_batch_that_has_time_and_others_help_one_that_has_none():
    tree = {
        "sources": {
            name: {"kind": "http", "url": "http://a.invalid/", "price": {"per_request": price}, "version": "1"}
            | {"limits": {"concurrency": 2}}
            for name, price in (("own", 0.0), ("paid", 0.01))
        },
        "judges": {"right": {"kind": "function"}},
        "engine": {"seed": 7, "scheduling": {"prefer": "cost"}},
    }

    def answer(request):
        return Reply(value=0.5)

    def shares(deadline_s, own=1.0):
        stage = Stage({"own": own, "paid": 1.0}, answer=answer, tree=tree)
        played = stage.play(make_samples(60), deadline_s=deadline_s)
        assert played.all_scored
        return played.shares

    assert shares(600.0) == {"own": 60}
    assert shares(40.0)["paid"] >= 10
    assert shares(600.0, own=fails(TransientError("503")))["paid"] == 60


def test_a_large_sample_is_not_overtaken_for_its_tokens_for_ever():
    limits = {"a": {"tokens_per_minute": 20_000}}

    def answer(request):
        return Reply(text=scored_text(request).text, usage=Usage(request.size // 4, 50), model="m")

    stage = Stage({"a": 0.5}, answer=answer, options=calm(limits))

    async def main(engine):
        async def small():
            for number in itertools.count(1):
                await engine.score(make_sample(number, response="x" * 2000))

        busy = [asyncio.ensure_future(small()) for _ in range(4)]
        await asyncio.sleep(90.0)
        began = asyncio.get_running_loop().time()
        await engine.score(make_sample(0, response="x" * 16_000))
        took_s = asyncio.get_running_loop().time() - began
        for task in busy:
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        return took_s

    assert stage.run(main) < 130.0
