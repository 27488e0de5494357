"""A batch: jobs that a caller waits for together. It knows its cut-off, and which of its jobs ended last.

Samples that are submitted together are one batch. Samples that are submitted one by one share a batch as long as any of
them is under way, because a training step waits for all of them. A batch keeps counts and its last job, but not its
jobs, so that a stream of a million samples needs no more memory.

A batch consists of members, which make calls: mostly one, sometimes several at the same time or one after another. The
cut-off and the report count members.

The report splits the makespan of a batch into parts that add up to it: what its last job waited for, and where. The
history of the last job is followed backwards from the attempt that ended it. An attempt is split into its usual latency
and the excess. A hedge leads to the attempt that it was started beside, because that one was too slow. The time between
two attempts counts for the source that took the job next, by what kept this source from taking it earlier. Time in
which a source answers no request although all its places are taken is that of a straggler: more places would not help.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..observers import BatchEnded, CallEnded, Observers
from ..observers.batch_report import BatchReport, Part, PartKind
from .calls import Answer, Unanswered
from .timers import Alarms

if TYPE_CHECKING:
    from .attempts import Attempt
    from .jobs import Job
    from .upstream import Upstream

_log = logging.getLogger("qreward_plugins.scheduling")

_GAP_WEIGHT = 0.1
"""Weight of the last gap between two single samples in their mean gap."""
_QUIET_AFTER_GAPS = 10.0
_QUIET_AFTER_S = 1.0
"""No more single samples are expected after this many mean gaps, and after this many seconds."""
WaitReason = Literal["", "queue", "quota", "pause"]
"""Why a source takes no request: `queue`, all its concurrency is in use; `quota`, its quota is spent; `pause`, it asked
for a pause, its servers sleep or get other weights, or its circuit is open. "" if it takes requests."""

_REMEMBERED = 8192
"""Number of changes that are remembered; older ones are dropped."""
STRAGGLES_FROM = 1.5
"""Multiple of the expected latency from which an attempt is a straggler."""
_KINDS: Mapping[WaitReason, PartKind] = {"": "queue", "queue": "queue", "quota": "quota", "pause": "pause"}


@dataclass(frozen=True)
class Cutoff:
    """When a batch stops waiting for its last samples: at `after_s` seconds, or later as soon as every group is in.

    A group (the samples of one `group_id`; those without one are a group together) is in when at least the share
    `quorum` of its samples has a reward; samples that failed are not waited for. What is missing then is failed
    (`infra/cutoff`).
    Raises ValueError for `after_s` below 0 or `quorum` outside of 0 to 1.
    """

    after_s: float
    quorum: float = 1.0

    def __post_init__(self) -> None:
        if not self.after_s >= 0:
            raise ValueError(f"after_s is a number of seconds, at least 0, not {self.after_s!r}")
        if not 0 <= self.quorum <= 1:
            raise ValueError(f"quorum is a share from 0 to 1, not {self.quorum!r}")


class Batch:
    """Jobs that a caller waits for together. Times are seconds of the event loop's clock."""

    # The defaults stand in the class: a call on its own is a batch, too, and setting each took a third of making it.
    sealed = False
    """Whether no more jobs will be added."""
    reported = True
    """Whether it has a report, which splits the time of its last job."""
    planned = False
    """Whether its order is not by size (`forecast.windows_order`)."""
    samples = 0
    """Members that made a call."""
    jobs = 0
    scored = 0
    attempts = 0
    hedges = 0
    soft_hedges = 0
    last: Job | None = None
    """The job that ended last so far."""
    cut = False
    """Whether its cut-off has come."""
    lookups = 0
    """Calls whose recorded answers are being looked up. The first jobs of a whole batch wait for them, so that they are
    ordered together."""
    arranged = False
    """Whether its first jobs were put in order. Later ones do not wait for lookups, which may never cease."""
    _gap_s = 0.0
    _open = 0

    def __init__(
        self,
        number: int,
        started_at: float,
        *,
        priority: int = 0,
        cutoff: Cutoff | None = None,
        together: bool = True,
    ) -> None:
        self.together = together
        """Whether its samples were submitted together. Otherwise more may follow."""
        self.number = number
        self.started_at = started_at
        self.priority = priority
        self.cutoff = cutoff
        self.last_at = started_at
        self._added_at = started_at
        self._groups: dict[Hashable, _Group] = {}

    @property
    def done(self) -> bool:
        """Whether all its members have left, and all their jobs have ended."""
        return self._open == 0

    def add(self, job: Job) -> None:
        """Take a job of a member in."""
        self.jobs += 1
        self._open += 1
        if not job.member.calls:
            self.samples += 1
            self._gap_s += _GAP_WEIGHT * (job.submitted_at - self._added_at - self._gap_s)
            self._added_at = job.submitted_at
        job.member.calls += 1

    def quiet(self, now: float) -> bool:
        """Whether no more jobs are expected soon, judging by the gaps between those so far."""
        return self.together or now - self._added_at > max(_QUIET_AFTER_S, _QUIET_AFTER_GAPS * self._gap_s)

    def ended(self, job: Job, now: float, *, dropped: bool) -> None:
        """Note the end of a job. `dropped`: its caller does not want the result."""
        self._open -= 1
        self.attempts += job.attempts
        if dropped or not self.reported:
            job.let_go()
            return
        if self.last is not None:
            self.last.let_go()
        self.last, self.last_at = job, now

    def leave(self, member: Member, *, scored: bool) -> None:
        """Note that a member makes no more calls. `scored`: it has a reward."""
        self._open -= 1
        self.scored += scored and member.calls > 0
        group = self._groups.get(member.group)
        if group is not None and self.cutoff is not None:
            group.scored += scored
            group.expected -= not scored
            if group.scored >= math.ceil(self.cutoff.quorum * group.expected - 1e-9):
                del self._groups[member.group]

    def over(self, now: float) -> bool:
        """Whether its cut-off has come: `after_s` is over, and every group is in."""
        return self.cutoff is not None and not self._groups and now >= self.started_at + self.cutoff.after_s


@dataclass(eq=False, slots=True)
class Member:
    """One thing that a batch waits for, mostly a sample: it makes calls until it leaves. `group` is for the quorum.
    `priority`: that of its calls; None: the batch's. `latency_sensitive`: its calls are hedged early while others wait.
    """

    batch: Batch
    group: Hashable = None
    priority: int | None = None
    latency_sensitive: bool = False
    calls: int = 0


@dataclass
class _Group:
    """A group that is not in yet. `expected`: members that are scored or may still be; `scored`: members that are."""

    expected: int
    scored: int = 0


class Batches:
    """The batches of one dispatcher. `on_cutoff` is called with a batch when its cut-off has come."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        upstreams: Mapping[str, Upstream],
        *,
        on_cutoff: Callable[[Batch], None],
        observers: Observers,
    ) -> None:
        self._loop = loop
        self._observers = observers
        self._upstreams = upstreams
        self._on_cutoff = on_cutoff
        self.newest = -1
        """Number of the newest batch; -1 if there is none."""
        self._of_singles: dict[int, Batch] = {}
        self._cutoffs = Alarms(loop, self._check)

    def new(
        self, groups: Iterable[Hashable] | None = None, *, priority: int = 0, cutoff: Cutoff | None = None
    ) -> Batch:
        """Begin a batch. `groups` has the group of each member that will join it. None: it is no batch of samples. It
        has no report, and its members neither join nor leave.

        Higher `priority` goes first, whatever came earlier; of batches with the same one, the earlier goes first, as
        long as all of them have time.
        """
        self.newest += 1
        batch = Batch(self.newest, self._loop.time(), priority=priority, cutoff=cutoff)
        batch.reported = groups is not None
        if cutoff is not None:
            self._cutoffs.set(batch, batch.started_at + cutoff.after_s)
            if cutoff.quorum > 0:
                batch._groups = {name: _Group(size) for name, size in Counter(groups).items()}
        return batch

    def of_singles(self, priority: int = 0) -> Batch:
        """The batch of the samples of this priority that are submitted one by one. A new one begins when none of them
        is under way.
        """
        batch = self._of_singles.get(priority)
        if batch is None or batch.done:
            self.newest += 1
            batch = Batch(self.newest, self._loop.time(), priority=priority, together=False)
            if self._of_singles:
                # Callers may use any number of priorities, so only batches that are under way are kept.
                self._of_singles = {known: other for known, other in self._of_singles.items() if not other.done}
            self._of_singles[priority] = batch
        return batch

    def seal(self, batch: Batch) -> None:
        """Note that no more members will join `batch`."""
        batch.sealed = True
        self._report(batch)

    def join(
        self,
        batch: Batch,
        group: Hashable = None,
        *,
        priority: int | None = None,
        latency_sensitive: bool = False,
    ) -> Member:
        """Return a new member of `batch`. The caller has to call `leave` for it once."""
        member = Member(batch, group, priority, latency_sensitive)
        batch._open += 1
        return member

    def leave(self, member: Member, *, scored: bool) -> None:
        """Note that a member makes no more calls. `scored`: it has a reward."""
        batch = member.batch
        batch.leave(member, scored=scored)
        if batch.sealed or not batch.together:
            self._report(batch)
        if batch.cutoff is not None:
            self._check(batch, self._loop.time())

    def ended(self, job: Job, result: Answer[Any] | Unanswered | None, now: float) -> None:
        """Note the end of a job. `result` is None if its caller dropped it."""
        dropped = result is None
        if not job.attempts and isinstance(result, Answer):
            self._observers.statistics.call_merged()  # only an equal call answers without an attempt
        if self._observers.watched:
            waited_s = min((attempt.started_at for attempt in (*job.past, *job.live)), default=now) - job.submitted_at
            reason = "dropped" if result is None else result.reason if isinstance(result, Unanswered) else ""
            self._observers.emit(
                CallEnded(now, job.sequence, job.call.name, job.last_source, reason, job.size, waited_s, job.attempts)
            )
        job.batch.ended(job, now, dropped=dropped)

    def close(self) -> None:
        """Forget all cut-offs."""
        self._cutoffs.clear()

    def _check(self, batch: Batch, now: float) -> float:
        if not batch.cut and batch.over(now):
            batch.cut = True
            self._on_cutoff(batch)
        return math.inf

    def _report(self, batch: Batch) -> None:
        if not batch.done:
            return
        if self._of_singles.get(batch.priority) is batch:
            del self._of_singles[batch.priority]
        if batch.cutoff is not None:
            self._cutoffs.cancel(batch, batch.started_at + batch.cutoff.after_s)
        if batch.last is not None:
            ended = self._observers.statistics.last_batch = report(batch, self._upstreams)
            batch.last.let_go()
            batch.last = None
            if ended.samples > 1:
                _log.info("%s", ended.describe())
            if self._observers.watched:
                self._observers.emit(BatchEnded(self._loop.time(), ended))


class WaitReasons:
    """The changes of one source's wait reason. Times are seconds of the event loop's clock."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, WaitReason]] = deque(maxlen=_REMEMBERED)

    def note(self, reason: WaitReason, now: float) -> None:
        """Note why the source takes no requests from `now` on."""
        if not self._changes or self._changes[-1][1] != reason:
            self._changes.append((now, reason))

    def seconds(self, since: float, until: float) -> dict[WaitReason, float]:
        """Seconds of [since, until] by reason. Time before the oldest remembered change counts as ""."""
        changes = list(self._changes)
        first = max(0, bisect.bisect_right(changes, since, key=lambda change: change[0]) - 1)
        seconds: dict[WaitReason, float] = {}
        at, reason = since, changes[first][1] if changes and changes[first][0] <= since else ""
        for changed_at, new_reason in changes[first:]:
            if changed_at >= until:
                break
            if changed_at > at:
                seconds[reason] = seconds.get(reason, 0.0) + changed_at - at
                at = changed_at
            reason = new_reason
        seconds[reason] = seconds.get(reason, 0.0) + until - at
        return seconds


def report(batch: Batch, upstreams: Mapping[str, Upstream]) -> BatchReport:
    """The counts of a batch that has ended, and what it waited for."""
    return BatchReport(
        samples=batch.samples,
        scored=batch.scored,
        failed=batch.samples - batch.scored,
        attempts=batch.attempts,
        hedges=batch.hedges,
        makespan_s=batch.last_at - batch.started_at,
        parts=tuple(_parts(batch.last, batch.started_at, batch.last_at, upstreams)) if batch.last else (),
    )


def _parts(job: Job, since: float, until: float, upstreams: Mapping[str, Upstream]) -> list[Part]:
    attempts = sorted((*job.past, *job.live), key=lambda attempt: attempt.started_at)
    backwards: list[Part] = []
    at = until
    attempt = _last_before(attempts, at)
    # Of one that was never sent, the source that it waited for is the first of those that might have taken it.
    names = [job.last_source] if job.last_source else job.call.sources
    following = next((upstreams[name] for name in names if name in upstreams), None)
    while attempt is not None:
        ended_at = min(attempt.ended_at, at) if attempt.result else at
        backwards += reversed(_gap(job, following, ended_at, at, after=attempt))
        backwards += reversed(_attempt(attempt, ended_at))
        at, following = attempt.started_at, attempt.upstream
        attempt = _last_before([other for other in attempts if other is not attempt], at)
    backwards += reversed(_gap(job, following, job.submitted_at, at, after=None))
    backwards.append(Part("arrival", "", job.submitted_at - since))
    return [part for part in reversed(backwards) if part.seconds > 0]


def _last_before(attempts: list[Attempt], at: float) -> Attempt | None:
    """The attempt that the time before `at` was spent on: of those begun before, the one that gave the outcome, or else
    the one that was waited for longest.
    """
    begun = [attempt for attempt in attempts if attempt.started_at < at]
    winners = [attempt for attempt in begun if attempt.result == "valid"]
    if winners:
        return winners[-1]
    return max(
        begun, key=lambda attempt: (attempt.ended_at if attempt.result else at, attempt.started_at), default=None
    )


def _in_vain(attempt: Attempt) -> bool:
    return attempt.given_up or attempt.result in ("failed", "invalid", "throttled")


def _attempt(attempt: Attempt, until: float) -> list[Part]:
    name, seconds = attempt.upstream.name, until - attempt.started_at
    if _in_vain(attempt):
        return [Part("retry", name, seconds)]
    usual_s = min(seconds, STRAGGLES_FROM * attempt.expected_s)
    return [Part("service", name, usual_s), Part("straggler", name, seconds - usual_s)]


def _gap(job: Job, upstream: Upstream | None, since: float, until: float, *, after: Attempt | None) -> list[Part]:
    """What `job` waited for from `since`, when no attempt was under way, until `upstream` took it."""
    if until <= since:
        return []
    parts: list[Part] = []
    if after is not None and upstream is not None and _in_vain(after):
        backoff_end = min(until, max(job.backoff_until.get(upstream.name, since), job.not_before, since))
        kind: PartKind = "pause" if after.result == "throttled" else "retry"
        parts.append(Part(kind, upstream.name, backoff_end - since))
        since = backoff_end
    if upstream is None:
        return [*parts, Part("queue", "", until - since)]
    held = upstream.wait_reasons.seconds(since, until)
    parts += [Part(_KINDS[hold], upstream.name, seconds) for hold, seconds in held.items() if hold != "queue"]
    busy_s = held.get("queue", 0.0)
    silent_s = until - max(since, upstream.health.answered_at) - STRAGGLES_FROM * upstream.speed.expected_s(job.size)
    silent_s = min(busy_s, max(0.0, silent_s))
    return [*parts, Part("queue", upstream.name, busy_s - silent_s), Part("straggler", upstream.name, silent_s)]


def check_times(deadline_s: float | None, priority: int | None, cutoff: Cutoff | None = None) -> None:
    """Raise `ValueError` for an impossible deadline, priority or cut-off."""
    # The scheduler computes with them; there a wrong type would fail every sample of the batch.
    if deadline_s is not None and not (isinstance(deadline_s, (int, float)) and deadline_s >= 0):
        raise ValueError(f"deadline_s must be a number of seconds, at least 0, not {deadline_s!r}")
    if priority is not None and not isinstance(priority, int):
        raise ValueError(f"priority must be a whole number, not {priority!r}")
    if cutoff is not None and not isinstance(cutoff, Cutoff):
        raise ValueError(f"cutoff must be a Cutoff, such as Cutoff(after_s=60), not {cutoff!r}")
