"""What an observer does never changes an outcome: one that raises is cut off."""

from __future__ import annotations

import asyncio
import gc

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, SampleEnded
from qreward_plugins.simulation import run

from ..kit import make_config, make_sample


def outcomes_of(engine, samples):
    async def main():
        async with engine:
            return await engine.score_all(samples)

    return run(main())


class Faulty:
    """Raises `error` for every event of `kind`."""

    def __init__(self, kind, error):
        self.kind, self.error = kind, error
        self.calls = 0

    def __call__(self, event):
        if type(event).__name__ == self.kind:
            self.calls += 1
            raise self.error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("SampleSubmitted", ValueError("no\nroom")),
        ("AttemptStarted", asyncio.CancelledError()),
        ("AttemptEnded", SystemExit(3)),
        ("SampleEnded", GeneratorExit()),
        ("EngineClosed", RecursionError()),
    ],
)
def test_an_observer_that_raises_is_cut_off_with_one_warning(make_engine, recorder, caplog, kind, error):
    samples = [make_sample(number) for number in range(20)]
    expected = outcomes_of(make_engine(), samples)
    faulty = Faulty(kind, error)
    assert outcomes_of(make_engine([faulty, recorder]), samples) == expected
    assert faulty.calls == 1
    (warning,) = [record for record in caplog.records if record.name == "qreward_plugins.observers"]
    assert warning.levelname == "WARNING"
    assert warning.getMessage().startswith(f"observer Faulty raised {type(error).__name__}")
    assert warning.getMessage().isprintable()
    assert f"({__file__}:" in warning.getMessage()
    assert len(recorder.of(SampleEnded)) == 20  # the other one goes on
    assert recorder.kinds[-1] == "EngineClosed"


@pytest.mark.filterwarnings("error")
def test_an_observer_that_returns_a_coroutine_is_cut_off(make_engine, caplog):
    async def work():
        pass

    outcomes_of(make_engine([lambda event: work()]), [make_sample()])
    gc.collect()
    assert caplog.text.count("returned a coroutine") == 1


def test_what_is_no_observer_is_an_error():
    with pytest.raises(ConfigurationError, match=r"observers\[1\]: an object of type int cannot be called"):
        RewardEngine(make_config(), observers=[print, 3])
    with pytest.raises(ConfigurationError, match=r"observers\[0\]: Faulty is a class"):
        RewardEngine(make_config(), observers=[Faulty])
