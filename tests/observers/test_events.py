"""Which events an engine tells, in which order, and what they say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from qreward_plugins import (
    AttemptEnded,
    AttemptStarted,
    CallEnded,
    EngineClosed,
    LateVerdict,
    SampleDropped,
    SampleEnded,
    SampleSubmitted,
    SourceStateChanged,
    TransientError,
    Usage,
)
from qreward_plugins.errors import PermanentError, Throttled
from qreward_plugins.observers import events
from qreward_plugins.simulation import run

from ..kit import make_sample


def scored(engine, samples, **options):
    async def main():
        async with engine:
            return await engine.score_all(samples, **options)

    return run(main())


def test_a_sample_is_told_from_its_submission_to_its_outcome(make_engine, recorder):
    engine = make_engine([recorder], price={"per_request": 0.5})
    (outcome,) = scored(engine, [make_sample()])
    assert recorder.kinds == [
        "SampleSubmitted",
        "AttemptStarted",
        "AttemptEnded",
        "CallEnded",
        "SampleEnded",
        "BatchEnded",
        "EngineClosed",
    ]
    submitted, started, attempt, call, ended, batch, _ = recorder.events
    assert submitted == SampleSubmitted(0.0, "sample-0", "test/add")
    assert started == AttemptStarted(0.0, 0, 0, "quality", "a", False, 1)
    assert attempt == AttemptEnded(1.0, 0, 0, "quality", "a", "answered", 1.0, Usage(100, 20), 0.5, False, False, "")
    assert (call.judge, call.source, call.reason, call.waited_s, call.attempts) == ("quality", "a", "", 0.0, 1)
    assert ended == SampleEnded(1.0, "sample-0", "test/add", outcome)
    assert ended.outcome.verdict.raw == outcome.verdict.raw is not None
    assert batch.report == engine.last_batch()


def test_what_is_told_adds_up_to_the_statistics(make_engine, recorder):
    rng = random.Random(5)

    def behaviour(number, request, now):
        drawn = rng.random()
        if drawn < 0.1:
            return TransientError("connection reset")
        if drawn < 0.15:
            return Throttled("slow down", retry_after_s=0.5)
        return 50 * drawn if drawn > 0.9 else drawn

    engine = make_engine(
        [recorder], engine={"scheduling": {"hedge": True}}, price={"per_request": 0.01}, a=behaviour, b=behaviour
    )
    scored(engine, [make_sample(number) for number in range(200)])
    statistics = engine.statistics()
    started, ended = recorder.of(AttemptStarted), recorder.of(AttemptEnded)
    assert sorted(event[1:3] for event in started) == sorted(event[1:3] for event in ended)
    assert len(recorder.of(SampleEnded)) == len(recorder.of(SampleSubmitted)) == statistics.submitted == 200
    assert any(event.hedge for event in started)
    for name, source in statistics.sources.items():
        results = Counter(event.result for event in ended if event.source == name)
        assert source.requests == sum(event.source == name for event in started)
        assert (source.answered, source.throttled) == (results["answered"], results["throttled"])
        assert (source.transient, source.cancelled) == (results["failed"], results["cancelled"])
        assert source.prompt_tokens == 100 * results["answered"]
        assert source.cost_usd == pytest.approx(0.01 * results["answered"])


def test_a_sample_that_nobody_waits_for_any_more_is_dropped(make_engine, recorder):
    async def main():
        async with make_engine([recorder]) as engine:
            task = asyncio.ensure_future(engine.score(make_sample()))
            await asyncio.sleep(0.5)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())
    assert [event.sample_id for event in recorder.of(SampleDropped)] == ["sample-0"]
    assert recorder.of(SampleEnded) == []
    assert [event.reason for event in recorder.of(CallEnded)] == ["dropped"]
    assert [event.result for event in recorder.of(AttemptEnded)] == ["cancelled"]


def test_a_source_that_goes_down_and_comes_back_is_told(make_engine, recorder):
    def behaviour(number, request, now):
        return TransientError("connection refused") if now < 20 else 0.1

    async def main():
        async with make_engine([recorder], engine={"max_attempts": 50}, a=behaviour) as engine:
            await engine.score_all([make_sample(number) for number in range(20)])
            await engine.score(make_sample())

    run(main())
    changes = recorder.of(SourceStateChanged)
    assert [(event.before, event.state) for event in changes] == [("up", "down"), ("down", "up")]
    assert changes[0].problem == "a is down (connection refused)"
    assert changes[1].problem == ""
    assert changes[0].at < 20 <= changes[1].at


def test_a_late_verdict_that_is_recorded_is_told(make_engine, recorder, tmp_path):
    async def main():
        told = asyncio.Event()

        def tell(event):
            if isinstance(event, AttemptEnded):
                told.set()

        journal = {"journal": {"path": str(tmp_path / "journal")}}
        # In real time, because the journal has threads.
        engine = make_engine([recorder, tell], engine=journal, deadline_s=0.5, a=lambda number, request, now: 0.8)
        async with engine:
            outcome = await engine.score(make_sample())
            async with asyncio.timeout(30):
                await told.wait()
            return outcome

    assert asyncio.run(main()).label == "infra/deadline"
    (late,) = recorder.of(LateVerdict)
    assert late[1:] == ("sample-0", "test/add", "quality", "a")
    (ended,) = recorder.of(AttemptEnded)
    assert (ended.result, ended.late) == ("answered", True)


def test_closing_is_the_last_event_and_comes_once(make_engine, recorder):
    async def main():
        engine = make_engine([recorder], a=lambda number, request, now: 100.0)
        waiting = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(1)
        await engine.aclose()
        await engine.aclose()
        return await waiting

    assert run(main()).label == "infra/closed"
    assert recorder.kinds[-1] == "EngineClosed"
    assert len(recorder.of(EngineClosed)) == 1
    assert len(recorder.of(AttemptEnded)) == len(recorder.of(SampleEnded)) == 1


def test_texts_of_others_are_cut(make_engine, recorder):
    engine = make_engine([recorder], a=lambda number, request, now: PermanentError("x" * 50_000))
    long = make_sample(id="i" * 5_000, data_source="d" * 5_000)
    (outcome,) = scored(engine, [long])
    assert len(outcome.detail) > 40_000  # the outcome itself is as it was
    for event in recorder.events:
        for value in event:
            assert not isinstance(value, str) or len(value) <= events.DETAIL_CHARS
    (ended,) = recorder.of(SampleEnded)
    assert len(ended.outcome.detail) == events.DETAIL_CHARS
    assert (len(ended.sample_id), len(ended.data_source)) == (events.NAME_CHARS, events.NAME_CHARS)
