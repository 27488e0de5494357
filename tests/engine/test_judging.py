"""Judges that are coroutines: what they ask is bound to their sample, and ends with it, whatever they do. Samples that
several judges score: one outcome, one count, and nothing left behind. Random trees of judges over sources that fail in
every way, with cut-offs and journals: each sample has one outcome in time, and nothing is left.

QREWARD_TREES=10000 plays so many seeds, a few minutes; the default run plays forty.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from qreward_plugins import Cause, ConfigurationError, Cutoff, Failed, Outcome, Sample, Scored, Usage, Verdict
from qreward_plugins.config import load_config
from qreward_plugins.errors import JournalError, PermanentError, Throttled, TransientError
from qreward_plugins.judges import Judge, JudgeFailed, JudgeRouter, LLMJudge
from qreward_plugins.judges.fence import read_fences
from qreward_plugins.samples import RawScore
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


class Kept(LLMJudge):
    """Gives the same verdict for each reply, and has a floor that it reads from a field of its own."""

    class Config(LLMJudge.Config):
        pass

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._floor, self._verdict = 0.25, Verdict(0.5)

    def floor(self, cause):
        return self._floor

    def verdict(self, request, reply):
        return self._verdict


class Changed(LLMJudge):
    """Changes the verdict that it has read."""

    class Config(LLMJudge.Config):
        pass

    def verdict(self, request, reply):
        verdict = super().verdict(request, reply)
        verdict.components = {"ratio": float("nan")}
        return verdict


@each_of("kind", [Kept, Changed])
def test_a_verdict_that_a_judge_keeps_or_changes_is_copied_and_checked_for_each_sample(kind):
    tree = make_config("a", judge={"kind": f"{kind.__module__}:{kind.__name__}"})
    outcomes = Stage({"a": 1.0}, tree=tree).run(lambda engine: engine.score_all(make_samples(4)))
    if kind is Kept:
        assert len({id(outcome.verdict) for outcome in outcomes}) == 4
    else:
        assert [outcome.label for outcome in outcomes] == 4 * ["infra/bug"]


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


def summed(*, total=None, llm=2.0, rm=1.0, journal=None, **top):
    """A stage with two judges, `words` of the source `llm` and `rules` of the source `rm`, and their sum."""

    def answer(request):
        return scored_text(request, 0.5) if request.judge == "words" else Reply(value=1.0, model="rules")

    tree = {
        "sources": {
            "llm": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"},
            "rm": {"kind": "function", "function": "rewards:score"},
        },
        "judges": {
            "words": {"kind": "llm", "score_range": [0, 1], "invalid_retries": 0},
            "rules": {"kind": "function", "invalid_retries": 0},
            "total": {"kind": "sum", "weights": {"words": 0.75, "rules": 0.25}, **(total or {})},
        },
        "engine": {"seed": 7},
        **top,
    }
    return Stage({"llm": llm, "rm": rm}, answer=answer, tree=tree, journal=journal)


def test_the_parts_are_asked_at_the_same_time_and_added():
    async def main(engine):
        return await engine.score(make_sample(id="s")), now(), engine.statistics(), engine.facts()

    stage = summed(total={"correct_at": 0.6})
    outcome, at, statistics, facts = stage.run(main)
    verdict = outcome.verdict
    assert (outcome.reward, verdict.correct, verdict.judge, verdict.attempts) == (0.625, True, "total", 2)
    assert (verdict.source, verdict.model, verdict.rationale) == ("llm+rm", "m+rules", "words: it is right")
    assert verdict.components == {"words": 0.5, "rules": 1.0}
    assert (at, verdict.latency_s) == (2.0, 2.0)
    assert stage.sent_by_source == {"llm": 1, "rm": 1}
    assert (statistics.submitted, statistics.scored, statistics.attempts) == (1, 1, 2)
    told = facts.of(outcome)
    assert (told["score/words"], told["score/rules"], told["acc"], told["source"]) == (0.5, 1.0, 1.0, "llm+rm")
    failed = facts.of(Failed(Cause.INFRA, "deadline"))
    assert list(failed) == list(told)


@pytest.mark.parametrize("journal", [None, MemoryJournal])
def test_a_part_that_fails_ends_the_sample_and_cancels_the_other(journal, caplog):
    book = journal and journal()
    stage = summed(llm=NEVER_S, rm=lambda *_: PermanentError("not my data"), journal=book)

    async def main(engine):
        outcome = await engine.score(make_sample(), deadline_s=60.0)
        at = now()
        await asyncio.sleep(1)
        return outcome, at, stage.simulated["llm"].in_flight, engine.statistics(), engine.last_batch()

    outcome, at, in_flight, statistics, report = stage.run(main)
    assert (outcome.cause, outcome.reason, outcome.reward, outcome.judge) == (Cause.INFRA, "no_source", None, "total")
    assert outcome.detail == "rules: not my data"
    assert at < 0.1
    assert (in_flight, stage.simulated["llm"].cancelled) == (0, 1)
    assert (statistics.submitted, statistics.failed, statistics.waiting) == (1, {"infra/no_source": 1}, 0)
    assert (report.samples, report.scored, report.failed) == (1, 0, 1)
    assert "rules: not my data" in caplog.text
    if book is not None:
        assert [(one.judge, one.reward, one.attempts) for one in book.outcomes][1:] == [("total", None, 0)]
        assert book.outcomes[0].judge == "rules"


@pytest.mark.parametrize("journal", [None, MemoryJournal(seconds=0)], ids=["", "journal"])
@pytest.mark.parametrize("judge", ["total", "words"])
def test_a_call_that_is_cancelled_at_once_leaves_nothing(judge, journal):
    stage = summed(journal=journal, routes={"*": judge})

    async def main(engine):
        for steps in range(12):
            task = asyncio.ensure_future(engine.score(make_sample()))
            for _ in range(steps):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.5)
            assert [source.in_flight for source in stage.simulated.values()] == [0, 0]
            assert engine.statistics().waiting == 0
            assert tasks_left() == []

    stage.run(main)


# Random trees


SEEDS = int(os.environ.get("QREWARD_TREES", "40"))
DEADLINE_S = 60.0
LEAVES = ("a", "b", "c")
WEIGHTS = (0.5, {"weight": {0: 1, 9: 2}}, {"weight": 1, "optional": True})


def tree(rng: random.Random, depth: int, judges: dict[str, Any]) -> str:
    """Add a random tree of judges, and return the name of its root."""
    name = f"j{len(judges)}"
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(LEAVES)
    if rng.random() < 0.25:
        judges[name] = {"kind": "rank", "judge": rng.choice(LEAVES), "list_size": rng.choice((2, 3, 8))}
        return name
    judges[name] = {}
    parts = list(dict.fromkeys(tree(rng, depth - 1, judges) for _ in range(3)))
    within = {"within_s": rng.choice((2.0, 20.0))} if rng.random() < 0.3 else {}
    if len(parts) < 2:
        judges[name] = {"kind": "sum", "weights": {parts[0]: 1.0}}
        return name
    stages = [{"judge": part, "decides": {"above": 0.9, "below": 0.1}} | within for part in parts[:-1]]
    kinds: dict[str, Any] = {
        "sum": {"weights": {part: rng.choice(WEIGHTS) for part in parts[:-1]} | {parts[-1]: 1.0}},
        "gate": {"when": parts[0], "at_least": 0.5, "then": parts[1], "otherwise": rng.choice((0, 0.5))},
        "cascade": {"stages": [*stages, {"judge": parts[-1]}]},
        "panel": {"judges": parts, "quorum": 1, "reduce": rng.choice(("mean", "median", "min"))},
        "screen": {"judge": parts[0], "monitor": parts[1], "at": 0.9, "on": rng.choice(("mask", "floor"))},
    }
    kind = rng.choice([*kinds])
    judges[name] = {"kind": kind, **kinds[kind]}
    return name


class Play:
    """One seed: a tree, sources and samples."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.faults = {name: rng.choice((0.0, 0.0, 0.2, 0.6)) for name in LEAVES}
        config = make_config(
            LEAVES,
            limits={name: {"concurrency": rng.choice((2, 16))} for name in LEAVES},
            engine={"deadline_s": DEADLINE_S, "seed": seed},
        )
        leaves = {name: {"kind": "llm", "sources": name, "score_range": [0, 1], "correct_at": 0.5} for name in LEAVES}
        while True:
            judges: dict[str, Any] = {}
            self.root = tree(rng, 3, judges)
            self.tree = {**config, "judges": {**leaves, **judges}, "routes": {"*": self.root}}
            with suppress(ConfigurationError):  # a tree that makes no sense; another one is drawn
                self.judge = JudgeRouter(load_config(self.tree), key=b"a key that nobody knows").judges[self.root]
                break
        self.samples = [self._sample(number) for number in range(rng.randint(1, 24))]
        self.journal = MemoryJournal() if rng.random() < 0.3 else None
        self.cutoff = Cutoff(rng.uniform(0, 10), rng.random()) if rng.random() < 0.3 else None

    def _sample(self, number: int) -> Sample:
        rng = self.rng
        response = rng.choice(("", "same", f"{number} is it", f"{number} again"))
        split = rng.choice((None, "train", "train", "val"))
        group = rng.choice((None, "x", "y", "z"))
        question = [{"role": "user", "content": f"Question {group}"}]
        given = {"messages": question, "ground_truth": group, "group_id": group, "step": 4, "split": split}
        return make_sample(number, response=response, **given)

    def behaviour(self, name: str) -> Any:
        rng = random.Random(f"{self.root} {name}")

        def takes(number: int, request: Any, now: float) -> Any:
            if rng.random() >= self.faults[name]:
                return rng.uniform(0.1, 4.0)
            return rng.choice(
                (TransientError("down"), Throttled("slowly", retry_after_s=3.0), PermanentError("no"), NEVER_S, 30.0)
            )

        return takes

    def answer(self, request: Any) -> Reply:
        rng = random.Random(f"{request.nonce}")
        _, blocks = read_fences(request.messages[-1]["content"])
        listed = [label.removeprefix("response_") for label in blocks if label.startswith("response_")]
        numbers = {label: rng.choice((0.0, 0.05, 0.3, 0.6, 0.95, 1.0)) for label in listed or ("score",)}
        said = {"scores": numbers} if listed else numbers
        if rng.random() < self.faults[request.judge] / 2:
            said = rng.choice(({}, {"score": "high"}, {"scores": {"1": 0.5}}, {"score": float("nan")}))
        text = json.dumps({"id": request.nonce, "rationale": "so", **said})
        return Reply(text=text, usage=Usage(10, 5), model="m")

    def outcomes(self) -> list[Outcome]:
        sources = {name: self.behaviour(name) for name in LEAVES}
        stage = Stage(sources, answer=self.answer, tree=self.tree, journal=self.journal)
        return stage.play(self.samples, cutoff=self.cutoff).outcomes


def latency_s(outcome: Outcome) -> float:
    return (outcome.verdict if isinstance(outcome, Scored) else outcome).latency_s


@pytest.mark.parametrize("part", range(4))
def test_every_sample_of_a_tree_has_one_outcome_in_time(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        play = Play(seed)
        outcomes, judge = play.outcomes(), play.judge
        assert len(outcomes) == len(play.samples), seed
        for outcome in outcomes:
            assert latency_s(outcome) <= DEADLINE_S + 1e-6, seed
            if isinstance(outcome, Failed):
                assert outcome.reward is None, seed
                continue
            assert isinstance(outcome, Scored), seed
            low, high = judge.reward_range
            assert low - 1e-9 <= outcome.reward <= high + 1e-9, seed
            assert (outcome.verdict.basis == "floor") == (outcome.verdict.failure is not None), seed
            assert set(outcome.verdict.components) <= set(judge.component_names()), seed
            assert outcome.verdict.judge == judge.name, seed
        if seed % 5 == 0:
            one, again = (
                [(each.reward, getattr(each, "label", ""), latency_s(each)) for each in found]
                for found in (outcomes, Play(seed).outcomes())
            )
            assert one == again, seed
