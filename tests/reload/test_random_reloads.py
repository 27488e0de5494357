"""Random reloads at random times while samples are scored: every promise holds over them."""

from __future__ import annotations

import asyncio
import os
import random

import pytest
from reload_stage import Stage, sample, tree

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.simulation import run

SEEDS = range(int(os.environ.get("RELOAD_SEEDS", "12")))
NAMES = ("a", "b", "c")
SAMPLES = 60


def drawn(rng):
    """A random configuration, and its limits by source."""
    names = [name for name in NAMES if rng.random() < 0.6] or [rng.choice(NAMES)]
    limits = {
        name: {"requests_per_minute": rng.randint(5, 60), "concurrency": rng.randint(1, 16), "window": "sliding"}
        for name in names
    }
    judge = {"reward_range": [0, rng.choice([1, 10, 100])]}
    engine = {"deadline_s": 3_000, "scheduling": {"hedge": rng.random() < 0.7}}
    return tree(*names, limits=limits, judge=judge, engine=engine), limits


def play(seed):
    """Score a batch while reloads come. Returns the outcomes, what was sent, and which limits broke."""
    rng = random.Random(seed)
    stage = Stage(**{name: rng.choice([0.3, 1.0, 4.0, 15.0]) for name in NAMES})
    config, in_force = drawn(rng)
    broken, ranges = [], [config["judges"]["quality"]["reward_range"][1]]

    def watch(name, before):
        def behave(number, request, now):
            limit = in_force.get(name)
            sent = 1 + sum(now - 60 < at for at in stage.times(name))
            if limit is None:
                broken.append((now, name, "was removed"))
            elif sent > limit["requests_per_minute"]:
                broken.append((now, name, f"{sent} in a window of {limit['requests_per_minute']}"))
            elif stage.sources[name].in_flight > limit["concurrency"]:
                broken.append((now, name, f"{stage.sources[name].in_flight} at once of {limit['concurrency']}"))
            return before(number, request, now)

        return behave

    for name in NAMES:
        stage.sources[name].behaviour = watch(name, stage._behaviour(name, rng.choice([0.3, 1.0, 4.0, 15.0])))

    async def main():
        nonlocal in_force
        async with RewardEngine(config, sources=stage.sources) as engine:
            scoring = asyncio.ensure_future(engine.score_all([sample(n) for n in range(SAMPLES)]))
            for _ in range(rng.randint(1, 6)):
                await asyncio.sleep(rng.expovariate(1 / 20))
                other, in_force = drawn(rng)
                await engine.reload(other)
                ranges.append(other["judges"]["quality"]["reward_range"][1])
            outcomes = await scoring
        assert {source.in_flight for source in stage.sources.values()} == {0}
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes

    return run(main()), stage.sent, broken, ranges


@pytest.mark.parametrize("seed", SEEDS)
def test_no_reload_breaks_a_promise(seed):
    outcomes, sent, broken, ranges = play(seed)
    assert broken == []
    assert len(outcomes) == SAMPLES
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert all(0 <= outcome.reward <= ranges[0] for outcome in outcomes)  # the judge that they began with
    assert SAMPLES <= len(sent) <= 1.5 * SAMPLES


def test_the_same_seed_gives_the_same_schedule():
    assert play(1)[1] == play(1)[1]
