"""Judges that are coroutines: what they ask is bound to their sample, and ends with it, whatever they do."""

from __future__ import annotations

import asyncio
import gc
import logging
from dataclasses import replace

import pytest

from qreward_plugins import Cause, Failed, RewardEngine, Scored, Verdict
from qreward_plugins.errors import JournalError, TransientError
from qreward_plugins.judges import Judge, JudgeFailed, LLMJudge
from qreward_plugins.samples import RawScore
from qreward_plugins.samples.spent import Usage
from qreward_plugins.scheduling import CallFailed, Cutoff, Unanswered
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.simulation import SimulatedSource

from ..kit import MemoryJournal, Stage, make_config, make_sample, now, scored_text

CONFIG = {
    "sources": {
        name: {"kind": "openai", "base_url": f"http://{name}.invalid/v1", "model": "m"} for name in ("small", "large")
    },
    "judges": {
        name: {"kind": "llm", "sources": name, "score_range": [0, 1], "invalid_retries": 0}
        for name in ("small", "large")
    },
    "routes": {"*": "large"},
    "engine": {"seed": 1},
}


def says(score):
    return lambda request: scored_text(request, score)


class Cascade(Judge):
    """Asks `large` only if `small` is not certain."""

    def __init__(self, small, large):
        super().__init__("cascade")
        self.small, self.large = small, large

    async def judge(self, sample, ask):
        verdict = await self.small.judge(sample, ask)
        return verdict if verdict.score in (0.0, 1.0) else await self.large.judge(sample, ask)


class Coroutine(Judge):
    """A judge of one function, `judge(leaves, sample, ask)`."""

    def __init__(self, leaves, judge):
        super().__init__("own")
        self.leaves, self.function = leaves, judge

    async def judge(self, sample, ask):
        return await self.function(self.leaves, sample, ask)


def played(judge, main=None, *, small=lambda *_: 1.0, large=lambda *_: 2.0, score=0.5, journal=None):
    """Run `main(engine, sources)` in virtual time with a judge of this class or function in charge of all samples."""
    sources = {
        "small": SimulatedSource("small", behaviour=small, answer=says(score), model="m"),
        "large": SimulatedSource("large", behaviour=large, answer=says(0.25), model="m"),
    }

    async def one(engine, sources):
        return await engine.score(make_sample())

    async def runs(engine):
        leaves = engine.judges
        made = Cascade(leaves["small"], leaves["large"]) if judge is Cascade else Coroutine(leaves, judge)
        engine._lifetime.router.judges["large"] = made
        return await (main or one)(engine, sources)

    return Stage(sources, tree=CONFIG, journal=journal).run(runs)


def test_a_cascade_asks_one_after_the_other_and_everything_spent_is_added_up():
    outcome = played(Cascade)
    assert isinstance(outcome, Scored)
    verdict = outcome.verdict
    assert (verdict.score, verdict.source, verdict.attempts, verdict.latency_s) == (0.25, "large", 2, 3.0)
    assert verdict.usage == Usage(200, 40)


def test_the_deadline_holds_for_all_calls_together_and_says_which_was_waited_for():
    async def main(engine, sources):
        outcome = await engine.score(make_sample(), deadline_s=2.5)
        return outcome, now(), engine.last_batch()

    outcome, at, report = played(Cascade, main)
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
    async def main(engine, sources):
        cutoff = Cutoff(5.0, quorum=0.0) if ending == "cutoff" else None
        scoring = asyncio.ensure_future(
            engine.score_all([make_sample()], deadline_s=5.0 if ending == "deadline" else 60.0, cutoff=cutoff)
        )
        if ending == "closed":
            await asyncio.sleep(5.0)
            await engine.aclose()
        (outcome,) = await scoring
        at, sent = now(), len(sources["small"].arrivals)
        await asyncio.sleep(100)
        return outcome, at, len(sources["small"].arrivals) - sent, engine.last_batch()

    outcome, at, after, report = played(judge, main)
    assert isinstance(outcome, Failed)
    assert (outcome.label, at, after) == (f"infra/{ending}", 5.0, 0)
    assert report is None or report.failed == 1


def test_a_caller_who_cancels_ends_the_judge_and_its_calls():
    async def main(engine, sources):
        scoring = asyncio.ensure_future(engine.score(make_sample()))
        await asyncio.sleep(1.5)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        await asyncio.sleep(10)
        return len(sources["large"].arrivals), sources["large"].cancelled, engine.last_batch()

    arrived, cancelled, report = played(Cascade, main, large=lambda *_: 60.0)
    assert (arrived, cancelled) == (1, 1)
    assert report is None or report.scored == 0


def test_each_call_of_a_judge_is_on_record_by_itself():
    async def main(engine, sources):
        first = await engine.score(make_sample())
        second = await engine.score(make_sample())
        return first, second, [len(source.arrivals) for source in sources.values()]

    book = MemoryJournal()
    first, second, arrivals = played(Cascade, main, journal=book)
    assert (first.reward, second.reward, arrivals) == (0.25, 0.25, [1, 1])
    assert [(row.verdict.judge, row.verdict.cached) for row in book.outcomes] == [
        ("small", False),
        ("large", False),
        ("cascade", False),
        ("small", True),
        ("large", True),
        ("cascade", True),
    ]
    assert (second.verdict.cached, second.verdict.attempts, second.verdict.cost_usd) == (True, 0, 0.0)


def test_the_prompt_of_each_turn_is_built_when_it_is_asked(monkeypatch):
    """Each holds all that was said before: a hundred at once would block the event loop."""
    built, sent = [], []
    build = LLMJudge.request

    def counted(self, sample, *, attempt):
        built.append(sample.response)
        return build(self, sample, attempt=attempt)

    monkeypatch.setattr(LLMJudge, "request", counted)
    tree = make_config("a", limits={"a": {"concurrency": 200}})
    tree |= {"judges": {**tree["judges"], "whole": {"kind": "turns", "judge": "quality"}}, "routes": {"*": "whole"}}
    turns = [{"role": "assistant", "content": f"{number} " + "x" * 2_000, "end": number} for number in range(100)]
    played = Stage({"a": lambda *_: sent.append(len(built)) or 1.0}, tree=tree).play([make_sample(turns=turns)])
    assert played.all_scored
    assert (len(sent), sent[0] < 5, sent[50] < 60) == (100, True, True)
    assert played.finished_s == 1.0


# Judges that break the rules: each costs its own sample, at once, and whoever reads outcomes can rely on them


def broken(*_):
    return TransientError("reset")


async def stubborn(leaves, sample, ask):
    while True:
        try:
            return await leaves["small"].judge(sample, ask)
        except JudgeFailed:
            continue


@pytest.mark.parametrize("small", [broken, lambda *_: 60.0])
@pytest.mark.parametrize("journal", [None, MemoryJournal()])
def test_a_judge_that_asks_until_it_is_answered_lets_its_deadline_and_others_run(small, journal):
    async def main(engine, sources):
        return await engine.score(make_sample(), deadline_s=5.0), now()

    outcome, at = played(stubborn, main, small=small, journal=journal)
    assert (outcome.label, at) == ("infra/deadline", 5.0)


def test_a_task_that_a_judge_leaves_behind_ends_with_its_sample():
    async def leaves_the_loser(leaves, sample, ask):
        asked = [asyncio.ensure_future(leaves[name].judge(sample, ask)) for name in ("small", "large")]
        done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()

    async def main(engine, sources):
        outcome = await engine.score(make_sample())
        await asyncio.sleep(0.1)
        return outcome, sources["large"].in_flight

    outcome, in_flight = played(leaves_the_loser, main, large=lambda *_: 60.0)
    assert (outcome.reward, in_flight) == (0.5, 0)


def with_failed(value):
    error = JudgeFailed(Failed(Cause.INFRA, "x"))
    error.failed = value
    return error


def with_why(value):
    error = CallFailed(Unanswered("x"))
    error.why = value
    return error


@pytest.mark.parametrize(
    "make",
    [
        *(GeneratorExit, SystemExit, StopIteration, asyncio.CancelledError),
        lambda: with_failed(None),
        lambda: with_failed(Failed("infra", "x")),
        lambda: with_why(None),
    ],
)
def test_whatever_a_judge_raises_is_a_bug_that_costs_its_sample_at_once(make):
    async def raises(leaves, sample, ask):
        raise make()

    async def main(engine, sources):
        outcome = await engine.score(make_sample())
        return outcome, now(), engine.statistics().failed, engine.facts().of(outcome)["cause"]

    outcome, at, failed, cause = played(raises, main)
    assert (outcome.label, at, failed, cause) == ("infra/bug", 0.0, {"infra/bug": 1}, "infra/bug")


FAILED = Failed(Cause.VERDICT, "invalid", "twice")


@pytest.mark.parametrize(
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

    async def main(engine, sources):
        outcome = await engine.score(make_sample())
        return outcome, engine.facts().of(outcome)

    outcome, facts = played(returns, main)
    assert (outcome.label, facts["cause"], facts["attempts"]) == ("infra/bug", "infra/bug", 1.0)


def test_a_judge_of_its_own_may_give_a_floor():
    async def returns(leaves, sample, ask):
        return Verdict(0.0, basis="floor", failure=FAILED)

    async def main(engine, sources):
        outcome = await engine.score(make_sample())
        return outcome, engine.facts().of(outcome), engine.statistics().floors

    outcome, facts, floors = played(returns, main)
    assert (outcome.reward, facts["floor"], facts["cause"]) == (0.0, 1.0, "verdict/invalid")
    assert floors == {"verdict/invalid": 1}


def test_later_stages_of_a_batch_do_not_wait_until_nobody_looks_anything_up():
    async def main(engine, sources):
        await engine.score_all([make_sample(response="x" * number) for number in range(1, 101)], deadline_s=1e4)
        return sources["large"].arrivals[0]

    # Each answer of the first stage makes a look-up, which takes longer than the next answer.
    steady = {"small": lambda number, *_: 1.0 + 0.008 * number}
    first = played(Cascade, main, journal=MemoryJournal(), **steady)
    assert first < 1.1


# In real time


def engine_of(judge, **behaviour):
    sources = {
        name: SimulatedSource(name, behaviour=behaviour.get(name, lambda *_: 0.0), answer=says(0.5), model="m")
        for name in ("small", "large")
    }
    engine = RewardEngine(CONFIG, sources=sources)
    engine._lifetime.router.judges["large"] = Coroutine(engine.judges, judge)
    return engine, sources


async def both(leaves, sample, ask):
    await leaves["small"].judge(sample, ask)
    return await leaves["large"].judge(sample, ask)


@pytest.mark.anyio
async def test_a_judge_that_asks_from_another_event_loop_is_told_at_once():
    async def in_a_thread(leaves, sample, ask):
        return await asyncio.to_thread(lambda: asyncio.run(leaves["small"].judge(sample, ask)))

    engine, sources = engine_of(in_a_thread)
    async with engine:
        outcome = await engine.score(make_sample(), deadline_s=60)
    assert outcome.label == "infra/bug"
    assert "EngineError" in outcome.detail
    assert sources["small"].arrivals == []


def test_a_run_that_is_interrupted_blames_no_judge(caplog):
    engine, _ = engine_of(both, large=lambda *_: 100.0)
    engine._lifetime.journal, engine._lifetime.reuse = (book := MemoryJournal()), True

    async def main():
        asyncio.ensure_future(
            engine.score_all([make_sample(response="x" * number) for number in range(1, 6)])
        ).add_done_callback(lambda done: done.cancelled())
        await asyncio.sleep(0.1)

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert engine.statistics().failed == {}
    assert all(isinstance(row, Scored) for row in book.outcomes)
    assert caplog.records == []


@pytest.mark.parametrize("raw", [RawScore("abc"), RawScore(5.0), RawScore(0.5, {"a": 7.0})])
def test_a_record_that_no_judge_can_have_made_is_asked_for_anew(raw):
    async def main(engine, sources):
        await engine.score(make_sample())
        known = engine._lifetime.journal.verdicts
        known.update(dict.fromkeys(known, Verdict(0.5, cached=True, raw=raw)))
        return await engine.score(make_sample())

    outcome = played(Cascade, main, journal=MemoryJournal())
    assert (outcome.reward, outcome.verdict.cached, outcome.verdict.attempts) == (0.25, False, 2)


@pytest.mark.parametrize("fails", ["get", "put"])
def test_a_journal_that_is_closed_is_an_error_of_the_caller_and_no_bug_of_a_judge(fails, caplog):
    class Closed(MemoryJournal):
        pass

    async def closed(self, *_):
        raise JournalError("the journal is closed")

    setattr(Closed, fails, closed)

    async def main(engine, sources):
        with pytest.raises(JournalError):
            await engine.score_all([make_sample(response="x" * number) for number in range(1, 5)])
        return engine.statistics().failed, engine._lifetime.scoring.dispatcher.waiting

    assert played(Cascade, main, journal=Closed()) == ({}, 0)
    assert caplog.records == []


def attempts_alive():
    # Not `isinstance`: it asks every object for its class, and some that torch keeps warn then.
    return sum(type(known) is Attempt for known in gc.get_objects())


@pytest.mark.parametrize("judge", ["leaf", Cascade])
def test_cancelled_attempts_leave_no_reference_cycles(judge):
    async def main(engine, sources):
        if judge == "leaf":
            engine._lifetime.router.judges["large"] = engine.judges["small"]
        await engine.score(make_sample())
        gc.collect()
        gc.disable()
        try:
            before = attempts_alive()  # those of other tests
            sources["small"].behaviour = lambda *_: 60.0
            await engine.score_all([make_sample(response="x" * number) for number in range(1, 21)], deadline_s=5.0)
            await asyncio.sleep(100)
            return attempts_alive() - before
        finally:
            gc.enable()

    assert played(Cascade, main) <= 2
