"""Judges one sample in a task: binds its judge's calls to its deadline, batch and journal.

A sample whose judge is a leaf needs no task (`Calling` in outcomes.py), except with a journal, which is awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import BudgetSpent, EngineError, JournalError
from ..journal.history import PastAttempt, history_of
from ..judges.base import GroupJudge, Judge
from ..judges.leaf import Leaf, failed, judged
from ..quotas.budgets import ENDS_RUN
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..samples.spent import NOTHING, Spent
from ..scheduling.batches import Member
from ..scheduling.calls import Answer, Call, CallFailed, T, Unanswered
from .followed_calls import FollowedCall
from .outcomes import Pending, failure, scored
from .siblings import Siblings

if TYPE_CHECKING:
    from .scoring import Scoring

STEPS_TO_END = 50
"""Steps of the event loop in which a judge must end after its deadline. A judge of judges needs a few for each level.
"""


class Judging(Pending):
    """A sample that is judged in a task. It is the `ask` of its judge."""

    __slots__ = (
        "_asked",
        "_due_at",
        "_loop",
        "_recalled",
        "_recorded",
        "_siblings",
        "_spent",
        "_started_at",
        "_timer",
        "judge",
        "task",
    )

    def __init__(
        self,
        scoring: Scoring,
        sample: Sample,
        member: Member,
        future: asyncio.Future[Outcome],
        judge: Judge,
        due_at: float,
        siblings: Siblings | None = None,
    ) -> None:
        super().__init__(scoring, sample, member, future)
        self.judge = judge
        self._siblings = siblings
        self._due_at = due_at
        self._started_at = scoring.now()
        self._asked: dict[_Asked, None] = {}
        self._spent = NOTHING
        self._recalled = False
        self._recorded = False
        self._loop = asyncio.get_running_loop()
        self.task = self._loop.create_task(self._run())
        self._timer = self._loop.call_at(due_at, self._expire)
        self.task.add_done_callback(self._ended)
        future.add_done_callback(self._done)

    async def __call__(self, call: Call[T]) -> Answer[T]:
        """Ask; see `judges.base.Ask`. Raises `EngineError` in any other event loop than the engine's."""
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("a judge may ask only in the engine's event loop, not in another loop or thread")
        try:
            return await self._ask(call)
        except CallFailed:
            # A refused call does not wait. Without this, a judge that asks until it gets an answer would block the
            # event loop, its own deadline included.
            await asyncio.sleep(0)
            raise

    async def with_siblings(self, judge: GroupJudge) -> Verdict:
        """Be compared with the siblings; see `judges.base.Ask`."""
        now, batch = self._scoring.now(), self.member.batch
        begin_at = (now + self._due_at) / 2
        if batch.cutoff is not None:
            begin_at = min(begin_at, max(now, batch.started_at + batch.cutoff.after_s))
        if self._siblings is None:
            self._siblings = Siblings()
            self._siblings.add(self)
        return await self._siblings.compare(self, judge, begin_at)

    def skip(self, judge: Judge) -> None:
        """See `judges.base.Ask`."""
        if self._siblings is not None:
            self._siblings.skip(self, judge)

    def share(self, asked: Judging) -> None:
        """Take over from a sibling, which has asked for both, whether the answer comes from the journal."""
        self._recalled = self._recalled or asked._recalled

    async def _ask(self, call: Call[T]) -> Answer[T]:
        scoring = self._scoring
        self._check()
        keys, sources = scoring.keys(call), scoring.sources
        if keys:
            known = await self._recall(call, keys)
            if known is not None:
                self._recalled = True
                found = _verdict_of(known, call.name)
                if found is not None:
                    # Without a row, a step would have too few samples in the journal, and the mean of the others.
                    self._recorded = True
                    await self._record(keys.get(known.source), Scored(replace(found, cached=True)))
                # As after a failure: the journal may answer without waiting.
                await asyncio.sleep(0)
                return known
            self._check()
        asked = _Asked(scoring, self.member)
        self._asked[asked] = None
        try:
            asked.start(call, self._due_at)
            result = await asked.result
        finally:
            self._asked.pop(asked, None)
            self._spent += asked.spent()
            asked.drop()
        if isinstance(result, Unanswered) and result.reason == ENDS_RUN:
            self.fail(BudgetSpent(result.detail))
        if scoring.journal is not None:
            self._recorded = True
            outcome = _outcome_of(result, call)
            if outcome is not None:
                await self._record(scoring.key_of(call, result, keys, sources), outcome, asked.history)
        if isinstance(result, Unanswered):
            raise CallFailed(result)
        return result

    def _check(self) -> None:
        """Raise `CallFailed` if nothing may be asked any more."""
        if self.over or self._scoring.now() >= self._due_at:
            raise CallFailed(Unanswered("deadline", "the call was made after the deadline of its sample"))

    async def _recall(self, call: Call[T], keys: Mapping[str, str]) -> Answer[T] | None:
        batch = self.member.batch
        batch.lookups += 1
        try:
            return await self._scoring.recall(call, self.sample, keys, self._due_at)
        except JournalError as error:
            self.fail(error)
            raise
        finally:
            batch.lookups -= 1
            if not batch.lookups:
                self._scoring.dispatcher.look_again()

    async def _run(self) -> None:
        outcome: Outcome
        try:
            outcome = scored(await self.judge.judge(self.sample, self), self.judge)
        except asyncio.CancelledError:
            # `asyncio.run` cancels all tasks at its end, the caller a few steps later.
            self.give_up("bug", "the judge was cancelled by another task")
            raise
        except (KeyboardInterrupt, GeneratorExit):
            # A coroutine whose event loop was closed ends with GeneratorExit.
            raise
        except BaseException as error:
            if self.over:
                return
            outcome = failure(error, self.judge, self._scoring.bugs)
        if self.over:
            return
        outcome = self._with_spent(outcome)
        if self._scoring.journal is not None and not self._recorded and outcome.failure is not None:
            # No call was made, for example for an empty response; the journal records all samples.
            try:
                await self._record(None, outcome)
            except JournalError:
                return
        else:
            # Also if a sibling has made its call.
            self._note_whole(outcome)
        self.end(outcome)

    async def _record(self, key: str | None, outcome: Outcome, history: Sequence[PastAttempt] = ()) -> None:
        """Record an outcome. Raises `JournalError`, and passes it to the caller of the engine."""
        try:
            await self._scoring.record(key, self.sample, outcome, history, self._due_at)
        except JournalError as error:
            self.fail(error)
            raise

    def _note_whole(self, outcome: Outcome) -> None:
        """Record the outcome of a judge of judges. Its calls are recorded already, each with its cost."""
        if isinstance(self.judge, Leaf):
            return
        own: dict[str, Any] = {
            "judge": self.judge.name,
            "source": "",
            "spent": Spent(latency_s=self._total().latency_s),
        }
        if isinstance(outcome, Failed):
            self._scoring.note(self.sample, replace(outcome, **own))
        else:
            self._scoring.note(self.sample, Scored(replace(outcome.verdict, model="", **own)))

    def fail(self, error: Exception) -> None:
        super().fail(error)
        self._stop()

    def _with_spent(self, outcome: Outcome) -> Outcome:
        spent = self._total()
        if isinstance(outcome, Failed):
            return replace(outcome, spent=spent)
        # An outcome from the journal may still have paid attempts of other calls.
        cached = outcome.verdict.cached and self._recalled and not spent.attempts
        return Scored(replace(outcome.verdict, cached=cached, spent=NOTHING if cached else spent))

    def _total(self) -> Spent:
        """What its calls took, and the time since it was submitted."""
        asked = sum((asked.spent() for asked in self._asked), self._spent)
        return replace(asked, latency_s=self._scoring.now() - self._started_at)

    def end(self, outcome: Outcome) -> None:
        super().end(outcome)
        self._stop()

    def give_up(self, reason: str, detail: str, *, steps: int = STEPS_TO_END) -> None:
        """End it with a failure, unless it ends by itself within `steps` steps of the event loop."""
        if self.over:
            return
        if steps:
            self._loop.call_soon(lambda: self.give_up(reason, detail, steps=steps - 1))
        else:
            outcome = self._with_spent(Failed(Cause.INFRA, reason, detail, judge=self.judge.name))
            if not self._recorded:
                self._scoring.note(self.sample, outcome)
            else:
                self._note_whole(outcome)
            self.end(outcome)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Ensure an outcome, whatever ended the task."""
        if not (self.over or task.cancelled()):
            error = task.exception()
            self.give_up("bug", f"the judge was ended by a {type(error).__name__}", steps=0)

    def _expire(self) -> None:
        for asked in list(self._asked):
            asked.expire()
        waited_s = self._scoring.now() - self._started_at
        self.give_up("deadline", f"judge {self.judge.name} had not ended after {waited_s:.1f} s")

    def _done(self, _: object) -> None:
        if not self.over:
            # The caller cancelled it.
            self.leave()
            self._stop()

    def _stop(self) -> None:
        if self._siblings is not None:
            self._siblings.remove(self)
        self._timer.cancel()
        for asked in list(self._asked):
            asked.drop()
        if self.task is not asyncio.current_task():
            self.task.cancel()


class _Asked(FollowedCall):
    """One running call of a judge."""

    def __init__(self, scoring: Scoring, member: Member) -> None:
        super().__init__(scoring.dispatcher, member)
        self._scoring = scoring
        self.history: tuple[PastAttempt, ...] = ()
        """Its attempts, once it has ended; empty without a journal."""

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        # The job forgets its attempts when its batch does not need them any more.
        if self._job is not None and self._scoring.journal is not None:
            self.history = history_of(self._job, self._scoring.now())
        super().ended(result)

    def spent(self) -> Spent:
        """What it has taken so far."""
        if self._job is not None:
            return self._job.spent(self._scoring.now())
        return NOTHING if self.result.cancelled() or not self.over else self.result.result().spent

    def expire(self) -> None:
        """Fail it at the deadline of its sample."""
        if self._job is not None:
            self._scoring.dispatcher.expire(self._job)


def _outcome_of(result: Answer[Any] | Unanswered, call: Call[Any]) -> Outcome | None:
    """The outcome to record for the result of a call; None for an answer that is no verdict."""
    if isinstance(result, Answer):
        found = _verdict_of(result, call.name)
        return None if found is None else Scored(found)
    try:
        instead = None if call.instead is None else call.instead(result)
    except Exception:
        instead = None
    return Scored(instead) if isinstance(instead, Verdict) else failed(result, call.name)


def _verdict_of(answer: Answer[Any], name: str) -> Verdict | None:
    """The verdict of the judge `name` in an answer; None for an answer that is no verdict."""
    return judged(answer, name) if isinstance(answer.value, Verdict) else None
