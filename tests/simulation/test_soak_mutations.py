"""The soak can fail: for each promise, a mutation of the production code breaks it within a few seeds, and the soak
says which. A checker that has never found anything may be blind.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from qreward_plugins.engine import RewardEngine
from qreward_plugins.quotas.quota import Quota, Reservation
from qreward_plugins.scheduling import batches
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.scheduling.batches import Batch
from qreward_plugins.scheduling.dispatcher import Dispatcher
from qreward_plugins.scheduling.planner import Planner
from qreward_plugins.simulation import Server, trial_player
from qreward_plugins.simulation.__main__ import check, soak
from qreward_plugins.simulation.promises import broken_promises
from qreward_plugins.simulation.scenarios import JUDGE
from qreward_plugins.simulation.trial import Call, Step, Trial
from tests.kit import make_samples

from .conftest import replaced, wrapped


async def backwards(score_all, *given, **settings):
    return (await score_all(*given, **settings))[::-1]


def never_wakes(placements, self, now, **given):
    yield from placements(self, now, **given)
    self.wake_at = math.inf


def forgets_a_part(report, *given):
    made = report(*given)
    return replace(made, parts=made.parts[:-1])


def made_with(**settings):
    return wrapped(Dispatcher, "__init__", lambda make, *given, **named: make(*given, **{**named, **settings}))


def uncounted(monkeypatch):
    for name in ("hedges", "soft_hedges"):
        monkeypatch.setattr(Batch, name, property(lambda self: 0, lambda self, value: None), raising=False)


NO_DEADLINE = replaced(Dispatcher, "expire", lambda self, job: None)
ENDLESS = made_with(max_attempts=100)

MUTATIONS = {
    "no deadline": (NO_DEADLINE, "P1", "was due at", 0),
    "no cut-off": (replaced(Batch, "over", lambda self, now: False), "P1", "its batch was to be cut off", 4),
    "out of order": (wrapped(RewardEngine, "score_all", backwards), "P2", "the server gave", 1),
    "no limits": (replaced(Quota, "wait_s", lambda *_, **__: 0.0), "P3", "over its requests", 4),
    "hedges without budget": (uncounted, "P4", "was hedged", 6),
    "nothing given back": (replaced(Reservation, "release", lambda *_, **__: None), "P5", "requests in flight", 0),
    "losers go on": (replaced(Attempt, "cancel", lambda self: None), "P6", "was under way until", 3),
    "nobody wakes up": (wrapped(Planner, "placements", never_wakes), "liveness", "nothing was under way", 1),
    "dice without a seed": (made_with(rng=random.SystemRandom()), "P7", "became", 2),
    "blame forgets a part": (wrapped(batches, "report", forgets_a_part), "blame", "add up to", 0),
}
"""What was done to the code, which promise that breaks, words of the finding, and the first seed to try."""


def finding(promise, words, seeds):
    return next(
        (
            seed
            for seed in seeds
            for broken in check(seed, replay=promise == "P7")[2]
            if broken.promise.startswith(promise) and words in broken.what
        ),
        None,
    )


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_soak_finds(monkeypatch, name):
    mutate, promise, words, first = MUTATIONS[name]
    with monkeypatch.context() as patch:
        mutate(patch)
        seed = finding(promise, words, range(first, first + 15))
    assert seed is not None, f"no seed from {first} on shows it"
    assert finding(promise, words, [seed]) is None, "the code does it without the mutation"


def test_more_attempts_than_configured_are_found(monkeypatch):
    """Few random trials fail so often."""
    server = Server("s0", error_share=0.9, seconds_per_unit=0.01, overhead_s=0.0)
    judge = {**JUDGE, "sources": ["s0"], "invalid_retries": 0, "reward_range": [0, 1], "on_invalid": "missing"}
    engine = {"seed": 0, "deadline_s": 600.0, "max_attempts": 1, "scheduling": {"hedge": False, "prefer": "speed"}}
    config = {"sources": {"s0": server.source()}, "judges": {"j0": judge}, "routes": {}, "engine": engine}
    samples = tuple(make_samples(60, extras={"work": 1.0}))
    trial = Trial(0, (server,), config, (Step(0.0, (Call("batch", samples),)),))
    assert broken_promises(trial, trial_player.play(trial)) == []
    ENDLESS(monkeypatch)
    (broken,) = broken_promises(trial, trial_player.play(trial))
    assert (broken.promise[:2], "requests were sent" in broken.what) == ("P4", True)


def test_a_finding_says_what_happened_and_how_to_see_it_again(monkeypatch):
    NO_DEADLINE(monkeypatch)
    soaked = soak(0, 3)
    seed, said = next(iter(soaked.findings)), soaked.describe()
    assert f"seed {seed} broke P1 one outcome by the deadline: " in said
    assert f"python -m qreward_plugins.simulation --seed {seed}" in said
    assert f"trial {seed}\n  Server(name='s0'" in said
    assert "was due at" in said


def test_a_trial_that_cannot_be_played_is_a_finding(monkeypatch):
    def broken(self, *given, **settings):
        raise RuntimeError("out of order")

    monkeypatch.setattr(RewardEngine, "__init__", broken)
    soaked = soak(0, 2)
    assert list(soaked.findings) == [0, 1]
    assert "RuntimeError('out of order') in broken" in soaked.describe()
