"""Answers that count more than once: those of a journal, for a second run (P10), and those of equal questions that are
under way at the same time.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import PermanentError
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import ServedWeights
from qreward_plugins.testing import JudgeServer
from tests.kit import MemoryJournal, Stage, make_config, make_sample, make_samples, scored_text

pytestmark = pytest.mark.anyio

SAMPLE = Sample([{"role": "user", "content": "2+2?"}], "4", ground_truth="4", data_source="math", id="a")


async def scored(config: dict[str, Any], samples: list[Sample]) -> list[Any]:
    async with RewardEngine(config) as engine:
        return list(await engine.score_all(samples))


@pytest.fixture
def journal(tmp_path: Path) -> dict[str, Any]:
    return {"journal": {"path": str(tmp_path / "verdicts.sqlite")}}


def llm(server: Any, engine: dict[str, Any], *, top: dict[str, Any] | None = None, **judge: Any) -> dict[str, Any]:
    tree = make_config({"a": server}, judge=judge, engine=engine)
    return {**tree, "judges": {**tree["judges"], **(top or {})}}


async def test_what_becomes_of_a_score_is_changed_without_paying_for_it_again(journal: dict[str, Any]) -> None:
    with JudgeServer(lambda call: 8.0) as server:
        first = await scored(llm(server, journal), [SAMPLE])
        assert (first[0].verdict.score, first[0].verdict.correct) == (0.8, None)
        changes: list[tuple[dict[str, Any], float, bool | None]] = [
            ({"reward_range": [-1, 1]}, 0.6, None),
            ({"reward_range": [0, 100], "correct_at": 90}, 80.0, False),
            ({"correct_at": 0.5}, 0.8, True),
            ({"floor": 0.2, "on_invalid": "floor", "invalid_retries": 3}, 0.8, None),
            ({"top": {"total": {"kind": "sum", "weights": {"quality": -2}}}}, -1.6, None),
        ]
        for change, reward, correct in changes:
            (outcome,) = await scored(llm(server, journal, **change), [SAMPLE])
            assert outcome.reward == pytest.approx(reward)
            assert (outcome.verdict.correct, outcome.verdict.cached) == (correct, True)
        assert server.report().requests == 1
        await scored(llm(server, journal, score_range=[0, 9]), [SAMPLE])
        assert server.report().requests == 2


async def test_one_more_source_costs_nothing_and_one_less_only_what_it_said(journal: dict[str, Any]) -> None:
    with JudgeServer(lambda call: 8.0) as one, JudgeServer(lambda call: 4.0) as two:
        config = llm(one, journal)
        await scored(config, [SAMPLE])
        both = llm(one, journal)
        both["sources"]["b"] = llm(two, journal)["sources"]["a"]
        (outcome,) = await scored(both, [SAMPLE])
        assert (outcome.verdict.cached, outcome.verdict.source) == (True, "a")
        (outcome,) = await scored({**both, "sources": {"b": both["sources"]["b"]}}, [SAMPLE])
        assert (outcome.verdict.cached, outcome.reward) == (False, 0.4)
        assert (one.report().requests, two.report().requests) == (1, 1)


# Equal questions that are under way at the same time


ONCE = {"ask_once": True}


def equal(count, **fields):
    return [make_sample(0, **{"id": str(number), **fields}) for number in range(count)]


def staged(behaviour=1.0, **engine):
    return Stage({"a": behaviour}, tree=make_config(["a"], engine={**ONCE, **engine}))


def test_eight_equal_questions_are_one_call_and_counted():
    stage = staged()
    played = stage.play([*equal(8), *make_samples(3)[1:]])
    assert played.all_scored
    assert (len(stage.sent), played.statistics.merged) == (3, 7)
    assert {outcome.reward for outcome in played.outcomes[:8]} == {played.outcomes[0].reward}
    assert sum(outcome.verdict.cost_usd + outcome.verdict.attempts for outcome in played.outcomes) == 3


def test_a_source_of_ones_own_that_states_its_weights_is_recorded():
    weights = ServedWeights("step-1")
    stage = Stage(answer=lambda request: replace(scored_text(request), weights=weights), journal=MemoryJournal())
    assert [stage.play(make_samples(2)).all_scored for _ in range(2)] == [True, True]
    assert (len(stage.sent), len(stage.journal.verdicts)) == (2, 2)


def test_an_answer_is_that_of_the_judge_that_asks():
    tree = make_config(["a"], engine=ONCE)
    tree["judges"]["strict"] = {"kind": "llm", "reward_range": [-1, 1]}
    tree["judges"]["whole"] = {"kind": "sum", "weights": {"quality": 1, "strict": 1}}
    stage = Stage(tree=tree)
    assert stage.play(equal(3)).rewards == [0.5, 0.5, 0.5]
    assert len(stage.sent) == 2


@pytest.mark.parametrize("engine", [{}, {"ask_once": False}])
def test_without_a_journal_it_has_to_be_asked_for(engine):
    stage = Stage(tree=make_config(["a"], engine=engine))
    assert stage.play(equal(8)).all_scored
    assert len(stage.sent) == 8


def test_if_the_first_fails_the_others_ask_for_themselves():
    stage = staged(
        lambda number, request, now: PermanentError("no", status=403) if number == 0 else 1.0, max_attempts=1
    )
    played = stage.play(equal(4))
    assert [outcome.reward is None for outcome in played.outcomes].count(True) == 1
    assert len(stage.sent) == 4


def test_cancelling_the_first_fails_nobody_who_waits_for_it():
    async def main(engine):
        first, *others = await engine.score_each(equal(4))
        await asyncio.sleep(0.5)
        first.cancel()
        return [(await each).reward for each in others]

    stage = staged()
    assert stage.run(main) == [0.5] * 3
    assert len(stage.sent) == 2


def test_who_waits_for_another_keeps_its_own_deadline_and_priority():
    async def main(engine):
        loop = asyncio.get_running_loop()
        slow = asyncio.ensure_future(engine.score(equal(1)[0]))
        await asyncio.sleep(1.0)
        assert (await engine.score(equal(1)[0], deadline_s=2.0)).detail.endswith(
            "an equal call, which was asked first, has not been answered"
        )
        assert loop.time() == pytest.approx(3.0)
        assert (await engine.score(equal(1)[0], priority=5)).reward == 0.5
        assert loop.time() == pytest.approx(4.0)
        await slow

    stage = staged(lambda number, request, now: 15.0 if number == 0 else 1.0, scheduling={"hedge": False})
    stage.run(main)
    assert len(stage.sent) == 2


def test_with_a_journal_that_reuses_answers_it_is_on_and_each_sample_has_its_row(tmp_path):
    tree = make_config(["a"], engine={"journal": {"path": str(tmp_path / "journal.sqlite")}})
    sent = []

    async def main(samples):
        source = SimulatedSource("a", behaviour=lambda *each: sent.append(each) or 0.05, answer=scored_text)
        async with RewardEngine(tree, sources={"a": source}) as engine:
            outcomes = await engine.score_all(samples)
            return [outcome.reward for outcome in outcomes], engine.statistics()

    rewards, statistics = asyncio.run(main(equal(8)))
    assert (rewards, len(sent), statistics.merged) == ([0.5] * 8, 1, 7)
    rewards, statistics = asyncio.run(main(equal(8)))
    assert (rewards, len(sent), statistics.cached) == ([0.5] * 8, 1, 8)
