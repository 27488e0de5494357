"""Which events an engine tells, in which order, and what they say. An observer that raises is cut off."""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter

import pytest

from qreward_plugins import (
    AttemptEnded,
    AttemptStarted,
    ConfigurationError,
    EngineClosed,
    RewardEngine,
    SampleDropped,
    SampleEnded,
    SampleSubmitted,
    SourceStateChanged,
    TransientError,
    Usage,
)
from qreward_plugins.errors import PermanentError, Throttled
from qreward_plugins.observers import events

from ..kit import Recorder, Stage, make_config, make_sample, make_samples


@pytest.fixture
def recorder():
    return Recorder()


def staged(*, hedge=False, price=None, engine=None, **behaviours):
    behaviours = behaviours or {"a": 1.0}
    engine = {"seed": 1, "deadline_s": 300.0, "scheduling": {"hedge": hedge}, **(engine or {})}
    limits = {name: {"concurrency": 8} for name in behaviours}
    return Stage(behaviours, options={"limits": limits, "source": {"price": price or {}}, "engine": engine})


def scored(stage, samples, *observers):
    return stage.run(lambda engine: engine.score_all(samples), *observers)


def test_a_sample_is_told_from_its_submission_to_its_outcome(recorder):
    async def main(engine):
        return await engine.score_all([make_sample()]), engine.last_batch()

    (outcome,), report = staged(price={"per_request": 0.5}).run(main, recorder)
    kinds = "SampleSubmitted AttemptStarted AttemptEnded CallEnded SampleEnded BatchEnded EngineClosed"
    assert recorder.kinds == kinds.split()
    submitted, started, attempt, call, ended, batch, _ = recorder.events
    assert submitted == SampleSubmitted(0.0, "sample-0", "test/add")
    assert started == AttemptStarted(0.0, 0, 0, "quality", "a", False, 1)
    assert attempt == AttemptEnded(1.0, 0, 0, "quality", "a", "answered", 1.0, Usage(100, 20), 0.5, False, False, "")
    assert (call.judge, call.source, call.reason, call.waited_s, call.attempts) == ("quality", "a", "", 0.0, 1)
    assert ended == SampleEnded(1.0, "sample-0", "test/add", outcome)
    assert ended.outcome.verdict.raw == outcome.verdict.raw is not None
    assert batch.report == report


def test_what_is_told_adds_up_to_the_statistics(recorder):
    rng = random.Random(5)

    def behaviour(number, request, now):
        drawn = rng.random()
        if drawn < 0.1:
            return TransientError("connection reset")
        if drawn < 0.15:
            return Throttled("slow down", retry_after_s=0.5)
        return 50 * drawn if drawn > 0.9 else drawn

    async def main(engine):
        await engine.score_all(make_samples(200))
        return engine

    stage = staged(hedge=True, price={"per_request": 0.01}, a=behaviour, b=behaviour)
    statistics = stage.run(main, recorder).statistics()
    started, ended = recorder.of(AttemptStarted), recorder.of(AttemptEnded)
    assert sorted(event[1:3] for event in started) == sorted(event[1:3] for event in ended)
    assert len(recorder.of(SampleEnded)) == len(recorder.of(SampleSubmitted)) == statistics.submitted == 200
    assert any(event.hedge for event in started)
    assert {"connection reset", "slow down"} <= {event.detail for event in ended}
    for name, source in statistics.sources.items():
        results = Counter(event.result for event in ended if event.source == name)
        assert source.requests == sum(event.source == name for event in started)
        counts = (source.answered, source.throttled, source.transient, source.cancelled)
        assert counts == tuple(results[name] for name in ("answered", "throttled", "failed", "cancelled"))
        assert source.prompt_tokens == 100 * results["answered"]
        assert source.cost_usd == pytest.approx(0.01 * results["answered"])


def test_a_sample_that_nobody_waits_for_any_more_is_dropped(recorder):
    async def main(engine):
        task = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    staged().run(main, recorder)
    assert [event.sample_id for event in recorder.of(SampleDropped)] == ["sample-0"]
    assert recorder.of(SampleEnded) == []
    assert [event.result for event in recorder.of(AttemptEnded)] == ["cancelled"]


def test_names_and_errors_of_others_are_cut(recorder):
    long = make_sample(id="i" * 5_000, data_source="d" * 5_000)
    scored(staged(a=lambda number, request, now: PermanentError("x" * 50_000)), [long], recorder)
    for event in recorder.of(SampleSubmitted) + recorder.of(SampleEnded):
        assert (len(event.sample_id), len(event.data_source)) == (events.NAME_CHARS, events.NAME_CHARS)
    assert [len(event.detail) for event in recorder.of(AttemptEnded)] == [events.DETAIL_CHARS]


def test_a_source_that_goes_down_and_comes_back_is_told(recorder):
    def behaviour(number, request, now):
        return TransientError("connection refused") if now < 20 else 0.1

    async def main(engine):
        await engine.score_all(make_samples(20))
        await engine.score(make_sample())

    staged(engine={"max_attempts": 50}, a=behaviour).run(main, recorder)
    changes = recorder.of(SourceStateChanged)
    assert [(event.before, event.state) for event in changes] == [("up", "down"), ("down", "up")]
    assert [event.problem for event in changes] == ["a is down (connection refused)", ""]
    assert changes[0].at < 20 <= changes[1].at


def test_closing_is_the_last_event_and_comes_once(recorder):
    async def main(engine):
        waiting = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(1)
        await engine.aclose()
        await engine.aclose()
        return await waiting

    assert staged(a=100.0).run(main, recorder).label == "infra/closed"
    assert recorder.kinds[-1] == "EngineClosed"
    assert len(recorder.of(EngineClosed)) == 1
    assert len(recorder.of(AttemptEnded)) == len(recorder.of(SampleEnded)) == 1


# Observers that break the rules


class Faulty:
    """Raises `error` for every event of `kind`."""

    def __init__(self, kind, error):
        self.kind, self.error, self.calls = kind, error, 0

    def __call__(self, event):
        if type(event).__name__ == self.kind:
            self.calls += 1
            raise self.error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("SampleSubmitted", ValueError("no\nroom")),
        ("EngineClosed", RecursionError()),
    ],
)
def test_an_observer_that_raises_is_cut_off_with_one_warning(recorder, caplog, kind, error):
    faulty = Faulty(kind, error)
    assert scored(staged(), make_samples(20), faulty, recorder) == scored(staged(), make_samples(20))
    assert faulty.calls == 1
    (warning,) = [record for record in caplog.records if record.name == "qreward_plugins.observers"]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"observer Faulty raised {type(error).__name__}")
    assert warning.getMessage().isprintable()
    assert f"({__file__}:" in warning.getMessage()
    assert len(recorder.of(SampleEnded)) == 20  # the other one goes on
    assert recorder.kinds[-1] == "EngineClosed"


def test_an_observer_that_returns_a_coroutine_is_cut_off(caplog):
    async def work(event):
        pass

    scored(staged(), [make_sample()], work)
    gc.collect()
    assert caplog.text.count("returned a coroutine") == 1


def test_what_is_no_observer_is_an_error():
    for observers, said in (
        ([print, 3], r"observers\[1\]: int is no observer"),
        ([Faulty], r"observers\[0\]: Faulty is no observer"),
        (3, r"observers\[0\]: int is no observer"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            RewardEngine(make_config(), observers=observers)
