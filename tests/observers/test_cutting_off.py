"""What an observer does never changes an outcome: one that raises or is slow is cut off."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, SampleEnded
from qreward_plugins.observers.base import BUDGET_S, SHARE
from qreward_plugins.scheduling import Batch
from qreward_plugins.simulation import run

from ..kit import make_sample


def outcomes_of(engine, samples):
    async def main():
        async with engine:
            return await engine.score_all(samples)

    return run(main())


class Faulty:
    """Takes `takes_s` of the loop's time for every event of `kind`, and raises `error`."""

    def __init__(self, kind=None, *, error=None, takes_s=0.0):
        self.kind, self.error, self.takes_s = kind, error, takes_s
        self.calls = 0

    def __call__(self, event):
        if self.kind is not None and type(event).__name__ != self.kind:
            return
        self.calls += 1
        asyncio.get_running_loop()._now += self.takes_s
        if self.error is not None:
            raise self.error


KINDS = ["SampleSubmitted", "AttemptStarted", "AttemptEnded", "CallEnded", "SampleEnded", "BatchEnded", "EngineClosed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error", [ValueError("no\nroom"), asyncio.CancelledError(), SystemExit(3), GeneratorExit(), RecursionError()]
)
def test_an_observer_that_raises_is_cut_off_with_one_warning(make_engine, recorder, caplog, kind, error):
    samples = [make_sample(number) for number in range(20)]
    expected = outcomes_of(make_engine(), samples)
    faulty = Faulty(kind, error=error)
    assert outcomes_of(make_engine([faulty, recorder]), samples) == expected
    assert faulty.calls == 1
    (warning,) = [record for record in caplog.records if record.name == "qreward_plugins.observers"]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"observer Faulty raised {type(error).__name__}")
    assert warning.getMessage().isprintable()
    assert f"({__file__}:" in warning.getMessage()
    assert len(recorder.of(SampleEnded)) == 20  # the other one goes on
    assert recorder.kinds[-1] == "EngineClosed"


def test_an_error_that_somebody_keeps_holds_nothing_of_the_scheduler(make_engine):
    error = ValueError("kept")
    outcomes_of(make_engine([Faulty("AttemptEnded", error=error)]), [make_sample()])
    gc.collect()
    assert [each for each in gc.get_objects() if type(each) is Batch] == []
    assert str(error) == "kept"


def test_an_observer_that_is_slow_once_is_cut_off(make_engine, caplog):
    slow = Faulty("AttemptEnded", takes_s=BUDGET_S + 0.01)
    outcomes = outcomes_of(make_engine([slow]), [make_sample(number) for number in range(5)])
    assert all(outcome.reward is not None for outcome in outcomes)
    assert slow.calls == 1
    assert "observer Faulty blocked the event loop: its last call took 0.26 s" in caplog.text


def test_an_observer_that_is_slow_in_total_is_cut_off(make_engine, caplog):
    slow = Faulty("AttemptEnded", takes_s=BUDGET_S / 10)
    outcomes = outcomes_of(make_engine([slow]), [make_sample(number) for number in range(200)])
    assert all(outcome.reward is not None for outcome in outcomes)
    assert 10 <= slow.calls < 20
    assert caplog.text.count("blocked the event loop") == 1


def test_an_observer_that_takes_its_share_of_the_time_stays(make_engine, caplog):
    steady = Faulty("SampleEnded", takes_s=0.9 * SHARE)

    async def main():
        async with make_engine([steady]) as engine:
            for number in range(100):
                await engine.score(make_sample(number))  # one a second

    run(main())
    assert steady.calls == 100
    assert "blocked" not in caplog.text


@pytest.mark.filterwarnings("error")
def test_an_observer_that_returns_a_coroutine_is_cut_off(make_engine, caplog):
    async def work():
        pass

    outcomes_of(make_engine([lambda event: work()]), [make_sample()])
    gc.collect()
    assert caplog.text.count("returned a coroutine") == 1


def test_nothing_of_an_observer_is_left_when_the_engine_is_closed(make_engine):
    class Seen(list):
        def __call__(self, event):
            self.append(type(event).__name__)

    seen = Seen()
    gone = weakref.ref(seen)
    engine = make_engine([seen])
    outcomes_of(engine, [make_sample()])
    assert seen[-1] == "EngineClosed"
    del seen
    gc.collect()
    assert gone() is None
    assert engine.statistics().scored == 1


def test_two_observers_of_one_engine_see_the_same(make_engine):
    first, second = [], []
    outcomes_of(make_engine([first.append, second.append]), [make_sample()])
    assert first == second != []


async def coroutine(event):
    pass


def generator(event):
    yield event


class Asynchronous:
    async def __call__(self, event):
        pass


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (3, "an object of type int cannot be called"),
        (None, "an object of type NoneType cannot be called"),
        (Faulty, "the class Faulty is no observer; pass an object of it"),
        (coroutine, "coroutine is asynchronous or a generator"),
        (generator, "generator is asynchronous or a generator"),
        (Asynchronous(), "Asynchronous is asynchronous or a generator"),
    ],
)
def test_what_is_no_observer_is_an_error(wrong, said):
    tree = {
        "sources": {"a": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"}},
        "judges": {"quality": {"kind": "llm"}},
    }
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine(tree, observers=[print, wrong])
    assert f"observers[1]: {said}" in str(caught.value)
