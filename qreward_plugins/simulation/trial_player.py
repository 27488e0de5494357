"""Plays a trial: calls the unmodified production engine as the trial says, in virtual time.

It records every request at its server and every outcome at its caller. The promises are checked against this record.
What the engine counts by itself is there for comparison only.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from ..config import Config
from ..engine.engine import RewardEngine
from ..errors import EngineError
from ..observers.batch_report import BatchReport
from ..samples import Outcome, Sample, Scored
from ..scheduling.batches import Cutoff
from .clock import Deadlock, VirtualTimeLoop, run
from .draws import Luck
from .simulated_server import Sent, SimulatedServer
from .trial import Call, Step, Trial

MOST_STEPS = 400_000
"""Most steps of the event loop in an hour, hundreds of times what a trial needs. More are a busy loop. One sample that
no source can answer is tried for as long as its deadline allows, and that may be hours."""
AFTERWARDS_S = 600.0
"""Seconds that a trial continues after its engine was closed, to detect late activity."""
_SETTLED_S = 1e-6


@dataclass(eq=False, slots=True)
class Given:
    """What a sample's caller got: its outcome, or None if the caller cancelled or was refused."""

    sample: Sample
    submitted_at: float
    due_at: float
    ended_at: float = math.nan
    returned_at: float = math.nan
    """When the caller got it; batches and streams return it later than it was known."""
    outcome: Outcome | None = None
    words: str = ""
    """The outcome as text when it was given, to detect later changes."""


@dataclass(eq=False, slots=True)
class CallRecord:
    """One call of the engine, and how it ended."""

    call: Call
    started_at: float
    given: list[Given] = field(default_factory=list)
    ended_at: float = math.nan
    broken_off: bool = False
    """Whether the caller cancelled it, or the engine was closed."""


@dataclass(eq=False, slots=True)
class Record:
    """Everything recorded of a trial."""

    sent: list[Sent] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    reports: list[BatchReport] = field(default_factory=list)
    closed_at: float = math.nan
    ended_at: float = 0.0
    aborted: str = ""
    """Why it was aborted; empty if it was played to its end."""
    left: list[str] = field(default_factory=list)
    """Objects left when nothing was in flight, or after closing."""
    alarms: list[str] = field(default_factory=list)
    """Unexpected errors."""
    ended: int = 0
    """How many samples have ended, as the engine counts them."""
    servers: dict[str, SimulatedServer] = field(default_factory=dict)

    def given(self) -> list[Given]:
        """Everything that callers got, in the order of the calls."""
        return [given for call in self.calls for given in call.given]

    def text(self) -> str:
        """The record as text. Two trials were the same if their texts are equal."""
        lines = [
            f"{sent.started_at!r} {sent.source} was sent {sent.sample}: {sent.ending} at {sent.ended_at!r}"
            for sent in self.sent
        ]
        lines += [
            f"{given.sample.id} {given.submitted_at!r} {given.ended_at!r} {given.returned_at!r} {given.words}"
            for given in self.given()
        ]
        lines += [f"{report!r}" for report in self.reports]
        return "\n".join([*lines, f"ended at {self.ended_at!r}\n"])


def play(trial: Trial) -> Record:
    """Play `trial` and return its record. The same trial gives the same record."""
    record = Record()
    with quiet(_Alarm(record)):
        try:
            run(_Performance(trial, record).main(), loop=_CountedLoop())
        except (Deadlock, BusyLoop) as error:
            record.aborted = str(error)
        except EngineError as error:
            record.alarms.append(f"the engine could not be closed: {error}")
    return record


class BusyLoop(RuntimeError):
    """The event loop never becomes idle."""


class _CountedLoop(VirtualTimeLoop):
    """Stops a program after too many steps in an hour."""

    steps, counted_since = 0, 0.0

    def _run_once(self) -> None:
        self.steps += 1
        if self.time() >= self.counted_since + 3600.0:
            self.steps, self.counted_since = 0, self.time()
        if self.steps == MOST_STEPS:
            raise BusyLoop(f"busy loop: {MOST_STEPS} steps, at {self.time():.3f} s")
        super()._run_once()  # type: ignore[misc]


class _Performance:
    def __init__(self, trial: Trial, record: Record) -> None:
        self._trial = trial
        self._record = record
        luck = Luck(trial.seed)
        self.servers = {server.name: SimulatedServer(server, luck, record.sent) for server in trial.servers}
        record.servers = self.servers
        self._engine: RewardEngine

    async def main(self) -> None:
        record, loop, trial = self._record, asyncio.get_running_loop(), self._trial
        loop.set_exception_handler(lambda _, context: record.alarms.append(_describe(context)))
        self._engine = RewardEngine(Config.model_validate(trial.config), sources=self.servers)
        for step in trial.steps:
            await asyncio.sleep(step.idle_s)
            await self._step(step)
            await asyncio.sleep(_SETTLED_S)
            self._look_for_leftovers("when everything was answered")
        if math.isnan(record.closed_at):
            record.closed_at = loop.time()
            await self._engine.aclose()
        await asyncio.sleep(_SETTLED_S)
        self._look_for_leftovers("after closing")
        self._look_for_timers()
        statistics = self._engine.statistics()
        record.ended = statistics.scored + statistics.failed_total
        record.left += [f"source {name} is not closed" for name, source in self.servers.items() if not source.closed]
        record.ended_at = loop.time()
        await asyncio.sleep(AFTERWARDS_S)

    # Calls

    async def _step(self, step: Step) -> None:
        records = [CallRecord(call, math.nan) for call in step.calls]
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
        try:
            await task
        except asyncio.CancelledError:
            record.broken_off = True
            if giving_up is None:
                self._record.alarms.append(f"the call of a {call} was cancelled, and not by its caller")
        except EngineError as error:
            record.broken_off = True
            if math.isnan(self._record.closed_at):
                self._record.alarms.append(f"an open engine refused a {call}: {error}")
        except Exception as error:
            self._record.alarms.append(f"a {call} raised {error!r}")
        if giving_up is not None:
            giving_up.cancel()
        record.ended_at = loop.time()
        report = self._engine.last_batch()
        if report is not None and report is not last:
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
        deadline_s = self._trial.config["engine"]["deadline_s"] if call.deadline_s is None else call.deadline_s
        given = Given(sample, now, now + deadline_s)
        record.given.append(given)
        return given

    def _give(self, given: Given, outcome: Outcome) -> None:
        latency_s = outcome.verdict.latency_s if isinstance(outcome, Scored) else outcome.latency_s
        given.ended_at = given.submitted_at + latency_s
        given.returned_at = asyncio.get_running_loop().time()
        given.outcome, given.words = outcome, repr(outcome)

    # Leftovers

    def _look_for_leftovers(self, when: str) -> None:
        """Record what is left while no call is open."""
        left, statistics = self._record.left, self._engine.statistics()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            name = min(getattr(task.get_coro(), "__qualname__", "unknown") for task in tasks)
            left.append(f"{when} {len(tasks)} tasks were left, one of them {name}")
        if statistics.waiting:
            left.append(f"{when} {statistics.waiting} calls waited")
        for name in self.servers:
            if held := statistics.sources[name].in_flight:
                left.append(f"{when} {name} held {held} requests in flight")

    def _look_for_timers(self) -> None:
        """Record the timers that are set after closing."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        for timer in loop._scheduled:
            callback = getattr(timer, "_callback", None)
            module = getattr(callback, "__module__", None) or ""
            if not timer.cancelled() and module.startswith("qreward_plugins.") and ".simulation" not in module:
                name = f"{module}.{getattr(callback, '__qualname__', callback)}"
                self._record.left.append(f"after closing, a timer of {name} was set for {timer.when():.6f} s")


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
def quiet(handler: logging.Handler | None = None) -> Iterator[None]:
    """Suppress the engine's log; `handler` gets the errors in it."""
    logger = logging.getLogger("qreward_plugins")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    logger.handlers, logger.propagate = [handler or logging.NullHandler()], False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)
