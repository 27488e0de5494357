"""Samples that several judges score: one outcome, one count, and nothing left behind."""

from __future__ import annotations

import asyncio
import json

import pytest

from qreward_plugins import Cause, Failed
from qreward_plugins.errors import PermanentError
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import Reply

from ..kit import NEVER_S, MemoryJournal, Stage, make_sample, make_samples, now, takes


def tree(*, weights=None, total=None, **top):
    """Two judges, `words` of the source `llm` and `rules` of the source `rm`, and their sum."""
    return {
        "sources": {
            "llm": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"},
            "rm": {"kind": "function", "function": "rewards:score"},
        },
        "judges": {
            "words": {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0},
            "rules": {"kind": "function", "invalid_retries": 0},
            "total": {"kind": "sum", "weights": weights or {"words": 0.75, "rules": 0.25}, **(total or {})},
        },
        "engine": {"seed": 7},
        **top,
    }


def written(request):
    return Reply(text=json.dumps({"id": request.nonce, "rationale": "so", "score": 0.5}))


def simulated(*, llm=None, rm=None):
    return {
        "llm": SimulatedSource("llm", behaviour=llm or takes(2.0), answer=written, model="m"),
        "rm": SimulatedSource(
            "rm", behaviour=rm or takes(1.0), answer=lambda request: Reply(value=1.0), model="rewards:score"
        ),
    }


def engine_run(config, sources, main, *, journal=None):
    return Stage(sources, tree=config, journal=journal).run(main)


# The sum


def test_the_parts_are_asked_at_the_same_time_and_added():
    async def main(engine):
        return await engine.score(make_sample(id="s")), now(), engine.statistics(), engine.facts()

    sources = simulated()
    outcome, at, statistics, facts = engine_run(tree(total={"correct_at": 0.6}), sources, main)
    verdict = outcome.verdict
    assert (outcome.reward, verdict.correct, verdict.judge, verdict.attempts) == (0.625, True, "total", 2)
    assert (verdict.source, verdict.model, verdict.rationale) == ("llm+rm", "m+rewards:score", "words: so")
    assert verdict.components == {"words": 0.5, "rules": 1.0}
    assert (at, verdict.latency_s) == (2.0, 2.0)
    assert [len(source.arrivals) for source in sources.values()] == [1, 1]
    assert (statistics.submitted, statistics.scored, statistics.attempts) == (1, 1, 2)
    told = facts.of(outcome)
    assert (told["score/words"], told["score/rules"], told["acc"], told["source"]) == (0.5, 1.0, 1.0, "llm+rm")
    failed = facts.of(Failed(Cause.INFRA, "deadline"))
    assert list(failed) == list(told)


# Failures


@pytest.mark.parametrize("journal", [None, MemoryJournal])
def test_a_part_that_fails_ends_the_sample_and_cancels_the_other(journal, caplog):
    sources = simulated(llm=lambda *_: NEVER_S, rm=lambda *_: PermanentError("not my data"))
    book = journal and journal()

    async def main(engine):
        outcome = await engine.score(make_sample(), deadline_s=60.0)
        at = now()
        await asyncio.sleep(1)
        return outcome, at, sources["llm"].in_flight, engine.statistics(), engine.last_batch()

    outcome, at, in_flight, statistics, report = engine_run(tree(), sources, main, journal=book)
    assert (outcome.cause, outcome.reason, outcome.reward, outcome.judge) == (Cause.INFRA, "no_source", None, "total")
    assert outcome.detail == "rules: not my data"
    assert at < 0.1
    assert (in_flight, sources["llm"].cancelled) == (0, 1)
    assert (statistics.submitted, statistics.failed, statistics.waiting) == (1, {"infra/no_source": 1}, 0)
    assert (report.samples, report.scored, report.failed) == (1, 0, 1)
    assert "rules: not my data" in caplog.text
    if book is not None:
        assert [(one.judge, one.reward, one.attempts) for one in book.outcomes][1:] == [("total", None, 0)]
        assert book.outcomes[0].judge == "rules"


# Time


def test_a_call_that_is_cancelled_at_once_leaves_nothing():
    sources = simulated()

    async def main(engine):
        for steps in range(12):
            task = asyncio.ensure_future(engine.score(make_sample()))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.5)
            assert [source.in_flight for source in sources.values()] == [0, 0]
            assert engine.statistics().waiting == 0
            assert asyncio.all_tasks() == {asyncio.current_task()}

    for config in (tree(), tree(routes={"*": "words"})):
        engine_run(config, sources, main, journal=MemoryJournal(seconds=0))
        engine_run(config, sources, main)


# Batches


# The journal


def test_every_part_is_on_record_by_itself_and_other_weights_cost_nothing():
    book = MemoryJournal()

    async def main(engine):
        return await engine.score_all(make_samples(3)), engine.statistics()

    first = simulated()
    engine_run(tree(), first, main, journal=book)
    recorded = [(outcome.verdict.judge, outcome.verdict.attempts) for outcome in book.outcomes]
    assert sorted(recorded) == [("rules", 1)] * 3 + [("total", 0)] * 3 + [("words", 1)] * 3
    for config, reward in ((tree(weights={"words": 0.5, "rules": -2.0}), -1.75), (tree(routes={"*": "words"}), 0.5)):
        again = simulated()
        outcomes, statistics = engine_run(config, again, main, journal=book)
        assert {outcome.reward for outcome in outcomes} == {reward}
        assert all(outcome.verdict.cached and outcome.verdict.attempts == 0 for outcome in outcomes)
        assert [source.arrivals for source in again.values()] == [[], []]
        assert (statistics.scored, statistics.cached) == (3, 3)
