"""The soak can fail: each mutation of the production code breaks a promise within a few seeds, and the soak says which.

A checker that has never found anything may be blind. Every mutation here is a mistake that somebody could make.
"""

from __future__ import annotations

import asyncio
import math
import random
from dataclasses import replace

import pytest

from qreward_plugins.engine import RewardEngine
from qreward_plugins.engine.scoring import Scoring
from qreward_plugins.errors import InvalidReply
from qreward_plugins.judges.llm import LLMJudge
from qreward_plugins.observers import SampleEnded
from qreward_plugins.quotas.pace import Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.quotas.reservation import Reservation
from qreward_plugins.quotas.window_limit import WindowLimit
from qreward_plugins.samples import Scored, Verdict
from qreward_plugins.scheduling import batches
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.scheduling.batches import Batch
from qreward_plugins.scheduling.calls import Answer
from qreward_plugins.scheduling.dispatcher import Dispatcher
from qreward_plugins.scheduling.planner import Planner
from qreward_plugins.scheduling.timers import Alarms
from qreward_plugins.simulation import Server, trial_player
from qreward_plugins.simulation.__main__ import check, soak
from qreward_plugins.simulation.promises import broken_promises
from qreward_plugins.simulation.scenarios import JUDGE
from qreward_plugins.simulation.trial import Call, Step, Trial
from tests.kit import make_samples

from .conftest import replaced, several, wrapped


def quota_without(part):
    name, unlimited = ("concurrency", math.inf) if part == "concurrency" else (f"_{part}", WindowLimit(part))

    def wait_s(original, self, *given, **named):
        kept = getattr(self, name)
        setattr(self, name, unlimited)
        try:
            return original(self, *given, **named)
        finally:
            setattr(self, name, kept)

    return wrapped(Quota, "wait_s", wait_s)


async def backwards(score_all, *given, **settings):
    return (await score_all(*given, **settings))[::-1]


def counts_twice(emit, self, event, *told):
    for _ in range(1 + (event is SampleEnded)):
        emit(self, event, *told)


def loses_one_in_ten(finish, self, job, outcome, now):
    if not isinstance(outcome, Answer) or job.sequence % 10:
        finish(self, job, outcome, now)


def defaults(verdict, *given):
    try:
        return verdict(*given)
    except InvalidReply:
        return Verdict(0.5)


def thinks_again(emit, self, event, sample, *told):
    emit(self, event, sample, *told)
    if event is SampleEnded and isinstance(told[0], Scored):
        loop = asyncio.get_running_loop()
        loop.call_later(0.5, object.__setattr__, told[0].verdict, "rationale", "on second thoughts")


def wakes_at(moment):
    def placements(original, self, now, **given):
        yield from original(self, now, **given)
        self.wake_at = now if moment is None else moment

    return wrapped(Planner, "placements", placements)


async def does_nothing(self):
    await asyncio.sleep(0)


def forgets_a_part(report, *given):
    made = report(*given)
    return replace(made, parts=made.parts[:-1])


def made_with(**settings):
    return wrapped(Dispatcher, "__init__", lambda make, *given, **named: make(*given, **{**named, **settings}))


def regardless_of_quorum(batch, now):
    return batch.cutoff is not None and now >= batch.started_at + batch.cutoff.after_s


def uncounted(monkeypatch):
    for name in ("hedges", "soft_hedges"):
        monkeypatch.setattr(Batch, name, property(lambda self: 0, lambda self, value: None), raising=False)


CLOSES_NOTHING = several(replaced(Dispatcher, "close", lambda self: None), replaced(Dispatcher, "aclose", does_nothing))
BUSY = several(wakes_at(None), replaced(trial_player, "MOST_STEPS", 20_000))
NO_DEADLINE = replaced(Dispatcher, "expire", lambda self, job: None)
ENDLESS = made_with(max_attempts=100)

MUTATIONS = {
    "no deadline": (NO_DEADLINE, "P1", "was due at", 0),
    "no cut-off": (replaced(Batch, "over", lambda self, now: False), "P1", "its batch was to be cut off", 4),
    "cut-off without quorum": (replaced(Batch, "over", regardless_of_quorum), "P1", "before its batch's quorum", 3),
    "an outcome twice": (wrapped(Scoring, "emit", counts_twice), "P1", "there are more outcomes", 1),
    "out of order": (wrapped(RewardEngine, "score_all", backwards), "P2", "the server gave", 1),
    "a default for nonsense": (wrapped(LLMJudge, "verdict", defaults), "P2", "the server gave", 7),
    "no limit of requests": (quota_without("requests"), "P3", "over its requests", 4),
    "no limit of tokens": (quota_without("tokens"), "P3", "over its tokens", 20),
    "no concurrency": (quota_without("concurrency"), "P3", "requests were in flight", 0),
    "no pace": (replaced(Pace, "wait_s", lambda self, now, held: 0.0), "P3", "was overdrawn", 1),
    "hedges without budget": (uncounted, "P4", "was hedged", 6),
    "nothing given back": (replaced(Reservation, "release", lambda *_, **__: None), "P5", "requests in flight", 0),
    "timers stay": (replaced(Alarms, "clear", lambda self: None), "P5", "a timer of", 0),
    "closing does nothing": (CLOSES_NOTHING, "P5", "after closing", 3),
    "losers go on": (replaced(Attempt, "cancel", lambda self: None), "P6", "was under way until", 3),
    "an outcome changes": (wrapped(Scoring, "emit", thinks_again), "P6", "has become", 0),
    "an outcome is lost": (wrapped(Dispatcher, "finish", loses_one_in_ten), "P6", "gave", 0),
    "nobody wakes up": (wakes_at(math.inf), "liveness", "nothing was under way", 1),
    "a busy loop": (BUSY, "liveness", "busy loop", 0),
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
