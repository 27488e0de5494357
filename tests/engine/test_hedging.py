"""Hedges: when a second attempt is started, where, how many of them, and what becomes of the one that loses."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import Scored, TransientError
from qreward_plugins.scheduling.hedging import LEAST_HEDGES, OVERDUE_AT, SOFT_AT
from qreward_plugins.scheduling.jobs import MAX_HEDGES
from qreward_plugins.simulation import SimulatedSource

from ..kit import Stage, make_config, make_sample, make_samples, scored_text, takes
from ..kit.stage import NEVER_S

USUAL_S = 2.0


class Hedged:
    """Sources known to take `USUAL_S`; `straggler(name, sample, now)` says what takes how long instead."""

    def __init__(self, straggler=lambda name, sample, now: None, *, names="ab", places=4, budget=0.25, **options):
        def behaviour(name):
            def takes(number, request, now):
                special = straggler(name, request.sample.id, now) if self.known else None
                return USUAL_S if special is None else special

            return takes

        self.known = False
        self.began = 0.0
        scheduling = {"hedge_budget": budget, **options}
        self.stage = Stage(
            {name: behaviour(name) for name in names},
            options={
                "engine": {"deadline_s": 900.0, "scheduling": scheduling},
                "limits": {name: {"concurrency": places} for name in names},
                "total_s": 300,
            },
        )

    def play(self, count):
        """Score a batch after the sources are known. Return its outcomes, its seconds and its number of hedges."""

        async def main(engine):
            await engine.score_all(make_samples(24))
            await asyncio.sleep(10.0)
            del self.stage.sent[:]
            self.known, self.began = True, asyncio.get_running_loop().time()
            outcomes = await engine.score_all([make_sample(100 + number) for number in range(count)])
            return outcomes, asyncio.get_running_loop().time() - self.began, engine.last_batch().hedges

        return self.stage.run(main)

    def attempts(self, number):
        """(source, seconds since the batch began) of the attempts of a sample."""
        return [(each.source, each.at - self.began) for each in self.stage.sent if each.id == f"sample-{number}"]


def once(*numbers, seconds):
    """The first attempt of each of these samples takes so long."""
    seen = set()

    def straggler(name, sample, now):
        number = int(sample.removeprefix("sample-"))
        if number in numbers and number not in seen:
            seen.add(number)
            return seconds
        return None

    return straggler


def test_where_nothing_waits_an_attempt_is_hedged_elsewhere_before_it_is_overdue():
    hedged = Hedged(once(100, seconds=50.0))
    (outcome,), took_s, hedges = hedged.play(1)
    (first, _), (second, at) = hedged.attempts(100)
    assert first != second
    assert SOFT_AT * USUAL_S <= at < OVERDUE_AT * USUAL_S
    assert took_s == pytest.approx(at + USUAL_S)
    assert (hedges, outcome.verdict.attempts) == (1, 2)
    cancelled = hedged.stage.simulated[first].cancelled
    assert cancelled == 1  # the loser


def test_while_samples_wait_only_what_is_overdue_is_hedged():
    hedged = Hedged(once(100, seconds=200.0))
    outcomes, took_s, hedges = hedged.play(45)
    (_, began), (_, at) = hedged.attempts(100)
    assert at - began >= OVERDUE_AT * USUAL_S
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert took_s < 16.0
    assert 1 <= hedges <= 4


def test_the_only_source_is_asked_again_when_an_attempt_hangs():
    _, took_s, hedges = Hedged(once(100, seconds=NEVER_S), names="a").play(3)
    assert took_s < 20.0
    assert hedges == 1


def test_a_hedge_that_fails_does_not_end_the_attempt_beside_it():
    seen = []

    def straggler(name, sample, now):
        seen.append(name)
        return 9.0 if len(seen) == 1 else TransientError("503")

    hedged = Hedged(straggler)
    hedged.stage.options["engine"]["max_attempts"] = 1
    (outcome,), took_s, _ = hedged.play(1)
    assert isinstance(outcome, Scored)
    assert took_s == pytest.approx(9.0)
    assert 1 < len(seen) <= 1 + MAX_HEDGES


def test_the_budget_of_a_batch_and_of_a_sample_is_kept():
    for budget in (0.1, 0.5):
        hedged = Hedged(lambda name, sample, now: NEVER_S if int(sample[7:]) % 2 else None, budget=budget, places=100)
        _, _, hedges = hedged.play(100)
        assert 4 <= hedges <= max(LEAST_HEDGES, budget * 100)
    hedged = Hedged(lambda name, sample, now: NEVER_S if sample == "sample-100" else None, names="abcdefgh")
    _, _, hedges = hedged.play(1)
    assert 1 <= hedges <= MAX_HEDGES


def test_a_fast_function_does_not_make_a_model_look_slow():
    """A rule answers in a millisecond; that says nothing of a model that has not answered yet."""
    tree = make_config(["rule", "model"], total_s=120, limits={"model": {"concurrency": 256}})
    tree["judges"] = {
        "right": {"kind": "llm", "sources": "rule"},
        "quality": {"kind": "llm", "sources": "model"},
        "reward": {"kind": "gate", "when": "right", "at_least": 0.5, "then": "quality"},
    }
    rule = SimulatedSource("rule", behaviour=takes(0.001), answer=scored_text, model="m", local=True)
    stage = Stage({"rule": rule, "model": 4.0}, tree={**tree, "routes": {"*": "reward"}})
    assert stage.play(make_samples(64)).all_scored
    assert stage.sent_by_source == {"rule": 64, "model": 64}
