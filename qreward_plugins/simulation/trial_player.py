"""Plays a trial: calls the unmodified production engine as the trial says, in virtual time, and records it.

Only this module looks inside the engine: for calls that wait while nothing is in flight, and for objects that are left
when nothing should be. Everything else is recorded from outside.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from ..config import Config
from ..engine import RewardEngine
from ..errors import ConfigurationError, EngineError
from ..judges import Ask, Judge
from ..samples import Outcome, Sample, Scored, Verdict
from ..scheduling import Cutoff, Job
from .clock import Deadlock, VirtualTimeLoop, run
from .draws import Luck
from .endpoint import Stage, endpoints_of
from .record import CallRecord, Given, Record, WatchedServer
from .reloads import Reload
from .trace import Trace
from .trial import Step, Trial

MOST_STEPS = 400_000
"""Most steps of the event loop, hundreds of times what a trial needs. More are a busy loop."""
IDLE_S = 0.3
"""Slightly longer than the planner may leave a source idle before it chooses again."""
AFTERWARDS_S = 600.0
"""Seconds that a trial continues after its engine was closed, to detect late activity."""
_SETTLED_S = 1e-6
_LOOKS = 14
_LONGEST_WAIT_S = 300.0
"""More than any window or pause in a trial. A source that needs more while nothing is in flight has miscounted."""


def play(trial: Trial, *, trace: bool = False) -> Record:
    """Play `trial` and return its record. The same trial gives the same record."""
    record = Record(trace=Trace() if trace else None)
    with _alarms(record):
        try:
            performance = _Performance(trial, record)
            with endpoints_of(performance.servers) as stage:
                run(performance.main(stage), loop=_CountedLoop())
        except Deadlock as error:
            record.aborted = f"deadlock: {error}"
        except BusyLoop as error:
            record.aborted = str(error)
        except EngineError as error:
            record.alarms.append(f"the engine could not be closed: {error}")
    return record


class BusyLoop(RuntimeError):
    """The event loop never becomes idle."""


class _CountedLoop(VirtualTimeLoop):
    """Stops a program after too many steps."""

    steps = 0

    def _run_once(self) -> None:
        self.steps += 1
        if self.steps == MOST_STEPS:
            raise BusyLoop(f"busy loop: {MOST_STEPS} steps, at {self.time():.3f} s")
        super()._run_once()  # type: ignore[misc]


class _Awaiting(Judge):
    """A judge that awaits another one."""

    def __init__(self, judge: Judge) -> None:
        super().__init__(judge.name)
        self._judge = judge

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        return await self._judge.judge(sample, ask)


class _Performance:
    def __init__(self, trial: Trial, record: Record) -> None:
        self._trial = trial
        self._record = record
        luck = Luck(trial.seed)
        self.servers = {
            server.name: WatchedServer(server, luck, record=record, on_change=self._changed, trace=record.trace)
            for server in trial.servers
        }
        record.servers = self.servers
        record.configs = [trial.config]
        self._engine: RewardEngine
        self._reloading: set[asyncio.Task[None]] = set()
        self._timers: list[asyncio.TimerHandle] = []
        self._open = 0
        self._changes = 0
        self._looks = 0
        self._seen: tuple[int, frozenset[str]] = (-1, frozenset())
        self._look: asyncio.TimerHandle | None = None

    async def main(self, stage: Stage) -> None:
        record, loop, trial = self._record, asyncio.get_running_loop(), self._trial
        loop.set_exception_handler(lambda _, context: record.alarms.append(_describe(context)))
        # Trials with reloads have sources that the engine opens itself, and closes when they are removed.
        given = {} if trial.reloads else self.servers
        self._engine = RewardEngine(Config.model_validate(trial.config), sources=given)
        if trial.awaits:
            judges = self._engine._wiring.router.judges
            judges |= {name: _Awaiting(judge) for name, judge in judges.items()}
        self._timers = [loop.call_at(loop.time() + each.at_s, self._begin_reload, each) for each in trial.reloads]
        for step in self._trial.steps:
            await asyncio.sleep(step.idle_s)
            await self._step(step)
            await asyncio.sleep(_SETTLED_S)
            self._look_for_leftovers("when everything was answered")
        for timer in self._timers:
            timer.cancel()
        if math.isnan(record.closed_at):
            record.closed_at = loop.time()
            await self._engine.aclose()
        await asyncio.sleep(_SETTLED_S)
        if self._look is not None:
            self._look.cancel()
        self._look_for_leftovers("after closing")
        self._look_for_timers()
        statistics = self._engine.statistics()
        record.counted = {
            "submitted": statistics.submitted,
            "scored": statistics.scored,
            "failed": statistics.failed_total,
            "waiting": statistics.waiting,
        }
        sources = stage.opened if trial.reloads else self.servers.values()
        record.left += [f"source {source.name} is not closed" for source in sources if not source.closed]
        record.ended_at = loop.time()
        await asyncio.sleep(AFTERWARDS_S)

    # Reloads

    def _begin_reload(self, reload: Reload) -> None:
        task = asyncio.get_running_loop().create_task(self._reload(reload))
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    async def _reload(self, reload: Reload) -> None:
        record, now = self._record, asyncio.get_running_loop().time()
        closed = not math.isnan(record.closed_at)
        try:
            await self._engine.reload(reload.config)
        except ConfigurationError as error:
            if not reload.refused:
                record.alarms.append(f"the reload at {now:.6f} s was refused: {error}")
        except EngineError as error:
            if not closed:
                record.alarms.append(f"an open engine refused the reload at {now:.6f} s: {error}")
        except Exception as error:
            record.alarms.append(f"the reload at {now:.6f} s raised {error!r}")
        else:
            if reload.refused:
                record.alarms.append(f"the reload at {now:.6f} s needs a restart, and was not refused")
            record.configs.append(reload.config)
            record.reloaded_at.append(now)
            self._arm()

    # Calls

    async def _step(self, step: Step) -> None:
        records = [CallRecord(call, math.nan, alone=len(step.calls) == 1) for call in step.calls]
        self._record.calls += records
        running = [self._call(record) for record in records]
        if step.close_after_s is not None:
            running.append(self._close(step.close_after_s))
        await asyncio.gather(*running)

    async def _close(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._record.closed_at = asyncio.get_running_loop().time()
        await self._engine.aclose()

    async def _call(self, record: CallRecord) -> None:
        call, loop = record.call, asyncio.get_running_loop()
        await asyncio.sleep(call.after_s)
        record.started_at = loop.time()
        last = self._engine.last_batch()
        score = {"batch": self._batch, "single": self._single, "stream": self._stream}[call.kind]
        task = loop.create_task(score(record))
        giving_up = None if call.cancel_after_s is None else loop.call_later(call.cancel_after_s, task.cancel)
        self._arm()
        try:
            await task
        except asyncio.CancelledError:
            record.given_up = True
            if giving_up is None:
                self._record.alarms.append(f"the call of a {call.describe()} was cancelled, and not by its caller")
        except EngineError as error:
            record.refused = True
            if math.isnan(self._record.closed_at):
                self._record.alarms.append(f"an open engine refused a {call.describe()}: {error}")
        except Exception as error:
            self._record.alarms.append(f"a {call.describe()} raised {error!r}")
        if giving_up is not None:
            giving_up.cancel()
        record.ended_at = loop.time()
        report = self._engine.last_batch()
        if report is not None and report is not last:
            record.report = report
            self._record.reports.append(report)

    async def _batch(self, record: CallRecord) -> None:
        call = record.call
        given = [self._begin(record, sample) for sample in call.samples]
        cutoff = Cutoff(*call.cutoff) if call.cutoff else None
        outcomes = await self._engine.score_all(
            call.samples, deadline_s=call.deadline_s, priority=call.priority, cutoff=cutoff
        )
        if len(outcomes) != len(given):
            self._record.alarms.append(f"{len(outcomes)} outcomes of {len(given)} samples")
        for one, outcome in zip(given, outcomes, strict=False):
            self._give(one, outcome)

    async def _single(self, record: CallRecord) -> None:
        call = record.call
        given = self._begin(record, call.samples[0])
        outcome = await self._engine.score(given.sample, deadline_s=call.deadline_s, priority=call.priority)
        self._give(given, outcome)

    async def _stream(self, record: CallRecord) -> None:
        call = record.call

        async def feed() -> AsyncIterator[Sample]:
            for sample in call.samples:
                if call.gap_s:
                    await asyncio.sleep(call.gap_s)
                self._begin(record, sample)
                yield sample

        number = 0
        async for sample, outcome in self._engine.score_stream(feed(), window=call.window):
            given = record.given[number]
            if sample is not given.sample:
                self._record.alarms.append(f"a stream gave {sample.id} in place of {given.sample.id}")
            self._give(given, outcome)
            number += 1

    def _begin(self, record: CallRecord, sample: Sample) -> Given:
        now = asyncio.get_running_loop().time()
        call = record.call
        config = self._record.configs[-1]
        deadline_s = config["engine"]["deadline_s"] if call.deadline_s is None else call.deadline_s
        given = Given(sample, call, now, now + deadline_s, self._record.epoch)
        record.given.append(given)
        self._note(sample, f"submitted, due at {given.due_at:.6f}")
        return given

    def _give(self, given: Given, outcome: Outcome) -> None:
        latency_s = outcome.verdict.latency_s if isinstance(outcome, Scored) else outcome.latency_s
        given.ended_at = given.submitted_at + latency_s
        given.returned_at = asyncio.get_running_loop().time()
        given.outcome, given.words = outcome, repr(outcome)
        said = f"scored {outcome.reward!r}" if isinstance(outcome, Scored) else outcome.describe()
        self._note(given.sample, f"known since {given.ended_at:.6f}: {said}")

    def _note(self, sample: Sample, what: str) -> None:
        if self._record.trace is not None:
            self._record.trace.note(asyncio.get_running_loop().time(), "caller", sample.id or "", what)

    # Progress

    def _changed(self, by: int) -> None:
        self._open += by
        self._changes += 1
        if not self._open:
            self._arm()

    def _arm(self) -> None:
        self._looks = 0
        if self._look is None:
            self._look = asyncio.get_running_loop().call_later(IDLE_S, self._look_around)

    def _look_around(self) -> None:
        self._look = None
        dispatcher = self._engine._binding.dispatcher
        if self._open or dispatcher is None or not dispatcher._jobs:
            self._seen = -1, frozenset()
            return
        loop = asyncio.get_running_loop()
        now, queue, able, stalls = loop.time(), dispatcher._planner.queue, set(), self._record.stalls
        for name, upstream in self._engine.upstreams.items():
            job = queue.first(name)
            if upstream.health.unusable:
                continue
            if upstream.breaker.wait_s(now) == math.inf:
                stalls.append(f"at {now:.6f} s the breaker of {name} waits for a probe, and none is under way")
            elif upstream.quota.wait_s(0, now) == math.inf:
                stalls.append(f"at {now:.6f} s the quota of {name} waits for a request to end, and none is under way")
            elif job is not None:
                wait_s = upstream.wait_s(upstream.tokens(job.request), now)
                if wait_s <= 0:
                    if not self._unneeded_rightly(job, name, now):
                        able.add(name)
                elif wait_s > _LONGEST_WAIT_S:
                    stalls.append(f"at {now:.6f} s {name} asks {job.request.sample.id} to wait for {wait_s:.3f} s")
        for job in dispatcher.stuck_jobs():
            stalls.append(
                f"at {now:.6f} s {job.request.sample.id} is lost: it neither waits, nor rests, nor is in flight"
            )
        before, able_before = self._seen
        stuck = able & able_before if before == self._changes else set()
        if stuck:
            stalls.append(f"until {now:.6f} s nothing was under way and {', '.join(sorted(stuck))} could send")
        self._seen = self._changes, frozenset(able)
        self._looks += 1
        if not stalls and self._looks < _LOOKS:
            # A source that can send now is checked again soon; a wait for a window may be long.
            again_s = IDLE_S if able else IDLE_S * 1.5**self._looks
            self._look = loop.call_later(again_s, self._look_around)

    def _unneeded_rightly(self, job: Job, name: str, now: float) -> bool:
        """Whether `job` is kept from a source because a cheaper one will take it long before its deadline."""
        dispatcher, upstreams = self._engine._binding.dispatcher, self._engine.upstreams
        assert dispatcher is not None
        # Read as it was last used, because asking would change it.
        unneeded = dispatcher._planner.forecast._unneeded
        ready_at = [
            max(
                now + upstreams[other].wait_s(upstreams[other].tokens(job.request), now),
                job.backoff_until.get(other, now),
            )
            for other in set(job.call.sources) - job.barred - unneeded
        ]
        return name in unneeded and any(at < job.deadline_at for at in ready_at)

    # Leftovers

    def _look_for_leftovers(self, when: str) -> None:
        left = self._record.left
        tasks = asyncio.all_tasks() - {asyncio.current_task()} - self._reloading
        if tasks:
            left.append(f"{when} {len(tasks)} tasks were left, one of them {_name_of(tasks)}")
        for name, server in self.servers.items():
            if server.open:
                left.append(f"{when} {server.open} requests were under way at {name}")
        for name, upstream in self._engine.upstreams.items():
            quota = upstream.quota
            held = {
                "attempts": len(upstream.live),
                "requests in flight": quota.in_flight,
                "reserved requests": quota.requests.held,
                "reserved tokens": quota.tokens.held,
            }
            left += [f"{when} {name} held {amount:g} {what}" for what, amount in held.items() if abs(amount) > 1e-6]
        left += [
            f"{when} {upstream.name}, which was removed, drained"
            for upstream in self._engine._wiring.upstreams.draining
        ]
        dispatcher = self._engine._binding.dispatcher
        if dispatcher is not None and (dispatcher._jobs or len(dispatcher._planner.queue)):
            left.append(f"{when} {len(dispatcher._jobs)} jobs were open, {len(dispatcher._planner.queue)} queued")

    def _look_for_timers(self) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for timer in loop._scheduled:
            callback = getattr(timer, "_callback", None)
            module = getattr(callback, "__module__", None) or ""
            if not timer.cancelled() and module.startswith("qreward_plugins.") and ".simulation" not in module:
                name = f"{module}.{getattr(callback, '__qualname__', callback)}"
                self._record.left.append(f"after closing, a timer of {name} was set for {timer.when():.6f} s")


def _name_of(tasks: set[asyncio.Task[Any]]) -> str:
    return min(getattr(task.get_coro(), "__qualname__", "unknown") for task in tasks)


def _describe(context: dict[str, Any]) -> str:
    error = context.get("exception")
    return f"{context.get('message', 'unknown')}{f' ({error!r})' if error is not None else ''}"


class _Alarm(logging.Handler):
    def __init__(self, record: Record) -> None:
        super().__init__(logging.ERROR)
        self._record = record

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._record.alarms.append(f"logged: {record.getMessage()}{f' ({error!r})' if error is not None else ''}")


@contextmanager
def _alarms(record: Record) -> Iterator[None]:
    """Record the engine's logged errors as alarms, and suppress the rest of its log."""
    logger = logging.getLogger("qreward_plugins")
    handler, propagate, level = _Alarm(record), logger.propagate, logger.level
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        logger.setLevel(level)
