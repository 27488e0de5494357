"""The promises P1 to P11 at the public surface: engines in virtual time, engines against judge servers, fake trainers.

`test_rows.py` says which other tests hold each of them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import math
import random
import threading
import weakref
from dataclasses import replace

import psutil
import pytest

from qreward_plugins import (
    Cause,
    Failed,
    InvalidReply,
    PermanentError,
    RewardEngine,
    Scored,
    SourceUnusable,
    Throttled,
    TransientError,
    Usage,
)
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources import Reply
from qreward_plugins.testing import Faults, JudgeServer

from .kit import (
    FRAMEWORKS,
    NEVER_S,
    Stage,
    by_word,
    children_left,
    make_config,
    make_sample,
    make_samples,
    play,
    scored_text,
    tasks_left,
    threads_left,
    wired,
)

ONE_TO_ONE = {"judge": {"score_range": [0, 1]}}


def number_of(request) -> int:
    return int(request.sample.id.removeprefix("sample-"))


def chance(seed):
    """Every kind of end, by chance, but the same for the same number of request and seed."""

    def behaviour(number, request, now):
        luck = random.Random(f"{seed}/{number}")
        ends = {TransientError("down"): 0.15, Throttled("slow down", retry_after_s=3.0): 0.05, 1e6: 0.03}
        takes = luck.lognormvariate(0, 0.8)
        return luck.choices([takes, *ends], [1 - sum(ends.values()), *ends.values()])[0]

    return behaviour


# P1


def test_every_sample_has_one_outcome_in_order_by_its_deadline():
    def by_number(request):
        return scored_text(request, number_of(request) / 100)

    hangs_on_3 = {3: 1e6, 8: 1e6}
    stage = Stage({"a": lambda n, request, now: hangs_on_3.get(number_of(request), 1.0)}, answer=by_number)
    stage.options = {**ONE_TO_ONE, "engine": {"deadline_s": 20.0}, "limits": {"a": {"concurrency": 4}}}
    samples = make_samples(12)
    samples[5] = replace(samples[5], messages=5)
    played = stage.play(samples)
    expected = [None if number in (3, 5, 8) else number / 100 for number in range(12)]
    assert played.rewards == expected
    assert [type(outcome) for outcome in played.outcomes] == [Failed if x is None else Scored for x in expected]
    assert played.outcomes[5].label == "infra/input"
    assert played.outcomes[3].label == "infra/deadline"
    assert played.finished_s == 20.0


@pytest.mark.parametrize("seed", range(4))
def test_whatever_sources_do_every_sample_has_one_outcome_in_time(seed):
    stage = Stage({"a": chance(seed), "b": chance(seed + 100)}, options={"engine": {"deadline_s": 6.0}})
    played = stage.play(make_samples(60))
    assert len(played.outcomes) == 60
    assert all(isinstance(outcome, (Scored, Failed)) for outcome in played.outcomes)
    assert played.finished_s <= 6.0
    assert played.statistics.submitted == played.statistics.scored + played.statistics.failed_total == 60


# P2


NO_SCORES = ["NaN", "Infinity", "-Infinity", "1e39", "true", "null", '"7"', "[5]", "11", "-1", "1e400"]


@pytest.mark.parametrize("written", NO_SCORES)
def test_what_is_no_score_is_a_failure_of_the_verdict_and_never_a_number(written):
    def answer(request):
        return Reply(text=f'{{"id": "{request.nonce}", "rationale": "so", "score": {written}}}')

    (outcome,) = Stage(answer=answer).play(make_samples(1)).outcomes
    assert (type(outcome), outcome.reward) == (Failed, None)
    assert outcome.cause is Cause.VERDICT


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e39, True, None, "1", [1.0]])
def test_what_a_function_returns_is_a_finite_number_or_a_failure(value):
    tree = {
        "sources": {"f": {"kind": "function", "function": "rewards:score"}},
        "judges": {"right": {"kind": "function"}},
    }
    stage = Stage({"f": 1.0}, answer=lambda request: Reply(value=value), tree=tree)
    (outcome,) = stage.play(make_samples(1)).outcomes
    assert outcome.reward is None


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("bad", ["nan", "inf", "nonsense", "refuse", "99"])
def test_no_framework_ever_holds_a_number_that_is_none(framework, bad):
    with JudgeServer(by_word) as judge:
        step = play(framework, ["2", bad, "6", "4"], make_config({"judge": judge}, engine={"max_attempts": 1}))
    assert all(map(math.isfinite, step.rewards))
    assert not step.poisoned
    scored = [step.rewards[row] for row in (0, 2, 3)]
    assert scored == pytest.approx([0.2, 0.6, 0.4])
    # It moves nobody: verl computes without it, and to the others it is its siblings' mean.
    assert framework == "verl" or step.rewards[1] == pytest.approx(0.4)
    assert step.advantages[1] is None or step.advantages[1] == pytest.approx(0.0, abs=1e-6)


# P3


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("requests", "tokens", "concurrency"), [(20, 40_000, 50), (200, 1_800, 50), (200, 40_000, 3)], ids=str
)
def test_no_window_holds_more_than_the_limit_retries_and_hedges_included(requests, tokens, concurrency, seed):
    strict = {"requests_per_window": requests, "tokens_per_window": tokens, "concurrency": concurrency}
    sources = {
        name: SimulatedSource(name, behaviour=chance(seed + at), answer=scored_text, **strict)
        for at, name in enumerate("ab")
    }
    limits = {"requests_per_minute": requests, "tokens_per_minute": tokens, "concurrency": concurrency}
    options = {
        "limits": {name: {**limits, "window": "sliding"} for name in sources},
        "judge": {"max_tokens": 40},
        "engine": {"deadline_s": 1800.0},
    }
    played = Stage(sources, options=options).play(make_samples(80))
    assert played.all_scored
    assert [source.violations for source in sources.values()] == [[], []]
    assert played.statistics.attempts > 80


# P4


def test_attempts_keep_to_the_budgets_of_retries_and_hedges():
    """Half of all requests straggle, and there is room for a hedge of each."""

    def straggles(number, request, now):
        return 40.0 if random.Random(number).random() < 0.5 else 1.0

    options = {"engine": {"scheduling": {"hedge_budget": 0.1}, "deadline_s": 600.0}, "total_s": 60}
    stage = Stage({"a": straggles, "b": straggles}, options=options)

    async def main(engine):
        await engine.score_all(make_samples(20))  # it gets to know them
        before, asked = engine.statistics(), len(stage.sent)
        await engine.score_all(make_samples(200))
        hedges = sum(source.hedges for source in engine.statistics().sources.values())
        return hedges - sum(source.hedges for source in before.sources.values()), len(stage.sent) - asked

    hedges, attempts = stage.run(main)
    assert 0 < hedges <= 0.1 * 200
    assert attempts <= 2 * 200  # stragglers that are given up are asked again, too


def test_a_sample_that_always_fails_is_given_up_after_its_attempts():
    def fails_on_0(number, request, now):
        return TransientError("no") if number_of(request) == 0 else 1.0

    stage = Stage({"a": fails_on_0, "b": fails_on_0}, options={"engine": {"max_attempts": 4, "deadline_s": 600.0}})
    played = stage.play(make_samples(20))
    assert played.outcomes[0].reward is None
    assert sum(each.id == "sample-0" for each in stage.sent) <= 4
    assert played.statistics.scored == 19


# P5


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_cancelling_or_closing_leaves_nothing(how):
    threads, children = set(threading.enumerate()), {child.pid for child in psutil.Process().children(recursive=True)}

    async def main(engine):
        calls = [asyncio.ensure_future(engine.score(sample)) for sample in make_samples(10)]
        await asyncio.sleep(0.5)
        if how == "cancel":
            for call in calls:
                call.cancel()
            ends = await asyncio.gather(*calls, return_exceptions=True)
            assert {type(end) for end in ends} == {asyncio.CancelledError}
        else:
            await engine.aclose()
            assert {outcome.label for outcome in await asyncio.gather(*calls)} == {"infra/closed"}
        statistics = engine.statistics()
        assert (statistics.waiting, statistics.sources["a"].in_flight) == (0, 0)
        return tasks_left()

    # `run` asserts that no task, request or open source is left.
    stage = Stage({"a": lambda *_: 1e6}, options={"limits": {"a": {"concurrency": 4}}})
    assert stage.run(main) == []
    assert len(stage.sent) == 4
    assert threads_left(threads) == children_left(children) == []


def test_a_permit_of_a_cancelled_call_is_free_at_once():
    async def main(engine):
        first = asyncio.ensure_future(engine.score(make_sample(0)))
        await asyncio.sleep(0.5)
        first.cancel()
        outcome = await engine.score(make_sample(1))
        return outcome.reward, asyncio.get_running_loop().time()

    stage = Stage({"a": lambda n, request, now: 1.0 if n else 1e6}, options={"limits": {"a": {"concurrency": 1}}})
    assert stage.run(main) == (0.5, 1.5)


def test_whoever_fails_to_close_the_others_are_closed(caplog):
    class Fails(SimulatedSource):
        async def aclose(self):
            raise RuntimeError("no")

    sources = {"a": Fails("a", answer=scored_text), "b": SimulatedSource("b", answer=scored_text)}

    async def main():
        async with RewardEngine(make_config("ab"), sources=sources) as engine:
            await engine.score(make_sample())
        return tasks_left()

    assert run(main()) == []
    assert sources["b"].closed
    assert "source a could not be closed" in caplog.text


# P6


def test_a_late_attempt_changes_no_outcome_and_nothing_is_sent_after_it():
    """The hedge answers first, with 0.9; the straggler answers later, with 0.1."""

    def answer(request):
        return scored_text(request, 0.1 if request.nonce == first[0] else 0.9)

    first = []

    def straggles(number, request, now):
        if number_of(request) == 0 and not first:
            first.append(request.nonce)
            return 30.0
        return 1.0

    stage = Stage({"a": straggles, "b": straggles}, answer=answer, options=ONE_TO_ONE)

    async def main(engine):
        outcomes = await engine.score_all(make_samples(16))
        ended_s = asyncio.get_running_loop().time()
        before = [outcome.reward for outcome in outcomes]
        await asyncio.sleep(0.1)
        assert sum(source.in_flight for source in stage.simulated.values()) == 0
        await asyncio.sleep(100)
        return before, [outcome.reward for outcome in outcomes], ended_s, engine.statistics()

    before, after, ended_s, statistics = stage.run(main)
    assert before == after == [0.9] * 16
    assert ended_s < 30.0
    assert max(each.at for each in stage.sent) < ended_s
    assert statistics.scored == 16


def test_nothing_is_sent_after_a_deadline():
    async def main(engine):
        outcomes = await engine.score_all(make_samples(6), deadline_s=5.0)
        await asyncio.sleep(100)
        return [outcome.label for outcome in outcomes if outcome.reward is None]

    stage = Stage({"a": 2.0}, options={"limits": {"a": {"concurrency": 1}}})
    assert stage.run(main) == ["infra/deadline"] * 4
    assert max(each.at for each in stage.sent) < 5.0


# P7


def test_the_same_seed_is_the_same_schedule():
    def once(seed):
        stage = Stage({"a": chance(3), "b": chance(4)}, options={"engine": {"seed": seed, "deadline_s": 100.0}})
        played = stage.play(make_samples(80))
        return stage.sent, played.rewards, played.finished_s

    assert once(7) == once(7)
    assert once(7)[0] != once(8)[0]


# P8


def test_a_stream_holds_a_window_of_samples_however_long_it_is():
    """Of samples that fail or are tried again, too, and without the garbage collector."""

    class Column:
        """A part of a sample that can be counted."""

    alive = weakref.WeakSet()
    most = 0

    def samples():
        for number in range(400):
            column = Column()
            alive.add(column)
            yield make_sample(number, extras={"column": column})

    async def main(engine):
        nonlocal most
        scored = []
        async for _, outcome in engine.score_stream(samples(), window=10):
            most = max(most, len(alive))
            scored.append(isinstance(outcome, Scored))
        return scored

    replies = itertools.count(1)
    stage = Stage(
        {"a": lambda number, request, now: TransientError("failed") if number % 7 == 6 else 0.1},
        answer=lambda request: scored_text(request, 0.5 if next(replies) % 11 else None),
        options={"judge": {"invalid_retries": 0}},
    )
    gc.disable()
    try:
        scored = stage.run(main)
        assert len(alive) == 0
    finally:
        gc.enable()
    assert (len(scored), 300 < sum(scored) < 400) == (400, True)
    assert 10 <= most <= 25


@pytest.mark.parametrize("fault", ["huge_body"])
def test_a_body_without_end_is_one_failed_attempt(fault):
    with JudgeServer(faults=Faults(script=[fault], huge_bytes=200_000_000)) as server:
        played = wired({"a": server}, make_samples(1))
    assert isinstance(played.outcomes[0], Scored)
    assert played.outcomes[0].verdict.attempts == 2
    assert played.statistics.sources["a"].transient == 1


# P9


def test_no_key_comes_out_of_a_server_that_echoes_it(caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    key = "sk-live-0123456789abcdef"
    path = tmp_path / "journal.sqlite"

    def echo(call):
        return {"score": 5, "rationale": f"with {key}"} if "0 plus" in call.blocks["response"] else f"It is {key}."

    options = {"source": {"api_key": key}, "engine": {"max_attempts": 1, "journal": {"path": str(path)}}}
    with JudgeServer(echo, api_key=key) as server:
        played = wired({"a": server}, make_samples(2), **options)
        with JudgeServer(api_key="another") as refuses:
            refused = wired({"a": refuses}, make_samples(1, response="1"), **options)
        engine = RewardEngine(make_config({"a": server}, **options))
        asyncio.run(engine.aclose())  # its journal has threads, which other tests count
    assert [outcome.reward for outcome in [*played.outcomes, *refused.outcomes]] == [0.5, None, None]
    shown = [caplog.text, path.read_bytes().decode(errors="replace"), repr(engine), repr(engine.config)]
    shown += map(repr, [*played.outcomes, *refused.outcomes, played.statistics])
    shown += [outcome.describe() for outcome in [*played.outcomes, *refused.outcomes] if outcome.reward is None]
    assert not [text for text in shown if key in text]


# P10


def test_a_recorded_answer_is_used_only_for_the_same_question(tmp_path):
    sample = make_sample(0, response="3")
    journal = {"journal": {"path": str(tmp_path / "journal.sqlite")}}
    others = {
        "response": replace(sample, response="4"),
        "prompt": replace(sample, messages=[{"role": "user", "content": "What?"}]),
        "reference": replace(sample, ground_truth="3"),
    }
    with JudgeServer(by_word) as server:
        asked = []
        for one, judge in [
            (sample, {}),
            (sample, {}),
            *((other, {}) for other in others.values()),
            (sample, {"instructions": "Be strict."}),
            (sample, {"max_tokens": 99}),
            (sample, {"reward_range": [0, 100]}),
        ]:
            before = server.report().requests
            played = wired({"a": server}, [one], judge=judge, engine=journal)
            assert isinstance(played.outcomes[0], Scored)
            asked.append(server.report().requests - before)
    # Not again: the same question, and another use of the same number.
    assert asked == [1, 0, 1, 1, 1, 1, 1, 0]


# P11


POISONS = {
    "a throttle that names an absurd time": Throttled("429", retry_after_s=1e9),
    "a throttle of that sample only": Throttled("429: request too large"),
    "a block page": InvalidReply("a page of HTML"),
    "a refusal": PermanentError("400: blocked", status=400),
    "a firewall": SourceUnusable("403: blocked", status=403),
    "a failure": TransientError("500"),
    "a short throttle": Throttled("429", retry_after_s=20.0),
    "silence": NEVER_S,
}
WITHIN_S = {"silence": 27.0}
"""Silence takes one of the four places. Nothing else costs any time."""


@pytest.mark.parametrize("poison", POISONS)
def test_what_one_response_provokes_costs_no_other_sample(poison):
    def behaviour(number, request, now):
        return POISONS[poison] if number_of(request) == 7 else 1.0

    options = {"limits": {"a": {"concurrency": 4}}, "engine": {"deadline_s": 300.0}}
    stage = Stage({"a": behaviour}, options=options)

    async def main(engine):
        async def one(sample):
            outcome = await engine.score(sample)
            return outcome, asyncio.get_running_loop().time()

        return await asyncio.gather(*map(one, make_samples(80)))

    ended = stage.run(main)
    assert [number for number, (outcome, _) in enumerate(ended) if outcome.reward is None] == [7]
    assert max(at for number, (_, at) in enumerate(ended) if number != 7) <= WITHIN_S.get(poison, 21.0)


def test_an_absurd_usage_bars_no_later_sample():
    def answer(request):
        reply = scored_text(request)
        return replace(reply, usage=Usage(10**12, 10**12)) if number_of(request) == 17 else reply

    limits = {"a": {"tokens_per_minute": 200_000, "concurrency": 4}}
    played = Stage({"a": 1.0}, answer=answer, options={"limits": limits}).play(make_samples(40))
    assert played.all_scored
    assert played.finished_s <= 11.0  # as without it
