"""The keeper divides every shared limit of a job between the workers. It knows no network: a worker calls `exchange`.

Workers poll the keeper with reports (long polling). The keeper holds a report until it has an answer: a raised share, a
recalled share, news of a source, or the end of `HOLD_S`. An idle worker therefore learns of changes at once. The keeper
answers the latest report of a worker only, and the worker accepts no other answer.

A share is valid for `TTL_S` after its worker sent the report that was last answered. The keeper waits for `TTL_S` and
`MARGIN_S` after that report arrived, which is later, and then removes the silent worker. What the worker may have spent
stays counted as spent.

A restarted keeper does not know what was spent. It counts every limit as fully spent, less what workers report to hold,
for `TTL_S` (after that no worker spends unreported shares) and one window more.

The keeper also learns undeclared limits (learning.py), and lets one worker test a source that throttles.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, NamedTuple

from ..quotas.window_limit import FOR_GOOD_S
from .division import ROUNDING, Division, WaitingLine
from .learning import Learner
from .messages import Answer, Grant, Report, SourceAnswer, SourceNews, SourceReport

if TYPE_CHECKING:
    # The process of a machine's keeper imports this module, and must stay small.
    from ..quotas.shared import Resource

TTL_S = 10.0
"""Seconds for which a share is valid after the report that was last answered."""
HOLD_S = 3.0
"""Longest time in seconds that the keeper holds a report before it answers."""
MARGIN_S = 1.0
"""Seconds that the keeper waits after a share has expired before it gives the share to other workers."""
RECALL_EVERY_S = 0.1
"""Least time in seconds between two recalls at one source; longer in proportion above `RECALL_WORKERS` workers."""
RECALL_WORKERS = 256
BACK_WITHIN_S = 0.5
"""Seconds within which an answered worker is expected to report again."""
REMEMBERED = 65_536
"""Number of workers whose last report number is kept, to detect reports that arrive out of order."""
LONGEST_NEWS_S = 60.0
"""Most seconds for which a pause or an open circuit is relayed; workers discover a longer one by themselves."""


class _Held(NamedTuple):
    """A report that waits for its answer, and since when."""

    number: int
    since: float
    answered: asyncio.Future[Answer | None]


class _Shared:
    """The state of one source: a division for each limit, the workers, and the news of the source."""

    def __init__(self) -> None:
        self.divisions: dict[Resource, Division] = {}
        self.learners: dict[Resource, Learner] = {}
        """Learns the limits that workers do not declare, once one of them has heard of any."""
        self.workers: dict[str, None] = {}
        self.pause_until = -math.inf
        self.open_until = -math.inf
        self.tester, self.tested_until = "", -math.inf
        """The worker that probes the source while it throttles and states no time, and until when the others wait."""
        self.recalled_at = -math.inf
        self.line: dict[str, None] = {}
        """Workers that cannot send because a share is too small, in order of arrival."""

    def has_news(self, now: float) -> bool:
        """Whether there is news that every worker should have."""
        return max(self.pause_until, self.open_until, self.tested_until) > now

    def is_empty(self, now: float) -> bool:
        """Whether a new state would say the same: nothing is spent, and no pause is left."""
        known = max(self.pause_until, self.open_until) > now
        return not known and all(
            # The run that has spent it is over.
            division.window_s >= FOR_GOOD_S or division.free(now) >= division.limit - ROUNDING
            for division in self.divisions.values()
        )

    def report(self, worker: str, now: float) -> None:
        """Add a worker that reported to the line if a share of it is too small, otherwise remove it."""
        if any(division.lacks(worker, now) for division in self.divisions.values()):
            self.line.setdefault(worker)
        else:
            self.line.pop(worker, None)

    def raised(self, worker: str, now: float) -> None:
        """Remove a worker whose share was raised from the line if it can send now, and start its turn."""
        if worker in self.line and not any(division.lacks(worker, now) for division in self.divisions.values()):
            del self.line[worker]
            for division in self.divisions.values():
                division.begin_turn(worker, now)


class Keeper:
    """Divides the limits of all sources between the workers, in the running event loop, whose clock is the keeper's.

    `first` says that no earlier keeper has left shares or spending behind that may still count.
    """

    def __init__(self, *, first: bool) -> None:
        self.expired_at = -math.inf if first else asyncio.get_running_loop().time() + TTL_S + MARGIN_S
        """When all shares of earlier keepers have expired; minus infinity if there are none."""
        self.longest_window_s = 0.0
        """The longest window of all limits that it has divided, in seconds."""
        self._sources: dict[str, _Shared] = {}
        self._numbers: dict[str, int] = {}
        self._reported_at: dict[str, float] = {}  # in order of the last report, oldest first
        self._sources_of: dict[str, tuple[str, ...]] = {}
        self._held_reports: dict[str, _Held] = {}
        self._recalled: dict[tuple[str, str, Resource], Grant] = {}
        self._to_answer: dict[str, None] = {}
        self._news = 0  # number of news items for all workers
        self._answered: dict[str, tuple[int, int]] = {}  # (report last answered, news items sent with it)
        self._expected: dict[str, float] = {}  # when the worker was answered, oldest first
        self._wake: asyncio.TimerHandle | None = None

    def charges_nothing(self, now: float) -> bool:
        """Return whether no worker reports and nothing counts as spent, so that a first keeper may follow this one.
        What counts of an earlier keeper at sources that nobody reported here is not known: see `expired_at`.
        """
        self._expire(now)
        return not self._reported_at and not self._sources

    async def exchange(self, report: Report) -> Answer | None:
        """Record a report and wait for its answer; None if a newer report of its worker came, or the worker left or was
        removed.
        """
        loop = asyncio.get_running_loop()
        worker, number, now = report.worker, report.number, loop.time()
        if number <= self._numbers.get(worker, -1):
            return None  # a newer one came, or this one comes twice
        self._numbers.pop(worker, None)
        self._numbers[worker] = number
        if len(self._numbers) > REMEMBERED:
            del self._numbers[next(iter(self._numbers))]
        self._supersede(worker)
        self._report(report, now)
        held = _Held(number, now, loop.create_future())
        if report.leaves:
            held.answered.set_result(None)
        else:
            self._held_reports[worker] = held
        self._pump()
        return await held.answered

    def _supersede(self, worker: str) -> None:
        """Answer the report of a worker that is held with nothing."""
        held = self._held_reports.pop(worker, None)
        if held is not None and not held.answered.done():
            held.answered.set_result(None)

    def _pump(self) -> None:
        """Answer the reports whose answers are due now, and do so again when the next one may be."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._expire(now)
        for key, shared in self._sources.items():
            line = WaitingLine(shared.line, self._held_reports, self._expected)
            for division in shared.divisions.values():
                for worker in division.raise_shares(now, line):
                    self._to_answer[worker] = None
                    shared.raised(worker, now)
            self._learn(shared, now)
            if now - shared.recalled_at >= RECALL_EVERY_S * max(1.0, len(shared.workers) / RECALL_WORKERS):
                shared.recalled_at = now
                self._recall(key, shared, line, now)
        for worker, held in self._held_reports.items():
            if now - held.since < HOLD_S:
                break
            self._to_answer[worker] = None
        for worker in self._to_answer:
            if worker in self._held_reports:
                held = self._held_reports.pop(worker)
                self._expected.pop(worker, None)
                self._expected[worker] = now
                self._answered[worker] = held.number, self._news
                answer = self._answer(worker, held.number, now)
                if not held.answered.done():
                    held.answered.set_result(answer)
        self._to_answer.clear()
        self._recalled.clear()
        if self._wake is not None:
            self._wake.cancel()
        self._wake = loop.call_at(max(self._wake_at(now), now + 1e-3), self._pump)

    def _wake_at(self, now: float) -> float:
        """Return the latest time at which an answer may be due."""
        times = [now + HOLD_S]
        if self._held_reports:
            times.append(next(iter(self._held_reports.values())).since + HOLD_S)
        for shared in self._sources.values():
            times += [learner.settles_at for learner in shared.learners.values()]
            for division in shared.divisions.values():
                if division.contended(now):
                    times += [division.next_change(now), now + RECALL_EVERY_S]
        return max(now, min(times))

    # Reports

    def _report(self, report: Report, now: float) -> None:
        worker = report.worker
        self._reported_at.pop(worker, None)
        self._expected.pop(worker, None)
        self._reported_at[worker] = now
        for key in self._sources_of.get(worker, ()):
            if key not in report.sources:
                self._leave(worker, key, now, silent=True)  # it may have spent its share since its last report
        self._sources_of[worker] = tuple(report.sources)
        answered, news = self._answered.get(worker, (0, 0))
        # The worker sent this report before it got the last answer, so that answer had no effect.
        behind = answered > report.accepted or news < self._news
        for key, source_report in report.sources.items():
            self._record(worker, key, source_report, now)
            if behind and self._sources[key].has_news(now):
                self._to_answer[worker] = None
        if not behind:
            self._answered[worker] = answered, self._news  # the newest items are its own
        if report.leaves:
            del self._reported_at[worker]
            self._forget(worker, now, silent=False)

    def _record(self, worker: str, key: str, source_report: SourceReport, now: float) -> None:
        shared = self._sources.get(key)
        if shared is None:
            shared = self._sources[key] = _Shared()
        new = worker not in shared.workers
        shared.workers[worker] = None
        for resource, (limit, window_s) in source_report.limits.items():
            # What processes of a run have spent that left before an earlier keeper died is not known.
            counts_s = window_s if window_s < FOR_GOOD_S else 0.0
            self.longest_window_s = max(self.longest_window_s, counts_s)
            division = shared.divisions.get(resource)
            if division is None:
                division = shared.divisions[resource] = Division(limit, window_s)
                if self.expired_at > -math.inf and limit < math.inf:
                    division.hold(self.expired_at + counts_s)
            heard = source_report.heard.get(resource)
            if heard is not None:
                limit, window_s = self._learner(shared, resource, limit, window_s, now).allows
            division.report(worker, source_report.parts[resource], now, limit=limit, window_s=window_s)
            if heard is not None:
                shared.learners[resource].hear(worker, heard, now)
                if heard.throttled or heard.probed:
                    self._to_answer[worker] = None  # more may follow, and a report that is held delays the next one
            elif resource in shared.learners:
                shared.learners[resource].leave(worker)
            division.raise_to_fair(worker, now)
            if division.share(worker) > source_report.parts[resource].share:
                self._to_answer[worker] = None
        for resource, division in shared.divisions.items():
            if resource not in source_report.limits:
                division.drop(worker, now, silent=True)  # this limit is declared no more
        for resource, learner in shared.learners.items():
            told = source_report.limits.get(resource)
            if told != learner.allows if worker in learner.workers else not (told or "burst" in source_report.limits):
                self._to_answer[worker] = None
        shared.report(worker, now)
        self._record_news(worker, shared, source_report.news, now)
        if new:
            # The first answer comes at once: with it the worker's shares become valid.
            self._to_answer[worker] = None

    def _record_news(self, worker: str, shared: _Shared, news: SourceNews, now: float) -> None:
        changed = False
        pause_until, open_until = now + min(news.pause_s, LONGEST_NEWS_S), now + min(news.open_s, LONGEST_NEWS_S)
        if news.pause_s > 0 and pause_until > shared.pause_until + RECALL_EVERY_S:
            shared.pause_until, changed = pause_until, True
        if news.recovered:
            shared.open_until = -math.inf
        elif news.open_s > 0 and open_until > shared.open_until + RECALL_EVERY_S:
            shared.open_until, changed = open_until, True
        if news.tested_s > 0 and (shared.tester == worker or now >= shared.tested_until):
            changed = changed or now + news.tested_s > shared.tested_until + RECALL_EVERY_S
            shared.tester, shared.tested_until = worker, now + news.tested_s
        elif shared.tester == worker and news.tested_s <= 0:
            shared.tester, shared.pause_until, shared.tested_until, changed = "", -math.inf, -math.inf, True
        if changed:
            self._news += 1
            self._to_answer.update(dict.fromkeys(other for other in shared.workers if other != worker))
        if news.tested_s > 0:
            self._to_answer[worker] = None  # the end of the test must not wait until this report is answered

    def _learner(self, shared: _Shared, resource: Resource, told: float, window_s: float, now: float) -> Learner:
        """Return the learner of a limit. A new one goes on with what the worker was told by an earlier keeper."""
        learner = shared.learners.get(resource)
        if learner is None:
            division = shared.divisions[resource]
            learner = shared.learners[resource] = Learner(division, resource, told, window_s, now)
            self._to_answer.update(shared.workers)
        return learner

    def _learn(self, shared: _Shared, now: float) -> None:
        """Tell the workers what was learned, and one of them that it is to probe."""
        for learner in shared.learners.values():
            if learner.settle(shared.workers, now):
                self._to_answer.update(shared.workers)
            self._to_answer.update(dict.fromkeys(learner.outdated(now)))
            if shared.pause_until <= now and (worker := learner.probe(self._held_reports, now)):
                self._to_answer[worker] = None

    def _recall(self, key: str, shared: _Shared, line: WaitingLine, now: float) -> None:
        for resource, division in shared.divisions.items():
            if division.contended(now):
                for worker, grant in division.recalls(now, line).items():
                    self._recalled[worker, key, resource] = grant
                    self._to_answer[worker] = None

    # Answers

    def _answer(self, worker: str, number: int, now: float) -> Answer:
        sources = {}
        for key in self._sources_of[worker]:
            shared = self._sources[key]
            grants: dict[Resource, Grant] = {
                resource: self._recalled.get((worker, key, resource)) or division.grant(worker, now)
                for resource, division in shared.divisions.items()
                if worker in division and division.limit < math.inf
            }
            news = SourceNews(
                max(0.0, shared.pause_until - now),
                max(0.0, shared.open_until - now),
                tested_s=max(0.0, shared.tested_until - now) if shared.tester != worker else 0.0,
            )
            learned = {resource: learner.tell(worker) for resource, learner in shared.learners.items()}
            sources[key] = SourceAnswer(len(shared.workers), grants, news, learned)
        return Answer(number, sources)

    # Removal of workers

    def _expire(self, now: float) -> None:
        unused = [key for key, shared in self._sources.items() if not shared.workers and shared.is_empty(now)]
        for key in unused:
            del self._sources[key]
        while self._expected:
            worker, since = next(iter(self._expected.items()))
            if now - since < BACK_WITHIN_S:
                break
            del self._expected[worker]
        while self._reported_at:
            worker, reported_at = next(iter(self._reported_at.items()))
            if now - reported_at <= TTL_S + MARGIN_S:
                return
            del self._reported_at[worker]
            self._supersede(worker)  # one is held if the keeper's process was stopped for that long
            self._forget(worker, now, silent=True)

    def _forget(self, worker: str, now: float, *, silent: bool) -> None:
        for key in self._sources_of.pop(worker, ()):
            self._leave(worker, key, now, silent=silent)
        self._answered.pop(worker, None)
        self._to_answer.pop(worker, None)
        self._expected.pop(worker, None)

    def _leave(self, worker: str, key: str, now: float, *, silent: bool) -> None:
        """Remove a worker from one source."""
        shared = self._sources[key]
        shared.workers.pop(worker, None)
        shared.line.pop(worker, None)
        if shared.tester == worker:
            shared.tester, shared.tested_until = "", -math.inf
            self._to_answer.update(shared.workers)
        for learner in shared.learners.values():
            learner.leave(worker)
        for division in shared.divisions.values():
            division.drop(worker, now, silent=silent)
