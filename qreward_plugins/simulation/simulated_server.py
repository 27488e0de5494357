"""A server in virtual time, with strict limits and faults, as a source of the engine that answers verdicts.

A sent request arrives even if its client cancels it on the way, and is counted then. A refused request is not counted,
and every refusal because of a limit is recorded in `violations`. Two refusals are no violations: throttling by a fault,
because the client kept to its limits; and a request larger than the whole token window, because the engine never
withholds a sample for an estimate. It sends such a request alone, and the server refuses it.

The arrival and the end of a request are timers, not tasks, because thousands of runs with thousands of requests must be
cheap.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ..errors import SourceError, Throttled, TransientError
from ..samples.spent import Usage
from ..sources.base import Reply, Request, Source
from .draws import (
    ABSURD_LIMITS,
    ABSURD_TOKENS,
    HANGS_S,
    OF_ONE_REPLY,
    TOO_LARGE_S,
    Draw,
    Luck,
    Poison,
    completion_tokens,
    error_of,
    poison_of,
    prompt_tokens,
    verdict_text,
    work_of,
)
from .servers import Server, phases
from .strict_limits import StrictLimits, ledger_of

REFUSAL_S = 0.1
"""Round trip of a refused request: a refused connection, or a 429."""

_BROKEN_AFTER_S = 0.01
_ERROR_PART = 0.3
SHORTEST_WAIT_S = 0.01
"""The shortest wait that a 429 asks for."""
_SIZE = "window as a whole"
"""The name of the limit for a request that is larger than a whole token window."""
_NO_VERDICT = "I would rather not say."


Ending = Literal["under way", "valid", "invalid", "throttled", "failed", "cancelled"]


@dataclass(eq=False, slots=True)
class Sent:
    """One call of a request to a server, as its client saw it. Times are seconds of the simulation."""

    source: str
    sample: str
    started_at: float
    tokens: int
    """Tokens of the call, prompt and completion."""
    together: int = 1
    """Calls that its request carries."""
    leads: bool = True
    """Whether it is the first call of its request."""
    ended_at: float = math.inf
    ending: Ending = "under way"


def most_at_once(sent: Iterable[Sent]) -> int:
    """The most requests that their clients awaited at once."""
    spans = [(one.started_at, one.ended_at) for one in sent if one.leads]
    changes = sorted([(start, 1) for start, _ in spans] + [(end, -1) for _, end in spans])
    return max(itertools.accumulate(change for _, change in changes), default=0)


class Asked(NamedTuple):
    """What a server makes of a call: whose random numbers it gets, its poison, its hidden work, and its tokens."""

    sample: str
    poison: Poison | None
    work: float
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Served:
    """An answer, before it is turned into a reply."""

    prompt_tokens: int
    completion_tokens: int
    announced: Mapping[str, float]
    """The announced limits, as in `Reply.announced`."""
    each_valid: tuple[bool, ...]
    """Whether the verdict of each call is valid."""

    @property
    def valid(self) -> bool:
        """Whether the verdict of the first call is valid."""
        return self.each_valid[0]


class SimulatedServer(Source):
    """Plays `server` in one run of one event loop: a `Source` for the engine, and a neutral `serve` for the transports
    of other clients. `luck` is shared by the servers of the run. The reply of a request whose verdict is valid is a
    verdict as LLM judges read it.

    `arrivals` are the arrival times of requests, `violations` (time, limit) of the requests refused because of a limit,
    `in_flight` the taken places. `sent` counts requests. `record` gets all calls, in the order of their
    sending; servers may share it.
    """

    model = "simulated"
    further_call = 0.1
    """The part of its work for which a further call prolongs a request."""

    def __init__(self, server: Server, luck: Luck, record: list[Sent] | None = None) -> None:
        self.server = server
        self.record = [] if record is None else record
        self.name, self.batch = server.name, server.batch
        self.closed = False
        self.arrivals: list[float] = []
        self.violations: list[tuple[float, str]] = []
        self.in_flight = self.sent = 0
        self._luck = luck
        self._phases = phases(server.faults)
        bucket = float(server.burst) if server.window == "bucket" else None
        requests = ledger_of(server.requests_per_minute, server.window_s, bucket)
        self._limits = StrictLimits(requests, ledger_of(server.tokens_per_minute, server.window_s), server.concurrency)

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Answer `request`, whose hidden work is `request.sample.extras["work"]`, with a verdict.

        Raises one `SourceError`, or hangs until it is cancelled.
        """
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> Sequence[Reply]:
        """Answer several calls in one request; see `Server.batch`. Otherwise as `send`."""
        asked = [self.asked(request) for request in requests]
        on_sent()
        served = await self.serve_calls(asked)
        each = zip(requests, asked, served.each_valid, strict=True)
        return [self.replied(request, call, served, valid=valid) for request, call, valid in each]

    def asked(self, request: Request) -> Asked:
        """What the server makes of a request."""
        work = work_of(request)
        completion = completion_tokens(work, request.max_completion_tokens)
        sample = request.sample
        return Asked(sample.id or "", poison_of(sample), work, prompt_tokens(request.size), completion)

    def replied(self, request: Request, call: Asked, served: Served, *, valid: bool) -> Reply:
        """The reply to a request, whose verdict is `valid` or none."""
        used = Usage(call.prompt_tokens, call.completion_tokens)
        return Reply(
            text=verdict_text(request) if valid else _NO_VERDICT,
            usage=Usage(ABSURD_TOKENS, ABSURD_TOKENS) if call.poison == "usage" else used,
            model=self.model,
            finish_reason="stop",
            announced=ABSURD_LIMITS if call.poison == "limits" else served.announced,
        )

    async def aclose(self) -> None:
        self.closed = True

    async def serve(self, sample_id: str, work: float, prompt_tokens: int, completion_tokens: int) -> Served:
        """Serve one request of a sample, sent now, with this hidden `work` (1 is the mean) and these tokens.

        Raises one `SourceError`: `Throttled` (429), or `TransientError` (status 500, or None if the connection broke).
        A request that hangs never ends; cancelling it is safe at any time.
        """
        return await self.serve_calls([Asked(sample_id, None, work, prompt_tokens, completion_tokens)])

    async def serve_calls(self, calls: Sequence[Asked]) -> Served:
        """Serve one request of several calls, as `serve` does; raise what poison provokes."""
        loop = asyncio.get_running_loop()
        now, together = loop.time(), len(calls)
        sent = [
            Sent(self.name, call.sample, now, call.prompt_tokens + call.completion_tokens, together, leads=not number)
            for number, call in enumerate(calls)
        ]
        self.record += sent
        draw = self._luck.draw(calls[0].sample)
        invalid = [draw.invalid if calls[0].poison != "prose" else -1.0]
        invalid += [-1.0 if one.poison == "prose" else self._luck.draw(one.sample).invalid for one in calls[1:]]
        poison = next((one.poison for one in calls if one.poison and one.poison not in OF_ONE_REPLY), None)
        works = [one.work for one in calls]
        work = max(works) + self.further_call * (sum(works) - max(works))
        prompt, completion = sum(one.prompt_tokens for one in calls), sum(one.completion_tokens for one in calls)
        call = _Call(draw, work, prompt, completion, now, loop, poison, loop.create_future(), invalid)
        self.sent += 1
        first, last = self.server.network_s
        loop.call_at(now + first + (last - first) * call.draw.network, self._arrive, call)
        endings: list[Ending] = ["cancelled"] * together
        try:
            served = await call.future
            endings = ["valid" if valid else "invalid" for valid in served.each_valid]
            return served
        except SourceError as error:
            endings = ["throttled" if isinstance(error, Throttled) else "failed"] * together
            raise
        except asyncio.CancelledError:
            call.given_up = True
            if self.server.cancel_frees:
                self._leave(call)
                if call.timer is not None:
                    call.timer.cancel()
            raise
        finally:
            for one, ending in zip(sent, endings, strict=True):
                one.ended_at, one.ending = loop.time(), ending

    # Timers

    def _arrive(self, call: _Call) -> None:
        now = call.loop.time()
        server = self.server
        self.arrivals.append(now)
        draw = call.draw
        error_share = server.error_share
        storm_s: float | None = None
        for fault in server.faults:
            if fault.start_s <= now < fault.end_s:
                if fault.kind == "refuse":
                    self._refuse(call, TransientError(f"{self.name} refuses connections"))
                    return
                if fault.kind == "throttle":
                    storm_s = fault.factor
                elif fault.kind == "errors":
                    error_share = max(error_share, fault.factor)
        if storm_s is not None:
            self._throttle(call, storm_s, "throttles everybody")
            return
        if call.poison == "throttled":
            self._throttle(call, TOO_LARGE_S, "says that the request is too large")
            return
        tokens = call.prompt_tokens + call.completion_tokens
        leaves_at_once = call.given_up and server.cancel_frees
        if broken := self._limits.broken(tokens, 0 if leaves_at_once else self.in_flight, now):
            limit, excess = broken
            whole = limit == "tokens" and tokens > self._limits.tokens.limit
            if not whole:
                self.violations.append((now, limit))
            self._throttle(call, max(SHORTEST_WAIT_S, excess.retry_after_s), f"is over its {_SIZE if whole else limit}")
            return
        self._limits.enter(tokens, now)
        if leaves_at_once:
            return
        call.held = True
        self.in_flight += 1
        service_s = server.seconds_per_unit * call.work
        if server.noise:
            service_s *= math.exp(server.noise * (draw.normal - server.noise / 2))
        if draw.straggler < server.straggler_share:
            service_s *= server.straggler_factor
        error: SourceError | None = None
        if draw.error < error_share:
            error = TransientError(f"{self.name} answered with status 500", status=500)
            service_s *= _ERROR_PART
        error = error_of(call.poison, self.name) or error
        if call.poison == "hang":
            service_s = HANGS_S
        end_s = max(now, call.sent_at + server.overhead_s + service_s)
        if server.faults:
            end_s, error = self._through_faults(now, end_s, error)
        if end_s < math.inf:
            call.timer = call.loop.call_at(end_s, self._end, call, error)
        elif not server.cancel_frees:
            hung_until_s = max(fault.end_s for fault in server.faults if fault.kind == "hang")
            if hung_until_s < math.inf:
                call.loop.call_at(hung_until_s, self._leave, call)

    def _end(self, call: _Call, error: SourceError | None) -> None:
        """End a request that had a place."""
        self._leave(call)
        future = call.future
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
            return
        each_valid = tuple(invalid >= self.server.invalid_share for invalid in call.invalid)
        announced = self._announced(call.loop.time())
        future.set_result(Served(call.prompt_tokens, call.completion_tokens, announced, each_valid))

    def _leave(self, call: _Call) -> None:
        """Free the place of a request, without telling its client."""
        if call.held:
            call.held = False
            self.in_flight -= 1

    def _fail(self, call: _Call, error: SourceError) -> None:
        if not call.future.done():
            call.future.set_exception(error)

    # Helpers

    def _announced(self, now: float) -> Mapping[str, float]:
        """Return the limits that an answer announces, as in `Reply.announced`."""
        announced: dict[str, float] = {}
        factor = self.server.wrong_by if self.server.announces == "wrong" else 1.0
        for what, stated in self._limits.announced(now).items() if self.server.announces is not None else ():
            announced[f"{what}_per_window"] = factor * stated.limit
            announced[f"{what}_remaining"] = factor * math.floor(stated.remaining + 1e-9)
            announced[f"{what}_reset_s"] = stated.reset_s
        return announced

    def _throttle(self, call: _Call, wait_s: float, why: str) -> None:
        retry_after_s = wait_s if self.server.retry_after == "seconds" else None
        self._refuse(call, Throttled(f"{self.name} {why}", status=429, retry_after_s=retry_after_s))

    def _refuse(self, call: _Call, error: SourceError) -> None:
        call.loop.call_at(max(call.loop.time(), call.sent_at + REFUSAL_S), self._fail, call, error)

    def _through_faults(self, now: float, end_s: float, error: SourceError | None) -> tuple[float, SourceError | None]:
        """When and how a request ends that would do so at `end_s` on a healthy server."""
        left_s = end_s - now
        for phase in self._phases:
            if phase.end_s <= now:
                continue
            if phase.dead:
                break
            room_s = (phase.end_s - max(now, phase.start_s)) * phase.speed
            if left_s <= room_s:
                return max(now, phase.start_s) + left_s / phase.speed, error
            left_s -= room_s
        # The first dead phase decides: the connection breaks, or is never answered.
        if phase.hangs:
            return math.inf, None
        return max(now, phase.start_s) + _BROKEN_AFTER_S, TransientError(f"{self.name} broke the connection")


@dataclass(eq=False, slots=True)
class _Call:
    """One request: on its way, in service, or answered."""

    draw: Draw
    work: float
    prompt_tokens: int
    completion_tokens: int
    sent_at: float
    loop: asyncio.AbstractEventLoop
    poison: Poison | None
    future: asyncio.Future[Served]
    invalid: Sequence[float]
    """The `Draw.invalid` of each of its calls; less than any share for one without a verdict."""
    timer: asyncio.TimerHandle | None = None
    held: bool = False
    given_up: bool = False
