"""Judges that are coroutines: what they ask is bound to their sample, and ends with it, whatever they do. Samples that
several judges score: one outcome, one count, and nothing left behind.
"""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from qreward_plugins import Cause, Cutoff, Failed, Verdict
from qreward_plugins.errors import JournalError, PermanentError
from qreward_plugins.judges import Judge, JudgeFailed
from qreward_plugins.samples import RawScore
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import Reply

from ..kit import (
    NEVER_S,
    MemoryJournal,
    Stage,
    each_of,
    make_config,
    make_sample,
    make_samples,
    now,
    scored_text,
    takes,
    tasks_left,
)

SCORES = {"small": 0.5, "large": 0.25}


async def cascade(leaves, sample, ask):
    """Asks `large` only if `small` is not certain."""
    verdict = await leaves["small"].judge(sample, ask)
    return verdict if verdict.score in (0.0, 1.0) else await leaves["large"].judge(sample, ask)


class Coroutine(Judge):
    """A judge of one function, `judge(leaves, sample, ask)`."""

    def __init__(self, leaves, judge):
        super().__init__("own")
        self.leaves, self.function = leaves, judge

    async def judge(self, sample, ask):
        return await self.function(self.leaves, sample, ask)


async def one(engine):
    outcome = await engine.score(make_sample())
    return outcome, now()


def staged(small=1.0, large=2.0, journal=None):
    tree = make_config([*SCORES], engine={"deadline_s": 300})
    tree["judges"] = {name: {"kind": "llm", "sources": name, "score_range": [0, 1]} for name in SCORES}
    tree["routes"] = {"*": "large"}
    sources = {"small": small, "large": large}
    return Stage(
        sources, answer=lambda request: scored_text(request, SCORES[request.judge]), tree=tree, journal=journal
    )


def played(judge, main=one, stage=None):
    """Run `main(engine)` in virtual time with a judge of this function in charge of all samples."""

    async def runs(engine):
        engine._lifetime.router.judges["large"] = Coroutine(engine.judges, judge)
        return await main(engine)

    return (stage or staged()).run(runs)


def test_a_cascade_asks_one_after_the_other_and_everything_spent_is_added_up():
    outcome, _ = played(cascade)
    verdict = outcome.verdict
    assert (verdict.score, verdict.source, verdict.attempts, verdict.latency_s) == (0.25, "large", 2, 3.0)
    assert verdict.usage == Usage(200, 40)


def test_the_deadline_holds_for_all_calls_together_and_says_which_was_waited_for():
    async def main(engine):
        outcome = await engine.score(make_sample(), deadline_s=2.5)
        return outcome, now(), engine.last_batch()

    outcome, at, report = played(cascade, main)
    assert (outcome.label, at, outcome.attempts) == ("infra/deadline", 2.5, 2)
    assert "large had not answered" in outcome.detail
    assert report.failed == 1


async def deaf(leaves, sample, ask):
    """Goes on asking whatever it is told."""
    while True:
        try:
            await leaves["small"].judge(sample, ask)
        except JudgeFailed:
            await asyncio.sleep(0)


async def shields(leaves, sample, ask):
    try:
        await leaves["small"].judge(sample, ask)
        await asyncio.sleep(1e6)
    except asyncio.CancelledError:
        return await leaves["small"].judge(sample, ask)


@pytest.mark.parametrize("judge", [deaf, shields])
@pytest.mark.parametrize("ending", ["deadline", "cutoff", "closed"])
def test_a_judge_that_does_not_end_is_ended_and_nothing_is_sent_after_its_outcome(judge, ending):
    stage = staged()

    async def main(engine):
        cutoff = Cutoff(5.0, quorum=0.0) if ending == "cutoff" else None
        deadline_s = 5.0 if ending == "deadline" else 60.0
        scoring = asyncio.ensure_future(engine.score_all([make_sample()], deadline_s=deadline_s, cutoff=cutoff))
        if ending == "closed":
            await asyncio.sleep(5.0)
            await engine.aclose()
        (outcome,) = await scoring
        at, sent = now(), len(stage.sent)
        await asyncio.sleep(100)
        return outcome.label, at, len(stage.sent) - sent

    assert played(judge, main, stage) == (f"infra/{ending}", 5.0, 0)


def test_a_judge_that_asks_twice_about_one_sample_gets_two_answers():
    async def twice(leaves, sample, ask):
        verdict, _ = await asyncio.gather(*(leaves["small"].judge(sample, ask) for _ in range(2)))
        return verdict

    stage = staged()
    stage.tree["engine"]["ask_once"] = True
    played(twice, stage=stage)
    assert len(stage.sent) == 2


def test_a_task_that_a_judge_leaves_behind_ends_with_its_sample():
    stage = staged(large=60.0)

    async def leaves_the_loser(leaves, sample, ask):
        asked = [asyncio.ensure_future(leaves[name].judge(sample, ask)) for name in ("small", "large")]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def main(engine):
        outcome = await engine.score(make_sample())
        await asyncio.sleep(0.1)
        return outcome.reward, stage.simulated["large"].in_flight

    assert played(leaves_the_loser, main, stage) == (0.5, 0)


def test_a_run_that_is_interrupted_blames_no_judge():
    async def main(engine):
        scoring = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(0.5)
        for task in asyncio.all_tasks() - {asyncio.current_task(), scoring}:  # as `asyncio.run` does at its end
            task.cancel()
        scoring.cancel()
        await asyncio.wait([scoring])
        return engine.statistics().failed

    assert played(cascade, main) == {}


# Judges that break the rules: each costs its own sample, at once, and whoever reads outcomes can rely on them


async def told(engine):
    outcome = await engine.score(make_sample())
    return outcome.label, now(), engine.statistics().failed, engine.facts().of(outcome)["cause"]


@each_of("make", [GeneratorExit, SystemExit, StopIteration, asyncio.CancelledError])
def test_whatever_a_judge_raises_is_a_bug_that_costs_its_sample_at_once(make):
    async def raises(leaves, sample, ask):
        raise make()

    assert played(raises, told) == ("infra/bug", 0.0, {"infra/bug": 1}, "infra/bug")


FAILED = Failed(Cause.VERDICT, "invalid", "twice")


@each_of(
    "fields",
    [
        {"failure": FAILED},
        {"basis": "floor"},
        {"basis": "floor", "failure": replace(FAILED, cause="verdict")},
        {"components": {1: 0.5}},
        {"correct": "yes"},
        {"rationale": None},
        {"source": 5},
    ],
)
def test_a_verdict_that_would_break_whoever_reads_it_is_a_bug_of_its_judge(fields):
    async def returns(leaves, sample, ask):
        return replace(await leaves["small"].judge(sample, ask), **fields)

    assert played(returns, told)[::3] == ("infra/bug", "infra/bug")


def test_a_judge_that_asks_from_another_event_loop_is_told_at_once():
    stage = staged()

    async def in_a_thread(leaves, sample, ask):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, leaves["small"].judge(sample, ask)).result(timeout=30)

    outcome, _ = played(in_a_thread, stage=stage)
    assert outcome.label == "infra/bug"
    assert "EngineError" in outcome.detail
    assert stage.sent == []


# The journal


@pytest.mark.parametrize("fails", ["get", "put"])
def test_a_journal_that_is_closed_is_an_error_of_the_caller_and_no_bug_of_a_judge(fails, caplog):
    async def closed(*_):
        raise JournalError("the journal is closed")

    book = MemoryJournal()
    setattr(book, fails, closed)

    async def main(engine):
        with pytest.raises(JournalError):
            await engine.score_all([make_sample(response="x" * number) for number in range(1, 5)])
        return engine.statistics().failed, engine.statistics().waiting

    assert played(cascade, main, staged(journal=book)) == ({}, 0)
    assert caplog.records == []


@each_of("raw", [RawScore("abc"), RawScore(5.0), RawScore(0.5, {"a": 7.0})])
def test_a_record_that_no_judge_can_have_made_is_asked_for_anew(raw):
    stage = staged(journal=MemoryJournal())

    async def main(engine):
        await engine.score(make_sample())
        known = stage.journal.verdicts
        known.update(dict.fromkeys(known, Verdict(0.5, cached=True, raw=raw)))
        return await engine.score(make_sample())

    verdict = played(cascade, main, stage).verdict
    assert (verdict.score, verdict.cached, verdict.attempts) == (0.25, False, 2)


def test_later_stages_of_a_batch_do_not_wait_until_nobody_looks_anything_up():
    # Each answer of the first stage makes a look-up, which takes longer than the next answer.
    stage = staged(small=lambda number, *_: 1.0 + 0.008 * number, journal=MemoryJournal())
    batch = [make_sample(response="x" * number) for number in range(1, 101)]
    played(cascade, lambda engine: engine.score_all(batch, deadline_s=1e4), stage)
    assert next(each.at for each in stage.sent if each.source == "large") < 1.1


# Several judges of one sample


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
            assert tasks_left() == []

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
