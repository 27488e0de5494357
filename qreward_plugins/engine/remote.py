"""Scores the samples of one event loop at a reward server, with the interface of `Scoring`.

A sample waits here until the server has its outcome, the deadline comes, or its caller leaves. Whatever happens to the
server, each sample gets one outcome; a sample whose server cannot be reached until its deadline fails.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import orjson

from ..client.backlog import Backlog
from ..client.link import Link
from ..client.reward_server import RemoteServer
from ..client.rows import outcome_of_row, was_closed, written_sample
from ..config.models import Priorities
from ..errors import InputError, RewardServerError
from ..judges import JudgeRouter
from ..observers import Observers
from ..samples import Cause, Failed, Outcome, Sample
from ..samples.check import Rejected
from ..scheduling import Batch
from .judging import Pending
from .scoring import Scoring

_log = logging.getLogger("qreward_plugins.remote")

SAMPLES_A_FRAME = 4096
BYTES_A_FRAME = 8 * 2**20
OVERHEAD_BYTES = 4096
"""Most bytes of a frame beside the rows of its samples."""
MARGIN = 0.05
"""Part of the time left that is kept for the way back, so that the server's reason for a failure arrives in time."""
LONGEST_MARGIN_S = 1.0
_CLOSED = "the engine was closed before the sample was scored"


class RemoteSample(Pending):
    """A sample that the server scores."""

    __slots__ = ("_owner", "due_at", "number", "priority", "submitted_at", "timer", "written")

    def __init__(self, owner: RemoteScoring, sample: Sample, batch: Batch, future: asyncio.Future[Outcome]) -> None:
        super().__init__(owner, sample, owner.batches.join(batch, sample.group_id), future)
        self._owner = owner
        self.submitted_at = owner.now()
        self.number = -1
        self.due_at = 0.0
        self.priority: int | None = None
        self.written = b""
        self.timer: asyncio.TimerHandle | None = None

    def end(self, outcome: Outcome) -> None:
        self._stop()
        super().end(outcome)

    def fail(self, reason: str, detail: str) -> None:
        """End it without a reward."""
        self.end(Failed(Cause.INFRA, reason, detail))

    def dropped(self, _: object) -> None:
        """End it without an outcome if its caller has cancelled its future."""
        if not self.over:
            self._owner.cancel([self.number])
            self._stop()
            self.leave()

    def _stop(self) -> None:
        self._owner.forget(self)
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class RemoteScoring(Scoring):
    """The samples of one event loop at `server`. Of its dispatcher, only the batches are used.

    `priorities`: those of the local configuration; None: those of the server's count.
    """

    def __init__(
        self, server: RemoteServer, *, router: JudgeRouter, observers: Observers, priorities: Priorities | None
    ) -> None:
        super().__init__(router, sources={}, journal=None, reuse=False, observers=observers)
        self._server = server
        self._priorities = priorities
        self._waiting: dict[int, RemoteSample] = {}
        self._unsent: dict[int, RemoteSample] = {}
        self._numbers = itertools.count()
        self._why = "it has not answered yet"
        self._flushing: asyncio.Handle | None = None
        self._backlog: Backlog[RemoteSample] = Backlog(ask=self._ask_for_room)
        self._link = Link(
            server.url,
            server.token,
            server.facts,
            connect_s=server.connect_s,
            any_judges=server.judges_may_change,
            listener=self,
            wanted=lambda: bool(self._waiting),
        )

    def submit(
        self, sample: Sample | Rejected, batch: Batch, due_at: float, *, priority: int | None = None
    ) -> asyncio.Future[Outcome]:
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self.submitted(sample)
        named = sample.sample if isinstance(sample, Rejected) else sample
        remote = RemoteSample(self, named, batch, future)
        if isinstance(sample, Rejected):
            remote.fail("input", sample.problem)
            return future
        try:
            remote.written = written_sample(sample, "the sample")
            if len(remote.written) + OVERHEAD_BYTES > self._server.facts.max_bytes:
                most = self._server.facts.max_bytes
                raise InputError(f"the sample takes {len(remote.written):,} bytes, and the server takes {most:,}")
        except InputError as error:
            remote.fail("input", str(error))
            return future
        remote.priority = self._own_priority(sample) if priority is None else priority
        remote.due_at = due_at
        remote.number = next(self._numbers)
        remote.timer = asyncio.get_running_loop().call_at(due_at, self._expire, remote)
        self._waiting[remote.number] = remote
        future.add_done_callback(remote.dropped)
        self._send_soon([remote])
        return future

    def priority_of(self, sample: Sample | Rejected) -> int:
        return 0 if isinstance(sample, Rejected) else self._own_priority(sample) or 0

    def _own_priority(self, sample: Sample) -> int | None:
        if self._priorities is None:
            return None
        return self._priorities.validation if sample.split == "val" else self._priorities.train

    def cut_off(self, batch: Batch) -> None:
        cut = [remote for remote in self._waiting.values() if remote.member.batch is batch]
        self.cancel(remote.number for remote in cut)
        for remote in cut:
            remote.fail("cutoff", "the batch stopped waiting, its quorum was in")

    def forget(self, remote: RemoteSample) -> None:
        """Forget a sample that has ended."""
        self._waiting.pop(remote.number, None)
        self._unsent.pop(remote.number, None)
        self._backlog.forget(remote)

    def cancel(self, numbers: Iterable[int]) -> None:
        """Let the server cancel samples."""
        sent = [
            number
            for number in numbers
            if (remote := self._waiting.get(number)) and number not in self._unsent and remote not in self._backlog
        ]
        if sent:
            self._link.send({"cancel": sent})

    async def aclose(self) -> None:
        for remote in list(self._waiting.values()):
            remote.fail("closed", _CLOSED)
        self._backlog.close()
        if self._flushing is not None:
            self._flushing.cancel()
        self.dispatcher.close()
        await self._link.aclose()
        await self.dispatcher.aclose()

    # Called by the connection

    def connected(self) -> None:
        self._why = ""
        self._backlog.clear()
        self._unsent = dict(self._waiting)
        self._flush()

    def disconnected(self, why: str) -> None:
        if not self._why:
            _log.warning("the reward server at %s: %s; it is asked again", self._server.url, why)
        self._why = why
        self._backlog.clear()
        self._unsent = dict(self._waiting)

    def refused(self, reason: str, detail: str) -> None:
        for remote in list(self._waiting.values()):
            remote.fail(reason, f"the reward server at {self._server.url}: {detail}")

    def answered(self, row: Mapping[str, Any]) -> None:
        remote = self._waiting.get(row["id"])
        if remote is None:
            return
        if was_closed(row):
            # Its server stops. The next one may score it.
            self._backlog.put_off([remote], 1.0)
            return
        try:
            outcome = outcome_of_row(row, latency_s=self.now() - remote.submitted_at)
        except RewardServerError as error:
            outcome = Failed(Cause.INFRA, "server_refused", str(error))
        remote.end(outcome)

    def put_off(self, ids: Iterable[int], status: int, detail: str, after_s: float) -> None:
        remotes = [remote for number in ids if (remote := self._waiting.get(number)) is not None]
        if status in (429, 503):
            self._why = detail
            self._backlog.put_off(remotes, after_s)
            return
        for remote in remotes:
            remote.fail("server_refused", f"the reward server at {self._server.url} answered {status}: {detail}")

    def room(self, count: int) -> None:
        remotes = self._backlog.take(count, order=lambda remote: (-(remote.priority or 0), remote.number))
        if not len(self._backlog):
            self._why = ""
        self._send_now(remotes)

    # Sending

    def _ask_for_room(self, remotes: Collection[RemoteSample]) -> None:
        # The next one may be too late for what is in front of it, and would keep the others from being sent.
        left_s = max(remote.due_at for remote in remotes) - self.now()
        self._link.send({"room": {"samples": len(remotes), "deadline_s": max(1e-3, left_s)}})

    def _send_soon(self, remotes: list[RemoteSample]) -> None:
        if len(self._backlog):
            # The server is full. Those that wait for room already go first.
            self._backlog.add(remotes)
        else:
            self._send_now(remotes)

    def _send_now(self, remotes: Iterable[RemoteSample]) -> None:
        self._unsent.update((remote.number, remote) for remote in remotes)
        self._link.need()
        if self._flushing is None and self._unsent:
            # What is submitted in one step of the event loop goes in one frame.
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        if not self._link.open:
            return
        unsent, self._unsent = self._unsent, {}
        parts: dict[tuple[Batch | None, float, int | None], list[RemoteSample]] = {}
        for remote in unsent.values():
            own = remote.member.batch
            parts.setdefault((own if own.together else None, remote.due_at, remote.priority), []).append(remote)
        now = self.now()
        for (batch, due_at, priority), remotes in parts.items():
            left_s = max(1e-3, due_at - now)
            asked_s = left_s - min(LONGEST_MARGIN_S, MARGIN * left_s)
            for part in _frames(remotes, min(BYTES_A_FRAME, self._server.facts.max_bytes // 2)):
                self._link.send(
                    {
                        "ids": [remote.number for remote in part],
                        "samples": [orjson.Fragment(remote.written) for remote in part],
                        "deadline_s": asked_s,
                        "priority": priority,
                        "together": batch is not None,
                    }
                )

    def _expire(self, remote: RemoteSample) -> None:
        waited_s = self.now() - remote.submitted_at
        self.cancel([remote.number])
        if self._why:
            detail = f"the reward server at {self._server.url}: {self._why}; waited {waited_s:.1f} s"
            remote.fail("unreachable", detail)
        else:
            detail = f"the reward server at {self._server.url} had no outcome after {waited_s:.1f} s"
            remote.fail("deadline", detail)


def _frames(remotes: list[RemoteSample], most_bytes: int) -> Iterable[list[RemoteSample]]:
    part: list[RemoteSample] = []
    size = 0
    for remote in remotes:
        if part and (len(part) >= SAMPLES_A_FRAME or size + len(remote.written) > most_bytes):
            yield part
            part, size = [], 0
        part.append(remote)
        size += len(remote.written)
    if part:
        yield part
