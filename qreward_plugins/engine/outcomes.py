"""A sample until it has its outcome, and the outcome of what its judge returned or raised.

Nearly all samples have a judge that is a leaf. Such a sample makes one call and needs no task (`Calling`).

A judge is foreign code: it may return anything and raise anything. So its verdicts are checked here, and a bug costs
one sample.
"""

from __future__ import annotations

import asyncio
import logging
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeGuard

from ..errors import BudgetSpent
from ..judges.base import Judge, JudgeFailed
from ..judges.leaf import Leaf, failed, judged
from ..observers import BugLog, SampleDropped, SampleEnded
from ..quotas.budgets import ENDS_RUN
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..scheduling.batches import Member
from ..scheduling.calls import Answer, CallFailed, Unanswered
from ..scheduling.jobs import Job

if TYPE_CHECKING:
    from .scoring import Scoring

_log = logging.getLogger("qreward_plugins.engine")

_TEXTS = ("rationale", "judge", "source", "model")


class Pending:
    """A sample without an outcome yet: a member of its batch, with the future that its caller awaits."""

    __slots__ = ("_scoring", "future", "member", "over", "sample")

    def __init__(self, scoring: Scoring, sample: Sample, member: Member, future: asyncio.Future[Outcome]) -> None:
        self._scoring = scoring
        self.sample = sample
        self.future = future
        self.member = member
        self.over = False

    def end(self, outcome: Outcome) -> None:
        """Give the outcome to the caller, unless the sample has one already."""
        if self.over:
            return
        self.over = True
        if not self.future.done():
            self.future.set_result(outcome)
        self._scoring.statistics.sample_ended(outcome)
        # Failures are logged.
        self._scoring.emit(SampleEnded, self.sample, outcome, always=outcome.failure is not None)
        self._scoring.batches.leave(self.member, scored=isinstance(outcome, Scored))

    def fail(self, error: Exception) -> None:
        """End the sample without an outcome, and raise `error` to its caller."""
        if not self.future.done():
            self.future.set_exception(error)
        self.leave()

    def leave(self) -> None:
        """End the sample without an outcome, because its caller no longer waits."""
        if not self.over:
            self.over = True
            self._scoring.emit(SampleDropped, self.sample)
            self._scoring.batches.leave(self.member, scored=False)


class Calling(Pending):
    """A sample whose judge is a leaf: the caller of its one call."""

    __slots__ = ("_job", "_judge")

    def __init__(
        self, scoring: Scoring, sample: Sample, member: Member, future: asyncio.Future[Outcome], judge: Leaf
    ) -> None:
        super().__init__(scoring, sample, member, future)
        self._judge = judge
        self._job: Job | None = None

    def start(self, due_at: float) -> None:
        """Make the call."""
        try:
            verdict = self._judge.screened(self.sample)
            if verdict is not None:
                self.end(scored(verdict, self._judge))
                return
            call = self._judge.call(self.sample)
        except Exception as error:
            self.end(failure(error, self._judge, self._scoring.bugs))
            return
        self._job = self._scoring.dispatcher.submit(call, self, member=self.member, deadline_at=due_at)
        if self._job is not None:
            self.future.add_done_callback(self._done)

    def ended(self, result: Answer[Any] | Unanswered) -> None:
        # The job refers to this object; memory must not wait for the garbage collector.
        self._job = None
        self.future.remove_done_callback(self._done)
        if isinstance(result, Unanswered) and result.reason == ENDS_RUN:
            self.fail(BudgetSpent(result.detail))
            return
        judge = self._judge
        outcome: Outcome
        try:
            outcome = scored(judged(result, judge.name) if isinstance(result, Answer) else judge.missing(result), judge)
        except Exception as error:
            outcome = failure(error, judge, self._scoring.bugs)
        self.end(outcome)

    def _done(self, _: object) -> None:
        """Drop the call if the future was cancelled."""
        job, self._job = self._job, None
        if job is not None:
            self._scoring.dispatcher.drop(job)
        self.leave()


def scored(verdict: object, judge: Judge) -> Scored:
    """The outcome of a verdict. Raises JudgeFailed for anything else, and for fields of a wrong type."""
    if not isinstance(verdict, Verdict):
        problem = f"it returned a {type(verdict).__name__}; it must return a Verdict"
    elif wrong := _wrong_fields(verdict):
        problem = f"it returned a Verdict with a wrong {wrong}"
    else:
        return Scored(verdict)
    raise JudgeFailed(Failed(Cause.INFRA, "bug", problem, judge=judge.name))


def _wrong_fields(verdict: Any) -> str:
    """The fields of a verdict that have a wrong type; "" if there are none."""
    failed_with = verdict.failure
    if failed_with is not None and not _is_failed(failed_with):
        return "failure"
    if (verdict.basis == "floor") != (failed_with is not None):
        return "basis: it must be 'floor' exactly if `failure` is set"
    wrong: list[str] = []
    # The usual types first: this runs for every sample.
    if not type(verdict.rationale) is type(verdict.judge) is type(verdict.source) is type(verdict.model) is str:
        texts = (verdict.rationale, verdict.judge, verdict.source, verdict.model)
        wrong = [name for name, text in zip(_TEXTS, texts, strict=True) if not isinstance(text, str)]
    if not isinstance(verdict.correct, (bool, NoneType)):
        wrong.append("correct")
    if verdict.components and not all(isinstance(name, str) for name in verdict.components):
        wrong.append("name of a component")
    return ", ".join(wrong)


def _is_failed(value: object) -> TypeGuard[Failed]:
    return (
        isinstance(value, Failed)
        and isinstance(value.cause, Cause)
        and all(isinstance(text, str) for text in (value.reason, value.detail, value.judge, value.source))
    )


def failure(error: BaseException, judge: Judge, bugs: BugLog) -> Failed:
    """The failure of a sample whose judge raised `error`. A bug in a judge costs its sample, not the run."""
    if isinstance(error, JudgeFailed):
        raised = getattr(error, "failed", None)
        if _is_failed(raised):
            return raised
    elif isinstance(error, CallFailed):
        result = getattr(error, "why", None)
        if isinstance(result, Unanswered):
            return failed(result, judge.name)
    return Failed(Cause.INFRA, "bug", bugs.log(error, f"judge {judge.name}", _log), judge=judge.name)
