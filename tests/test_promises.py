"""The promises P1 to P11 at the public surface: engines in virtual time, engines against judge servers, fake trainers.

`test_rows.py` says which other tests hold each of them.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import weakref
from dataclasses import replace

import pytest

from qreward_plugins import (
    Cause,
    Failed,
    InvalidReply,
    PermanentError,
    Scored,
    SourceUnusable,
    Throttled,
    TransientError,
    Usage,
)
from qreward_plugins.sources import Reply
from qreward_plugins.testing import JudgeServer

from .kit import (
    FRAMEWORKS,
    NEVER_S,
    Stage,
    by_word,
    make_config,
    make_sample,
    make_samples,
    play,
    scored_text,
)


def number_of(request) -> int:
    return int(request.sample.id.removeprefix("sample-"))


# P1


def test_every_sample_has_one_outcome_in_order_by_its_deadline():
    def by_number(request):
        return scored_text(request, number_of(request) / 100)

    hangs_on_3 = {3: 1e6, 8: 1e6}
    options = {"judge": {"score_range": [0, 1]}, "limits": {"a": {"concurrency": 4}}}
    stage = Stage({"a": lambda n, request, now: hangs_on_3.get(number_of(request), 1.0)}, by_number, options=options)
    samples = make_samples(12)
    samples[5] = replace(samples[5], messages=5)
    played = stage.play(samples, deadline_s=20.0)
    expected = [None if number in (3, 5, 8) else number / 100 for number in range(12)]
    assert played.rewards == expected
    assert [type(outcome) for outcome in played.outcomes] == [Failed if x is None else Scored for x in expected]
    assert played.outcomes[5].label == "infra/input"
    assert played.outcomes[3].label == "infra/deadline"
    assert played.finished_s == 20.0


# P2


NO_SCORES = ["NaN", "Infinity", "-Infinity", "1e39", "true", "null", '"7"', "[5]", "11", "-1", "1e400"]


@pytest.mark.parametrize("written", NO_SCORES)
def test_what_is_no_score_is_a_failure_of_the_verdict_and_never_a_number(written):
    def answer(request):
        return Reply(text=f'{{"id": "{request.nonce}", "rationale": "so", "score": {written}}}')

    (outcome,) = Stage(answer=answer).play(make_samples(1)).outcomes
    assert (type(outcome), outcome.reward) == (Failed, None)
    assert outcome.cause is Cause.VERDICT


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


# P5


def test_a_permit_of_a_cancelled_call_is_free_at_once():
    async def main(engine):
        first = asyncio.ensure_future(engine.score(make_sample(0)))
        await asyncio.sleep(0.5)
        first.cancel()
        outcome = await engine.score(make_sample(1))
        return outcome.reward, asyncio.get_running_loop().time()

    stage = Stage({"a": lambda n, request, now: 1.0 if n else 1e6}, options={"limits": {"a": {"concurrency": 1}}})
    assert stage.run(main) == (0.5, 1.5)


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
