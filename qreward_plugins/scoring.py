"""How a sample comes to its outcome: by its judge, or by every part of a sum; out of the journal, or by asking.

It stands between the engine, which knows of event loops and batches, and the dispatcher, which knows of one judge at a
time. To both of them a sample has one outcome; that several requests and several entries of the journal may lie behind
it is known only here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import anyio

from .errors import InvalidVerdict
from .journal import Journal, question_keys
from .judges import InCharge, Judge, JudgeSum, Panel, parts_of
from .redaction import one_line
from .sample_check import Rejected
from .samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from .scheduling import Batch, Batches, Bundle, Dispatcher
from .sources import Source
from .telemetry import EngineCounters, FailureLog


class Entry(NamedTuple):
    """A judge that is to say something of a sample, the keys of what its sources say (those that have one), and what is
    on record of it.
    """

    judge: Judge
    keys: Mapping[str, str]
    verdict: Verdict | None


class Case(NamedTuple):
    """A sample, who judges it (None: nobody), an entry for every judge that is to say something of it, and when its
    time is up, on the event loop's clock. `rejected`: what is wrong with it, so that nobody is asked.
    """

    sample: Sample
    judge: InCharge | None
    entries: tuple[Entry, ...]
    due_at: float
    rejected: str = ""


class Scoring:
    """Takes the samples of one event loop to their outcomes, and counts these.

    `sources` are those of the judges, by name. `reuse`: what is on record in `journal` is not asked for again.
    """

    def __init__(
        self,
        panel: Panel,
        dispatcher: Dispatcher,
        counters: EngineCounters,
        *,
        sources: Mapping[str, Source],
        journal: Journal | None,
        reuse: bool,
    ) -> None:
        self._panel = panel
        self.dispatcher = dispatcher
        self._counters = counters
        self._sources = sources
        self._journal = journal
        self._reuse = reuse
        self._failures = FailureLog()

    @property
    def batches(self) -> Batches:
        """The batches of the dispatcher."""
        return self.dispatcher.batches

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self.dispatcher.now()

    async def open(self, samples: Sequence[Sample | Rejected], due_at: float) -> list[Case]:
        """Make cases of samples, all of whose time is up at `due_at`; what a slow disk does not tell in half of that
        time is not known. Without a journal it returns at once.
        """
        if self._journal is None:
            return [await self._case(sample, due_at) for sample in samples]
        return await asyncio.gather(*(self._case(sample, due_at) for sample in samples))

    async def _case(self, sample: Sample | Rejected, due_at: float) -> Case:
        if isinstance(sample, Rejected):
            return Case(sample.sample, None, (), due_at, sample.problem)
        judge = self._panel.judge_of(sample)
        asked = () if judge is None else parts_of(judge)
        return Case(sample, judge, tuple([await self._entry(sample, part, due_at) for part in asked]), due_at)

    async def _entry(self, sample: Sample, judge: Judge, due_at: float) -> Entry:
        if self._journal is None:
            return Entry(judge, {}, None)
        keys = question_keys(sample, judge, self._sources)
        verdict = None
        if keys and self._reuse:
            # A disk that hangs must leave time to ask.
            with anyio.move_on_after(self._left_s(due_at) / 2):
                verdict = _as_said(judge, await self._journal.get(*dict.fromkeys(keys.values())))
        return Entry(judge, keys, verdict)

    def submit(self, case: Case, batch: Batch) -> asyncio.Future[Outcome]:
        """Hand a case in, and count its outcome when it comes. Cancelling the future cancels what is under way."""
        self._counters.submitted += 1
        if case.judge is None:
            failed = Failed(Cause.INFRA, "input", case.rejected) if case.rejected else _no_route(case.sample)
            future = _done(failed)
            self.batches.settled(batch, case.sample, future.result())
        elif isinstance(case.judge, JudgeSum):
            future = self._sum(case, case.judge, batch)
        else:
            future = self._ask(case, case.entries[0], batch)
        if future.done():
            # Whoever waits for it goes on at once, before any callback.
            self._count(case.sample, future)
        else:
            future.add_done_callback(lambda done: self._count(case.sample, done))
        return future

    def _ask(self, case: Case, entry: Entry, batch: Batch | Bundle) -> asyncio.Future[Outcome]:
        """The outcome of one judge: what is on record, or else what it says now, on record then."""
        if entry.verdict is not None:
            known = Scored(entry.verdict)
            if isinstance(batch, Batch):
                self.batches.settled(batch, case.sample, known)
            return _done(known)
        now = batch.opened_at if isinstance(batch, Bundle) else self.now()
        deadline_s = max(0.0, case.due_at - now)
        future = self.dispatcher.submit(case.sample, entry.judge, deadline_s=deadline_s, batch=batch)
        if self._journal is None:
            return future
        recorded = asyncio.ensure_future(self._recorded(self._journal, case, entry, future))
        # A task that is cancelled before its first step never gets to know what it waits for.
        recorded.add_done_callback(lambda _: future.cancel())
        return recorded

    async def _recorded(self, journal: Journal, case: Case, entry: Entry, future: asyncio.Future[Outcome]) -> Outcome:
        outcome = await future
        answered = outcome.verdict if isinstance(outcome, Scored) else outcome
        key = entry.keys.get(answered.source)
        # The entry is in before `put` waits; what it waits for is a slow disk, and the deadline does not.
        with anyio.move_on_after(self._left_s(case.due_at)):
            await journal.put(key, case.sample, outcome)
        return outcome

    def _sum(self, case: Case, judge: JudgeSum, batch: Batch) -> asyncio.Future[Outcome]:
        """The outcome of a sum, all of whose parts are handed in at once."""
        bundle = self.batches.bundle(batch, case.sample)
        parts: dict[str, asyncio.Future[Outcome]] = {}

        def settle(outcome: Outcome | None) -> None:
            for part in parts.values():
                part.cancel()
            self.batches.settle(bundle, outcome)

        try:
            for entry in case.entries:
                parts[entry.judge.name] = self._ask(case, entry, bundle)
        except BaseException:
            settle(None)
            raise
        certain = _certain(judge, parts)
        if certain is not None:
            settle(certain)
            return _done(certain)
        added = asyncio.ensure_future(_added(judge, parts))
        added.add_done_callback(lambda done: settle(_outcome_of(done)))
        return added

    def _left_s(self, due_at: float) -> float:
        return max(0.0, due_at - self.now())

    def _count(self, sample: Sample, done: asyncio.Future[Outcome]) -> None:
        outcome = _outcome_of(done)
        if outcome is None:
            return
        self._counters.count(outcome)
        if isinstance(outcome, Failed):
            self._failures.note(sample, outcome, self.now())


def _as_said(judge: Judge, recorded: Verdict | None) -> Verdict | None:
    """What is on record as `judge` would say it now; None: nothing is, or it is no valid verdict any more."""
    if recorded is None or recorded.raw is None:
        return None
    try:
        now = judge.mapped(recorded.raw)
    except (InvalidVerdict, ValueError, LookupError):
        # The two others: numbers that another range maps beyond float32, and a row that was made by hand.
        return None
    return replace(recorded, score=now.score, components=now.components, correct=now.correct, judge=judge.name)


async def _added(judge: JudgeSum, parts: Mapping[str, asyncio.Future[Outcome]]) -> Outcome:
    """The sum of parts, as soon as it is certain."""
    while (outcome := _certain(judge, parts)) is None:
        await asyncio.wait([part for part in parts.values() if not part.done()], return_when="FIRST_COMPLETED")
    return outcome


def _certain(judge: JudgeSum, parts: Mapping[str, asyncio.Future[Outcome]]) -> Outcome | None:
    """The sum of parts, as far as they have ended; None: it is not certain yet."""
    return judge.outcome({name: part.result() for name, part in parts.items() if part.done()})


def _outcome_of(done: asyncio.Future[Outcome]) -> Outcome | None:
    """None: nobody waited for it any more, or it was not to be had."""
    return None if done.cancelled() or done.exception() is not None else done.result()


def _no_route(sample: Sample) -> Failed:
    name = one_line(repr(sample.data_source), 200)
    detail = f'no route matches the data source {name}; add it to `routes`, or a last route "*"'
    return Failed(Cause.INFRA, "no_route", detail)


def _done(outcome: Outcome) -> asyncio.Future[Outcome]:
    future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
    future.set_result(outcome)
    return future
