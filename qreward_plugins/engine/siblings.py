"""Lets the samples of a group meet at a judge that compares them (`judges.base.GroupJudge`).

A sample comes to such a judge when its own tree of judges gets there, for example after a gate. Its siblings may come
later, take another way, or have ended. So the comparison begins when each of them has come, has ended, or has skipped
the judge; at the latest at half of the time that is left, because a sibling whose source hangs would take the rest.
Whoever comes after that is not compared, and fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..judges.base import GroupJudge, Judge, JudgeFailed
from ..samples import Cause, Failed, Verdict

if TYPE_CHECKING:
    from .judging import Judging

_LATE = "its siblings were compared before it came to the judge"


class Siblings:
    """The samples of one group in one batch that are still judged, in their order."""

    def __init__(self) -> None:
        self._members: dict[Judging, set[str]] = {}
        """With the names of the judges that each one skips."""
        self._meetings: dict[str, _Meeting] = {}

    def add(self, member: Judging) -> None:
        """Add a sample. All are added before the first one is judged."""
        self._members[member] = set()

    def remove(self, member: Judging) -> None:
        """Take away a sample that has ended."""
        if self._members.pop(member, None) is not None:
            for meeting in self._meetings.values():
                meeting.leave(member)
            self._look()

    def skip(self, member: Judging, judge: Judge) -> None:
        """Note that a sample comes neither to a judge nor to those that it awaits."""
        if member in self._members:
            self._members[member].update(_comparing(judge))
            self._look()

    async def meet(self, member: Judging, judge: GroupJudge, due_at: float) -> Verdict:
        """Return the verdict of `judge` on a sample, once it has compared the siblings. `due_at`: the deadline of the
        sample, on the event loop's clock. Raises `JudgeFailed`.
        """
        meeting = self._meetings.get(judge.name)
        if meeting is None:
            meeting = self._meetings[judge.name] = _Meeting(judge, due_at)
        verdict = meeting.join(member)
        self._look()
        return await verdict

    def _look(self) -> None:
        for name, meeting in self._meetings.items():
            if all(member in meeting.came or name in skipped for member, skipped in self._members.items()):
                meeting.begin()


class _Meeting:
    """The samples that have come to one judge."""

    def __init__(self, judge: GroupJudge, due_at: float) -> None:
        self._judge = judge
        self.came: dict[Judging, asyncio.Future[Verdict]] = {}
        self._task: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at((loop.time() + due_at) / 2, self.begin)

    def join(self, member: Judging) -> asyncio.Future[Verdict]:
        """The verdict of a sample. A sample may come twice, by two ways through its tree."""
        if member in self.came:
            return asyncio.shield(self.came[member])
        future = asyncio.get_running_loop().create_future()
        if self._task is not None:
            future.set_exception(_failure(self._judge, "late", _LATE))
            return future
        self.came[member] = future
        return future

    def leave(self, member: Judging) -> None:
        """Forget a sample that has ended; end the comparison after the last one."""
        future = self.came.get(member)
        if future is not None:
            future.cancel()
        if all(each.over for each in self.came):
            self._timer.cancel()
            if self._task is not None:
                self._task.cancel()

    def begin(self) -> None:
        """Compare those who have come, unless that has begun."""
        there = [member for member, future in self.came.items() if not future.done()]
        if self._task is None and there:
            self._timer.cancel()
            self._task = asyncio.get_running_loop().create_task(self._compare(there))

    async def _compare(self, members: Sequence[Judging]) -> None:
        """Judge a group; its calls belong to its first sample. If that one is cancelled, they are made for the next."""
        results: Sequence[Verdict | Failed | BaseException] = ()
        while asking := next((member for member in members if not member.over), None):
            try:
                results = await self._judge.judge_group([member.sample for member in members], asking)
                if len(results) != len(members):
                    raise TypeError(
                        f"judge {self._judge.name} returned {len(results)} verdicts on {len(members)} samples"
                    )
                break
            except asyncio.CancelledError:
                if not asking.over:
                    raise
            except Exception as error:
                results = [error] * len(members)
                break
        for member, result in zip(members, results, strict=False):
            future = self.came[member]
            if future.done():
                continue
            if isinstance(result, Verdict):
                if asking is not None:
                    member.share(asking)
                future.set_result(result)
            else:
                future.set_exception(JudgeFailed(result) if isinstance(result, Failed) else result)


def _failure(judge: Judge, reason: str, detail: str) -> JudgeFailed:
    return JudgeFailed(Failed(Cause.INFRA, reason, detail, judge=judge.name))


def _comparing(judge: Judge) -> set[str]:
    """The names of the judges in a tree that compare siblings."""
    own = {judge.name} if isinstance(judge, GroupJudge) else set()
    return own.union(*(_comparing(part) for part in judge.parts))
