"""Lets the samples of a group be compared by a judge (`judges.base.GroupJudge`).

A sample comes to such a judge when its own tree of judges gets there, for example after a gate. Its siblings may come
later, take another way, or have ended. So the comparison begins when each of them has come, has ended, or has skipped
the judge. It begins at half of the time that is left at the latest, because a sibling whose source hangs would take the
rest, and when the batch stops waiting (`Cutoff`). A sample that arrives later fails (`infra/late`).
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
        self._comparisons: dict[str, _Comparison] = {}

    def add(self, member: Judging) -> None:
        """Add a sample. All are added before the first one is judged."""
        self._members[member] = set()

    def remove(self, member: Judging) -> None:
        """Take away a sample that has ended."""
        if self._members.pop(member, None) is None:
            return
        for comparison in self._comparisons.values():
            comparison.leave(member)
            if not self._members:
                comparison.close()
        self._look()

    def skip(self, member: Judging, judge: Judge) -> None:
        """Note that a sample comes neither to a judge nor to those that it awaits."""
        if member in self._members and judge.comparing:
            self._members[member].update(judge.comparing)
            self._look()

    async def compare(self, member: Judging, judge: GroupJudge, begin_at: float) -> Verdict:
        """Return the verdict of `judge` on a sample, once it has compared the siblings; it begins at `begin_at` at the
        latest, on the event loop's clock. Raises `JudgeFailed`.
        """
        comparison = self._comparisons.get(judge.name)
        if comparison is None:
            comparison = self._comparisons[judge.name] = _Comparison(judge, begin_at)
        verdict = comparison.join(member)
        self._look()
        return await verdict

    def _look(self) -> None:
        for name, comparison in self._comparisons.items():
            if all(member in comparison.members or name in skipped for member, skipped in self._members.items()):
                comparison.begin()


class _Comparison:
    """The samples that have come to one judge."""

    def __init__(self, judge: GroupJudge, begin_at: float) -> None:
        self._judge = judge
        self.members: dict[Judging, asyncio.Future[Verdict]] = {}
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_at(begin_at, self.begin)

    def join(self, member: Judging) -> asyncio.Future[Verdict]:
        """The verdict of a sample. A sample may come twice, by two ways through its tree."""
        future = self.members.get(member)
        if future is None:
            future = asyncio.get_running_loop().create_future()
            # Nobody may wait for it any more.
            future.add_done_callback(lambda done: done.cancelled() or done.exception())
            if self._task is None:
                self.members[member] = future
            else:
                future.set_exception(JudgeFailed(Failed(Cause.INFRA, "late", _LATE, judge=self._judge.name)))
        # A cancelled wait leaves it to the next one.
        return asyncio.shield(future)

    def leave(self, member: Judging) -> None:
        """Forget a sample that has ended."""
        if member in self.members:
            self.members[member].cancel()

    def close(self) -> None:
        """End the comparison: no sample is left."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def begin(self) -> None:
        """Compare those who have come, unless that has begun."""
        there = [member for member in self.members if not member.over]
        if self._task is None and there:
            self._timer.cancel()
            self._task = asyncio.get_running_loop().create_task(self._compare(there))

    async def _compare(self, members: Sequence[Judging]) -> None:
        results: Sequence[object] = ()
        try:
            results = await self._judged(members)
        except BaseException as error:
            results = [error] * len(members)
            if isinstance(error, (KeyboardInterrupt, GeneratorExit, asyncio.CancelledError)):
                raise
        finally:
            for place, member in enumerate(members):
                self._settle(self.members[member], results[place] if place < len(results) else None)

    async def _judged(self, members: Sequence[Judging]) -> Sequence[object]:
        """Judge a group; its calls belong to its first sample. If that one is cancelled, they are made for the next."""
        while asking := next((member for member in members if not member.over), None):
            try:
                results = await self._judge.judge_group([member.sample for member in members], asking)
            except asyncio.CancelledError:
                if asking in self.members and not self.members[asking].done():
                    raise
            else:
                for member in members:
                    member.share(asking)
                return list(results)
        return ()

    def _settle(self, future: asyncio.Future[Verdict], result: object) -> None:
        if future.done():
            return
        if isinstance(result, Verdict):
            future.set_result(result)
        elif isinstance(result, Failed):
            future.set_exception(JudgeFailed(result))
        elif isinstance(result, Exception):
            future.set_exception(result)
        else:
            kind = type(result).__name__
            future.set_exception(TypeError(f"judge {self._judge.name} gave a {kind} for a sample of a group"))
