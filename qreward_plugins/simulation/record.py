"""The record of a trial from outside: every request at its server, every outcome at its caller.

Servers and callers write it. The promises are checked against this record, not against the engine's own counts, which
are kept for comparison.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..errors import Throttled
from ..observers.batch_report import BatchReport
from ..samples import Outcome, Sample
from .draws import Luck
from .poison import Poison
from .servers import Server
from .simulated_server import Served, SimulatedServer
from .trial import Call

Ending = Literal["under way", "valid", "invalid", "throttled", "failed", "cancelled"]


@dataclass(eq=False, slots=True)
class Sent:
    """One request of a sample to a server, as its client saw it. Times are seconds of the trial."""

    source: str
    sample: str
    started_at: float
    together: int = 1
    """Calls that its request carries."""
    leads: bool = True
    """Whether it is the first call of its request."""
    ended_at: float = math.inf
    ending: Ending = "under way"


@dataclass(eq=False, slots=True)
class Given:
    """What a sample's caller got: its outcome, or None if the caller cancelled or was refused."""

    sample: Sample
    call: Call
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
    refused: bool = False
    """Whether the engine was closed."""
    given_up: bool = False
    """Whether the caller cancelled it."""
    alone: bool = True
    """Whether no other call ran in its step."""
    report: BatchReport | None = None
    """The engine's report of its last batch when the call ended."""


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
    counted: dict[str, int] = field(default_factory=dict)
    """The engine's counts: submitted, scored, failed."""
    servers: dict[str, WatchedServer] = field(default_factory=dict)

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


class WatchedServer(SimulatedServer):
    """A simulated server that records its clients' requests."""

    def __init__(self, server: Server, luck: Luck, record: Record) -> None:
        super().__init__(server, luck)
        self._record = record
        self.open = 0
        """Requests that a client awaits."""
        self.most_open = 0

    async def serve(
        self,
        sample_id: str,
        work: float,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        poison: Poison | None = None,
        others: Sequence[tuple[str, Poison | None]] = (),
    ) -> Served:
        now, record = asyncio.get_running_loop().time(), self._record
        together = 1 + len(others)
        calls = [Sent(self.name, sample_id, now, together)]
        calls += [Sent(self.name, other, now, together, leads=False) for other, _ in others]
        record.sent += calls
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        endings: list[Ending] = ["cancelled"] * together
        try:
            served = await super().serve(
                sample_id, work, prompt_tokens, completion_tokens, poison=poison, others=others
            )
            endings = ["valid" if valid else "invalid" for valid in served.each_valid]
            return served
        except Throttled:
            endings = ["throttled"] * together
            raise
        except Exception:
            endings = ["failed"] * together
            raise
        finally:
            for sent, ending in zip(calls, endings, strict=True):
                sent.ended_at, sent.ending = asyncio.get_running_loop().time(), ending
            self.open -= 1
