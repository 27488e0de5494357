"""Batches from the outside: what the last one waited for, cut-offs, late verdicts, and sources held by hand."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qreward_plugins import Cause, Cutoff, EngineError, SampleRefused, Scored, SourceStateChanged

from ..kit import MemoryJournal, Recorder, Stage, make_sample, make_samples

LOGGER = "qreward_plugins.scheduling"


def hangs_for(response, seconds=1.0, **options):
    """A stage whose source never answers for this response, and otherwise in so many seconds."""
    behaviour = lambda number, request, now: 1e6 if request.sample.response == response else seconds  # noqa: E731
    return Stage({"a": behaviour}, options={"total_s": 300, "engine": {"scheduling": {"hedge": False}}}, **options)


def reasons(outcomes):
    return [getattr(outcome, "reason", "scored") for outcome in outcomes]


def test_the_last_batch_says_what_it_waited_for(caplog):
    async def main(engine):
        assert engine.last_batch() is None
        await engine.score_all(make_samples(8))
        return engine.last_batch()

    with caplog.at_level(logging.INFO, logger=LOGGER):
        report = Stage(options={"limits": {"a": {"concurrency": 2}}}).run(main)
    assert (report.samples, report.scored, report.failed, report.attempts) == (8, 8, 0, 8)
    assert report.makespan_s == 4.0
    assert sum(part.seconds for part in report.parts) == pytest.approx(4.0)
    assert sum(part.seconds for part in report.parts if part.kind == "queue") == pytest.approx(3.0)
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

    together, alone = Stage().run(main)
    assert (together.samples, together.makespan_s) == (3, pytest.approx(2.0))
    assert (alone.samples, alone.makespan_s) == (1, pytest.approx(1.0))


def test_a_batch_is_cut_off_and_its_outcomes_keep_their_order():
    batch = [make_sample(response="good" if number % 3 else "hangs", group_id=f"g{number % 2}") for number in range(12)]
    played = hangs_for("hangs").play(batch, cutoff=Cutoff(5.0, quorum=0.5))
    assert played.finished_s == 5.0
    for each, outcome in zip(batch, played.outcomes, strict=True):
        if each.response == "hangs":
            assert (outcome.cause, outcome.reason, outcome.reward) == (Cause.INFRA, "cutoff", None)
        else:
            assert isinstance(outcome, Scored)
    assert (played.report.scored, played.report.failed, played.report.makespan_s) == (8, 4, 5.0)


def test_a_group_that_is_not_in_is_waited_for():
    batch = [make_sample(response="good", group_id="g0") for _ in range(9)]
    batch.append(make_sample(response="hangs", group_id="g1"))
    played = hangs_for("hangs").play(batch, cutoff=Cutoff(5.0, quorum=0.5), deadline_s=20.0)
    assert (played.outcomes[-1].reason, played.finished_s) == ("deadline", 20.0)


def test_the_quorum_is_of_those_that_can_still_have_a_reward():
    ends = {"hangs": 1e6, "refused": SampleRefused("too long")}
    batch = [make_sample(response=each, group_id="g") for each in ["good"] * 4 + ["refused"] * 5 + ["hangs"]]
    stage = Stage({"a": lambda number, request, now: ends.get(request.sample.response, 1.0)})
    played = stage.play(batch, cutoff=Cutoff(5.0, quorum=0.8), deadline_s=20.0)
    assert (played.outcomes[-1].reason, played.finished_s) == ("cutoff", 5.0)


def test_a_journal_that_does_not_answer_gets_half_of_the_time():
    played = Stage(journal=MemoryJournal(seconds=1e6)).play(make_samples(3), deadline_s=4.0)
    assert (played.all_scored, played.finished_s) == (True, 3.0)


def test_calls_go_elsewhere_or_wait_while_a_source_is_held_by_hand():
    seen, stage = Recorder(), Stage({"a": 1.0, "b": 1.0})

    async def main(engine):
        under_way = asyncio.ensure_future(engine.score_all(make_samples(8)))
        await asyncio.sleep(0.5)
        engine.hold("a")
        assert engine.statistics().sources["a"].state == "held"
        await engine.score_all(make_samples(4))
        engine.hold("b")
        later = asyncio.ensure_future(engine.score_all(make_samples(2)))
        await asyncio.sleep(10)
        assert not later.done()
        engine.release("a")
        with pytest.raises(EngineError, match="unknown source 'c'"):
            engine.release("c")
        return [*await under_way, *await later]

    assert all(outcome.reward is not None for outcome in stage.run(main, seen))
    after = [each for each in stage.sent if each.at >= 0.5]
    assert [each.source for each in after] == ["b"] * 4 + ["a"] * 2
    assert min(each.at for each in after if each.source == "a") > 10
    changes = [(each.source, each.state) for each in seen.of(SourceStateChanged)]
    assert changes == [("a", "held"), ("b", "held"), ("a", "up")]
