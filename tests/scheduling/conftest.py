"""Calls without words, and a stage for the dispatcher in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import pytest

from qreward_plugins.config import Limits, Price, Scheduling
from qreward_plugins.errors import InvalidReply
from qreward_plugins.observers import Observers, SourceStatistics, Statistics
from qreward_plugins.observers.batch_report import BatchReport
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from qreward_plugins.scheduling import Answer, Batch, Call, Dispatcher, Job, Member, ReadyQueue, Upstream
from qreward_plugins.scheduling.attempts import Attempt
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources.base import Request


@dataclass
class PlainJudge:
    """Makes calls that take a reply's text as the score; "bad" is no answer."""

    sources: tuple[str, ...]
    name: str = "plain"
    invalid_retries: int = 1
    floors: dict = field(default_factory=dict)
    completion_tokens: int = 0

    def call(self, sample) -> Call:
        return Call(
            self.sources,
            lambda attempt: self.request(sample, attempt=attempt),
            lambda request, reply: self.verdict(request, reply),
            name=self.name,
            invalid_retries=self.invalid_retries,
            clear_blame=Cause.VERDICT in self.floors,
        )

    def outcome(self, result) -> Outcome:
        if isinstance(result, Answer):
            return Scored(
                replace(
                    result.value,
                    judge=self.name,
                    source=result.source,
                    model=result.model,
                    spent=result.spent,
                    service_s=result.service_s,
                )
            )
        cause = Cause.VERDICT if result.invalid else Cause.INFRA
        failed = Failed(cause, result.reason, result.detail, judge=self.name, source=result.source, spent=result.spent)
        if cause not in self.floors:
            return failed
        return Scored(Verdict(self.floors[cause], judge=self.name, basis="floor", failure=failed, spent=result.spent))

    def request(self, sample, *, attempt):
        message = {"role": "user", "content": sample.response}
        return Request(sample, messages=(message,), max_completion_tokens=self.completion_tokens, nonce=str(attempt))

    def verdict(self, request, reply):
        if reply.text == "bad":
            raise InvalidReply("not a score")
        return Verdict(float(reply.text))


class Desk(Dispatcher):
    """A dispatcher that takes samples and gives outcomes. `on_late` is told a sample and the verdict that came late."""

    def __init__(self, upstreams, *, on_late=None, **options) -> None:
        super().__init__(upstreams, keeps_late=on_late is not None, **options)
        self.on_late = on_late

    def score(self, sample, judge: PlainJudge, *, deadline_s: float, batch: Batch | None = None, member=None):
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        stays = member is not None
        if not stays:
            member = self.batches.join(self.batches.of_singles() if batch is None else batch, sample.group_id)
        caller = Patron(self, sample, judge, member, future, left=stays)
        caller.job = self.submit(judge.call(sample), caller, member=member, deadline_at=self.now() + deadline_s)
        future.add_done_callback(caller.done)
        return future


class Patron:
    """Waits for the call of one sample."""

    def __init__(self, desk: Desk, sample, judge: PlainJudge, member: Member, future, *, left: bool) -> None:
        self.desk, self.sample, self.judge, self.member, self.future = desk, sample, judge, member, future
        self.job: Job | None = None
        self.left = left

    def ended(self, result) -> None:
        self.job = None
        outcome = self.judge.outcome(result)
        if not self.future.done():
            self.future.set_result(outcome)
        self.leave(scored=isinstance(outcome, Scored))

    def late(self, answer) -> None:
        self.desk.on_late(self.sample, self.judge.outcome(answer).verdict)

    def done(self, _: object) -> None:
        job, self.job = self.job, None
        if job is not None:
            self.desk.drop(job)
        self.leave(scored=False)

    def leave(self, *, scored: bool) -> None:
        if not self.left:
            self.left = True
            self.desk.batches.leave(self.member, scored=scored)


class Told:
    """A caller that keeps what it is told."""

    def __init__(self) -> None:
        self.results: list = []
        self.answers: list = []

    def ended(self, result) -> None:
        self.results.append(result)

    def late(self, answer) -> None:
        self.answers.append(answer)


class Sent(NamedTuple):
    """A request that reached a source."""

    at: float
    source: str
    size: int


@dataclass(frozen=True)
class Played:
    """What became of a batch that was handed in at once."""

    outcomes: list[Outcome]
    finished_at: float
    report: BatchReport

    @property
    def all_scored(self) -> bool:
        return all(isinstance(outcome, Scored) for outcome in self.outcomes)

    @property
    def shares(self) -> Counter[str]:
        """How many verdicts came from each source."""
        return Counter(outcome.verdict.source for outcome in self.outcomes if isinstance(outcome, Scored))


class Stage:
    """Sources, their upstreams and a judge. Use `dispatcher()` and `sample()` in virtual time, or `play()` a batch.

    `sent` lists every request that came to a source.
    """

    def __init__(self) -> None:
        self.sources: dict[str, SimulatedSource] = {}
        self.upstreams: dict[str, Upstream] = {}
        self.judge = PlainJudge(())
        self.sent: list[Sent] = []
        self.statistics = Statistics()
        self.observers = Observers([self.statistics])
        self._sequence = itertools.count()

    def add(
        self,
        name: str,
        *,
        timeout_s: float = 60.0,
        limits: dict | None = None,
        price: float = 0.0,
        weight: float = 1.0,
        behaviour=lambda number, request, now: 1.0,
        **source,
    ) -> SimulatedSource:
        def noted(number, request, now):
            self.sent.append(Sent(now, name, request.size))
            return behaviour(number, request, now)

        simulated = SimulatedSource(name, behaviour=noted, **source)
        quota = Quota(Limits.model_validate(limits or {}), source=name)
        self.sources[name] = simulated
        self.upstreams[name] = Upstream(
            simulated, quota, timeout_s=timeout_s, price=Price(per_request=price), weight=weight
        )
        self.judge.sources = (*self.judge.sources, name)
        return simulated

    def knows(self, name: str, seconds: float, *, size: int = 10, answers: int = 40) -> None:
        """Let it be known that `name` takes `seconds` for a request of `size`, and in proportion for others."""
        for _ in range(answers):
            self.upstreams[name].speed.learn(size, seconds)

    def dispatcher(self, *, seed: int = 0, rng=None, max_attempts: int = 6, on_late=None, **scheduling) -> Desk:
        settings = Scheduling(**{"hedge": False, **scheduling})
        return Desk(
            self.upstreams,
            rng=rng or random.Random(seed),
            max_attempts=max_attempts,
            settings=settings,
            on_late=on_late,
            observers=self.observers,
        )

    def counted(self, name: str) -> SourceStatistics:
        """What was counted of a source so far."""
        gauges = {each: upstream.gauges(0.0) for each, upstream in self.upstreams.items()}
        return self.statistics.snapshot(gauges, waiting=0).sources[name]

    def sample(self, size: int = 10, **fields) -> Sample:
        return Sample([{"role": "user", "content": "?"}], "x" * size, **fields)

    def play(self, sizes: Sequence[int], *, deadline_s: float = 300.0, groups=None, cutoff=None, **options) -> Played:
        """Hand samples of these sizes in as one batch in virtual time. Nothing may be left over afterwards."""

        async def main():
            dispatcher = self.dispatcher(**options)
            samples = [self.sample(size, group_id=groups[n] if groups else None) for n, size in enumerate(sizes)]
            batch = dispatcher.batches.new([each.group_id for each in samples], cutoff=cutoff)
            futures = [dispatcher.score(each, self.judge, deadline_s=deadline_s, batch=batch) for each in samples]
            outcomes = await asyncio.gather(*futures)
            finished_at = dispatcher.now()
            dispatcher.batches.seal(batch)
            report = self.statistics.last_batch
            assert report is not None
            await dispatcher.aclose()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return Played(list(outcomes), finished_at, report)

        played = run(main())
        assert self.idle()
        return played

    # Single parts, for units that are tested without a dispatcher; within a running loop

    def job(
        self, size: int = 10, *, batch: Batch | None = None, member: Member | None = None, deadline_s: float = 300.0
    ) -> Job:
        call = self.judge.call(self.sample(size))
        member = member or Member(batch or Batch(0, 0.0))
        batch = member.batch
        now = asyncio.get_running_loop().time()
        caller = Told()
        job = Job(call, caller, member, batch, now, now + deadline_s, call.request(0), next(self._sequence))
        job.precedence = float(size)
        batch.add(job)
        return job

    def queued(self, queue: ReadyQueue, size: int = 10, *, sources: Sequence[str] = (), **job) -> Job:
        """A new job in `queue`, for these sources (default: all)."""
        made = self.job(size, **job)
        queue.push(made, frozenset(sources or self.judge.sources))
        return made

    def attempt(self, job: Job, source: str, *, started_at: float, expected_s: float, **fields) -> Attempt:
        """An attempt under way, without a task."""
        upstream = self.upstreams[source]
        reservation = upstream.reserve(job.request, started_at)
        attempt = Attempt(
            job,
            upstream,
            job.request,
            reservation,
            started_at,
            expected_s=expected_s,
            **{"probe": False, "hedge": False, **fields},
        )
        job.live.append(attempt)
        upstream.started(attempt)
        return attempt

    def idle(self) -> bool:
        """Whether nothing is held any more."""
        return all(source.in_flight == 0 for source in self.sources.values()) and all(
            upstream.quota.in_flight == 0 for upstream in self.upstreams.values()
        )


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="session")
def new_stage() -> Callable[[], Stage]:
    return Stage
