"""What is seen of a trial from outside: every request at its server, every outcome at its caller.

The promises are checked against this record and not against what the engine says of itself, so it is written by the
servers and by the callers. The engine's own word is kept beside it, to be compared.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from ..errors import Throttled
from ..samples import Outcome, Sample
from ..telemetry import BatchReport
from .draws import Luck
from .poison import Poison
from .servers import Server
from .simulated_server import Served, SimulatedServer
from .trace import Trace
from .trial import Call

Ending = Literal["under way", "valid", "invalid", "throttled", "failed", "cancelled"]


@dataclass(eq=False, slots=True)
class Sent:
    """One request of one sample to one server, as its client lived through it. Times are seconds of the trial."""

    source: str
    sample: str
    started_at: float
    ended_at: float = math.inf
    ending: Ending = "under way"


@dataclass(eq=False, slots=True)
class Given:
    """What one sample's caller was given: its outcome, or None where the caller had lost interest or was refused."""

    sample: Sample
    call: Call
    submitted_at: float
    due_at: float
    ended_at: float = math.nan
    returned_at: float = math.nan
    """When the caller had it in hand; a batch and a stream give it later than it was known."""
    outcome: Outcome | None = None
    words: str = ""
    """The outcome in words at the moment it was given, so that a later change would show."""


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
    """Whether the caller lost interest before it ended."""
    alone: bool = True
    """Whether no other call was under way in its step."""
    report: BatchReport | None = None
    """What the engine said of its last batch when the call ended."""


@dataclass(eq=False, slots=True)
class Record:
    """All that was seen of a trial."""

    sent: list[Sent] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    reports: list[BatchReport] = field(default_factory=list)
    closed_at: float = math.nan
    ended_at: float = 0.0
    aborted: str = ""
    """Why it could not be played to its end; empty: it was."""
    stalls: list[str] = field(default_factory=list)
    """What should have moved and did not."""
    left: list[str] = field(default_factory=list)
    """What was left behind when nothing was under way, or after closing."""
    alarms: list[str] = field(default_factory=list)
    """Unexpected errors, wherever they surfaced."""
    counted: dict[str, int] = field(default_factory=dict)
    """What the engine counted: submitted, scored, failed."""
    servers: dict[str, WatchedServer] = field(default_factory=dict)
    trace: Trace | None = None

    def given(self) -> list[Given]:
        """Everything that callers were given, in the order of the calls."""
        return [given for call in self.calls for given in call.given]

    def text(self) -> str:
        """The record as text: two trials were the same if these are, byte for byte."""
        lines = [
            f"{given.sample.id} {given.submitted_at!r} {given.ended_at!r} {given.returned_at!r} {given.words}\n"
            for given in self.given()
        ]
        lines += [f"{report!r}\n" for report in self.reports]
        return f"{self.trace or ''}{''.join(lines)}ended at {self.ended_at!r}\n"


class WatchedServer(SimulatedServer):
    """A simulated server that writes down its clients' requests, and says when one begins or ends."""

    def __init__(
        self, server: Server, luck: Luck, *, record: Record, on_change: Callable[[int], None], trace: Trace | None
    ) -> None:
        super().__init__(server, luck, trace=trace)
        self._record = record
        self._on_change = on_change
        self.open = 0
        """Requests whose clients wait for them."""
        self.most_open = 0

    async def serve(
        self,
        sample_id: str,
        work: float,
        prompt_tokens: int,
        completion_tokens: int,
        *,
        poison: Poison | None = None,
    ) -> Served:
        sent = Sent(self.name, sample_id, asyncio.get_running_loop().time())
        self._record.sent.append(sent)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        self._on_change(1)
        ending: Ending = "cancelled"
        try:
            served = await super().serve(sample_id, work, prompt_tokens, completion_tokens, poison=poison)
            ending = "valid" if served.valid else "invalid"
            return served
        except Throttled:
            ending = "throttled"
            raise
        except Exception:
            ending = "failed"
            raise
        finally:
            sent.ended_at, sent.ending = asyncio.get_running_loop().time(), ending
            self.open -= 1
            self._on_change(-1)
