"""Batches from the outside: priorities, cut-offs, what the last one waited for, and how scheduling is configured."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from qreward_plugins import Cause, ConfigurationError, RewardEngine, Scored
from qreward_plugins.config import load_config
from qreward_plugins.scheduling import Cutoff
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import Reply

from ..kit import MemoryJournal, Stage, make_sample, make_samples, now

LOGGER = "qreward_plugins.scheduling"


def tree(names="a", *, limits=None, scheduling=None, nodes=None, **engine):
    """A configuration of functions that score; simulated sources take their places."""
    sources = {
        name: {"kind": "function", "function": "rewards:score", "limits": (limits or {}), **(nodes or {}).get(name, {})}
        for name in names
    }
    if scheduling is not None:
        engine["scheduling"] = scheduling
    return {"sources": sources, "judges": {"right": {"kind": "function"}}, "engine": {"seed": 7, **engine}}


def simulated(names="a", behaviour=lambda number, request, now: 1.0):
    return {name: SimulatedSource(name, behaviour=behaviour, answer=lambda request: Reply(value=0.5)) for name in names}


def engine_run(config, sources, main, *, journal=None):
    return Stage(sources, tree=config, journal=journal).run(main)


def hangs_for(response, seconds=1.0):
    return lambda number, request, now: 1e6 if request.sample.response == response else seconds


# The last batch


def test_the_last_batch_says_what_it_waited_for(caplog):
    async def main(engine):
        assert engine.last_batch() is None
        await engine.score_all(make_samples(8))
        return engine.last_batch()

    with caplog.at_level(logging.INFO, logger=LOGGER):
        report = engine_run(tree(limits={"concurrency": 2}), simulated(), main)
    assert (report.samples, report.scored, report.failed, report.attempts) == (8, 8, 0, 8)
    assert report.makespan_s == 4.0
    assert sum(part.seconds for part in report.parts) == pytest.approx(4.0)
    assert report.seconds()["queue"] == pytest.approx(3.0)
    lines = [record for record in caplog.records if record.message == report.describe()]
    assert [(record.levelno, record.name) for record in lines] == [(logging.INFO, LOGGER)]
    assert report.describe().startswith("8 samples in 4.0 s; waited 4.0 s on a: 3.0 queue, 1.0 service")


def test_samples_that_are_scored_one_by_one_are_one_batch_while_they_overlap():
    async def main(engine):
        scoring = []
        for response in ("a", "b", "c"):
            scoring.append(asyncio.ensure_future(engine.score(make_sample(response=response))))
            await asyncio.sleep(0.5)
        await asyncio.gather(*scoring)
        together = engine.last_batch()
        await asyncio.sleep(100)
        await engine.score(make_sample())
        return together, engine.last_batch()

    together, alone = engine_run(tree(), simulated(), main)
    assert (together.samples, together.makespan_s) == (3, pytest.approx(2.0))
    assert (alone.samples, alone.makespan_s) == (1, pytest.approx(1.0))


def test_a_batch_of_which_nothing_was_asked_is_no_batch():
    async def main(engine):
        assert await engine.score_all([]) == []
        outcomes = await engine.score_all(make_samples(2, data_source="code"))
        assert [outcome.reason for outcome in outcomes] == ["no_route"] * 2
        await engine.score(make_sample(data_source="code"))
        await asyncio.sleep(0)
        return engine.last_batch()

    assert engine_run({**tree(), "routes": {"math": "right"}}, simulated(), main) is None


# Priorities


@pytest.mark.parametrize("journal", [False, True])
def test_one_sample_may_go_before_a_batch(journal):
    async def main(engine):
        batch = asyncio.ensure_future(engine.score_all(make_samples(10)))
        await asyncio.sleep(0.5)
        await engine.score(make_sample(response="urgent"), priority=1)
        at = now()
        await batch
        return at

    if journal:
        at = remembering_run(simulated(), main, limits={"concurrency": 1})
    else:
        at = engine_run(tree(limits={"concurrency": 1}), simulated(), main)
    assert at == pytest.approx(2.0, abs=0.05)


# The cut-off


def test_a_batch_is_cut_off_and_its_outcomes_keep_their_order():
    batch = [make_sample(response="good" if number % 3 else "hangs", group_id=f"g{number % 2}") for number in range(12)]

    async def main(engine):
        outcomes = await engine.score_all(batch, cutoff=Cutoff(5.0, quorum=0.5))
        return outcomes, now(), engine.last_batch()

    outcomes, at, report = engine_run(tree(), simulated(behaviour=hangs_for("hangs")), main)
    assert at == 5.0
    for each, outcome in zip(batch, outcomes, strict=True):
        if each.response == "hangs":
            assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.INFRA, "cutoff", None)
        else:
            assert isinstance(outcome, Scored)
    assert (report.scored, report.failed, report.makespan_s) == (8, 4, 5.0)


def test_a_group_that_is_not_in_is_waited_for():
    batch = [make_sample(response="good", group_id="g0") for _ in range(9)] + [
        make_sample(response="hangs", group_id="g1")
    ]

    async def main(engine):
        outcomes = await engine.score_all(batch, cutoff=Cutoff(5.0, quorum=0.5), deadline_s=20.0)
        return outcomes[-1].reason, now()

    assert engine_run(tree(), simulated(behaviour=hangs_for("hangs")), main) == ("deadline", 20.0)


def test_samples_that_were_never_asked_for_are_in_or_not_waited_for():
    # An empty response has its reward without being asked for; nobody judges code.
    config = {
        "sources": {"a": {"kind": "openai", "base_url": "http://localhost/v1", "model": "judge"}},
        "judges": {"words": {"kind": "llm"}},
        "routes": {"math": "words"},
        "engine": {"seed": 7},
    }
    batch = [
        *(make_sample(response="good", data_source="math", group_id="g") for _ in range(7)),
        make_sample(response="", data_source="math", group_id="g"),
        make_sample(response="good", data_source="code", group_id="g"),
        make_sample(response="hangs", data_source="math", group_id="g"),
    ]
    sources = simulated(behaviour=hangs_for("hangs"))
    sources["a"].answer = lambda request: Reply(text=json.dumps({"id": request.nonce, "score": 5, "rationale": ""}))

    async def main(engine):
        # Eight of the nine that may have a reward.
        outcomes = await engine.score_all(batch, cutoff=Cutoff(5.0, quorum=0.85), deadline_s=60.0)
        return [outcome.failure.reason if outcome.failure else "scored" for outcome in outcomes], now()

    reasons, at = engine_run(config, sources, main)
    assert reasons == ["scored"] * 7 + ["empty", "no_route", "cutoff"]
    assert at == 5.0


# The journal


def remembering_run(sources, main, **options):
    return engine_run(tree(**options), sources, main, journal=MemoryJournal())


@pytest.mark.parametrize("how", [{"deadline_s": 5.0}, {"cutoff": Cutoff(5.0, quorum=0.0)}], ids=["deadline", "cutoff"])
def test_a_late_verdict_is_journaled_and_found_when_it_is_asked_for_again(how):
    sources = simulated(behaviour=lambda *_: 20.0)

    async def main(engine):
        (outcome,) = await engine.score_all([make_sample()], **how)
        at = now()
        await asyncio.sleep(30)
        return outcome, at, await engine.score(make_sample()), engine.statistics()

    outcome, at, again, statistics = remembering_run(sources, main)
    assert (outcome.reason, outcome.reward, at) == (next(iter(how)).removesuffix("_s"), None, 5.0)
    assert (again.reward, again.verdict.cached) == (0.5, True)
    assert len(sources["a"].arrivals) == 1
    assert (statistics.submitted, statistics.scored, statistics.cached) == (2, 1, 1)


def test_what_the_journal_knows_counts_for_the_quorum():
    batch = [make_sample(response="x" * (number + 1), group_id="g") for number in range(10)]

    async def main(engine):
        await engine.score_all(batch[:9])
        started_at = now()
        outcomes = await engine.score_all(batch, cutoff=Cutoff(5.0, quorum=0.9), deadline_s=60.0)
        return outcomes, now() - started_at

    outcomes, took_s = remembering_run(simulated(behaviour=hangs_for("x" * 10)), main)
    assert [getattr(outcome, "reason", "scored") for outcome in outcomes] == ["scored"] * 9 + ["cutoff"]
    assert took_s == pytest.approx(5.0)


# Configuration


def shares(scheduling, *, nodes=None, behaviour=lambda number, request, now: 1.0, count=60):
    sources = simulated("ab", behaviour)

    async def main(engine):
        outcomes = await engine.score_all(make_samples(count))
        assert all(isinstance(outcome, Scored) for outcome in outcomes)

    engine_run(tree("ab", scheduling=scheduling, nodes=nodes, limits={"concurrency": 100}), sources, main)
    return [len(source.arrivals) for source in sources.values()]


def test_a_strategy_and_weights_are_taken_from_the_configuration():
    nodes = {"a": {"weight": 3.0}}
    assert shares({"strategy": "round_robin"}, nodes=nodes) == [30, 30]
    assert shares({"strategy": "weighted"}, nodes=nodes) == [45, 15]
    assert shares({"strategy": "least_requests"}, nodes=nodes) == [45, 15]
    assert shares({"strategy": "least_tokens"}, nodes=nodes) == [45, 15]


def test_prefer_cost_is_taken_from_the_configuration():
    nodes = {"a": {"price": {"per_request": 0.1}}, "b": {"price": {"per_request": 0.2}}}
    assert shares({"prefer": "cost"}, nodes=nodes) == [60, 0]
    assert min(shares({"prefer": "speed"}, nodes=nodes)) > 0


@pytest.mark.parametrize(
    ("scheduling", "path"),
    [
        ({"strategy": "fastest"}, "engine.scheduling.strategy"),
        ({"prefer": "money"}, "engine.scheduling.prefer"),
        ({"hedge_budget": 0}, "engine.scheduling.hedge_budget"),
        ({"hedge_budget": 1.1}, "engine.scheduling.hedge_budget"),
        ({"hedge_budget": True}, "engine.scheduling.hedge_budget"),
        ({"hedges": True}, "engine.scheduling.hedges"),
    ],
)
def test_scheduling_that_makes_no_sense_is_refused(scheduling, path):
    with pytest.raises(ConfigurationError) as caught:
        load_config(tree(scheduling=scheduling))
    assert [mistake.path for mistake in caught.value.mistakes] == [path]


def test_a_journal_that_does_not_answer_cannot_hold_a_batch_beyond_its_deadline(tmp_path, monkeypatch):
    async def hangs(self, key):
        await asyncio.Event().wait()

    monkeypatch.setattr("qreward_plugins.journal.Journal.get", hangs)

    async def main():
        tree = {
            "sources": {"a": {"kind": "function", "function": "a:b"}},
            "judges": {"rule": {"kind": "function"}},
            "engine": {"journal": {"path": str(tmp_path / "verdicts.sqlite")}},
        }
        source = SimulatedSource("a", answer=lambda request: Reply(value=1.0))
        async with RewardEngine(tree, sources={"a": source}) as engine:
            outcomes = await asyncio.wait_for(engine.score_all(make_samples(3), deadline_s=0.05), 30)
            assert [outcome.reason for outcome in outcomes] == ["deadline"] * 3

    asyncio.run(main())
