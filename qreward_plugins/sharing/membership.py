"""Keeps the shares of one engine up to date: reports to the keeper and applies its answers while the event loop runs.
`channel_of` says which keeper a configuration asks, and `source_keys` by which keys processes know a source.

One report is always open at the keeper. A newer one replaces it when calls wait that the keeper does not know of. Two
reports are at least `REPORT_EVERY_S` apart, so the load on the keeper does not depend on the request rate. Sending
within a share never waits for an answer.

What happens when the keeper fails:
- Dead: the worker that notices starts a new one.
- Silent: it may have given the shares to other workers. After `SILENT_AFTER_S` it is killed, and a new one is started.
  In both cases the shares expire `TTL_S` after the report that was last answered.
- Slow: it is not killed. A new keeper would be as slow, and it would count every limit as spent at first.

A provider counts requests by address, model, API key and headers. Two configurations of a job may spell the same
endpoint differently; the limit is still one. A configuration that declares the same endpoint twice declares two
sources, each with its own limits.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import os
import secrets
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

from ..config import Config
from ..errors import ConfigurationError, KeeperError, KeeperSilent, Mistake
from ..sources.kind import joined, kind_of, provider_of
from ..system.ray_actors import missing_ray, ray_is_up, start_ahead
from ..system.threads import cancel_futures
from .keeper import HOLD_S, TTL_S
from .member import NOTHING, Demand, Limited, Member, MemberSource
from .messages import Answer, Report
from .ray_keeper import NAME, KeeperActor, RayKeeper

if TYPE_CHECKING:
    from .machine_channel import MachineChannel

Sharing: TypeAlias = Literal["auto", "ray", "machine", "local", "off"]
"""How limits are shared (`engine.shared`)."""
OpenedChannel: TypeAlias = "RayKeeper | MachineChannel"
"""A channel of this package."""

_log = logging.getLogger("qreward_plugins.sharing")

REPORT_EVERY_S = 0.25
"""Least time in seconds between two reports."""
LOOK_EVERY_S = 0.005
"""Least time in seconds between two looks whether a report is due. The scheduler steps thousands of times a second."""
ANSWERED_WITHIN_S = HOLD_S + 2.0
"""Seconds after which a report counts as lost. The next one gets `TTL_S`, because the keeper may be slow."""
SILENT_AFTER_S = 3 * TTL_S
"""Seconds without an answer after which the keeper is killed."""
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 2.0
LAST_REPORT_WITHIN_S = 1.0


class Channel(Protocol):
    """The connection to the keeper of this job."""

    async def exchange(self, report: Report) -> Answer | None:
        """Send a report and wait for its answer; None if a newer report of this worker came first, or it was its last.

        Looks a keeper up, or starts one, on the first call and after `KeeperLost`. Raises `KeeperLost` if the keeper is
        dead and `KeeperSilent` if it cannot be reached. After a cancellation the keeper still has the report.
        """
        ...

    async def end_keeper(self) -> None:
        """Kill a keeper that does not answer. Raises nothing."""
        ...


LimitedT = TypeVar("LimitedT", bound=Limited, contravariant=True)


class Caller(Protocol[LimitedT]):
    """What sends requests within the limits: the `Dispatcher`, or an accelerated function."""

    @property
    def now(self) -> Callable[[], float]: ...

    def waiting_for(self, limited: LimitedT, /) -> tuple[int, float, float]:
        """What waits: the number of requests, the estimate of their tokens, and the most of the first one."""
        ...

    def call_back(self, limited: LimitedT, /, *, sent: bool) -> None:
        """Cancel the attempts that have not been sent, with `sent` all, and let their calls wait again."""
        ...

    def look_again(self) -> None:
        """Send what may be sent, because the limits have changed."""
        ...


class Membership:
    """Keeps the shares of one engine's sources up to date while the event loop runs in which it was started.

    `upstreams` maps the shared key of each source (`source_keys`) to an upstream with a `SharedQuota`. Times are
    seconds of the event loop's clock.
    """

    def __init__(self, upstreams: Mapping[str, Limited], channel: Channel) -> None:
        self._channel = channel
        self.member = Member(secrets.token_hex(8), upstreams)
        self._name = self.member.name
        self._dispatcher: Caller[Any]
        """Set by `start`."""
        self._task: asyncio.Task[None] | None = None
        self._ending: asyncio.TimerHandle | None = None
        self._urgent = asyncio.Event()
        self._sent_at = -math.inf
        self._next_look_at = -math.inf
        self._looked_at = -math.inf
        self._silent_s = 0.0
        self._overdue = False

    def change(self, upstreams: Mapping[str, Limited]) -> None:
        """Share these upstreams from now on. One that is not among them is shared until its last attempt has ended
        (`drained`), unless its quota goes on for another.
        """
        quotas = {id(upstream.quota) for upstream in upstreams.values()}
        gone = {key: source for key, source in self.member.sources.items() if key not in upstreams}
        draining = {key: one for key, one in gone.items() if one.limited.live and id(one.quota) not in quotas}
        self._share({**upstreams, **{key: source.limited for key, source in draining.items()}})
        for key, source in self.member.sources.items():
            source.drains = key in draining

    def drained(self, upstream: Limited) -> None:
        """Stop sharing an upstream that was removed: its last attempt has ended."""
        sources = self.member.sources
        kept = {key: one.limited for key, one in sources.items() if not (one.drains and one.limited is upstream)}
        if len(kept) < len(sources):
            self._share(kept)

    def _share(self, upstreams: Mapping[str, Limited]) -> None:
        self.member.change(upstreams)
        if self._task is None or not self.member.must_await_answer(self._dispatcher.now()):
            self._urgent.set()

    def start(self, dispatcher: Caller[Any]) -> None:
        """Start to report what waits in `dispatcher`, in the running event loop; drop the state of an earlier loop."""
        # An engine that was made before a fork is a worker of its own in each child.
        self.member.name = f"{self._name}-{os.getpid()}"
        self._dispatcher = dispatcher
        self._urgent = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._sent_at, self._looked_at, self._silent_s = -math.inf, loop.time(), 0.0
        self._ending = None  # it belongs to the earlier loop
        self._task = loop.create_task(self._keep())
        self._task.add_done_callback(_log_failure)

    def look(self, now: float) -> float:
        """Request a report if the keeper does not know what waits here or what was learned of a source. It is called
        after each step of the scheduler, and does so every `LOOK_EVERY_S` at most; return when to call it again.
        """
        if now < self._next_look_at:
            return self._next_look_at
        self._next_look_at = now + LOOK_EVERY_S
        if now < self._sent_at + REPORT_EVERY_S or self._urgent.is_set() or self.member.must_await_answer(now):
            # No report may go yet. `_exchange` looks again while it awaits an answer; otherwise `_keep` sends the next.
            return math.inf
        if any(one.report_due(self._demand(one), now) for one in self.member.sources.values()):
            self._urgent.set()
        return math.inf

    async def aclose(self) -> None:
        """Give up all shares and stop. Waits up to `LAST_REPORT_WITHIN_S` for the last report to arrive."""
        if self._task is None:
            return
        await cancel_futures([self._task])
        if self._ending is not None:
            self._ending.cancel()
        if self._sent_at > -math.inf:
            call = asyncio.ensure_future(self._channel.exchange(self.member.last_report(self._dispatcher.now())))
            await asyncio.wait([call], timeout=LAST_REPORT_WITHIN_S)
            await cancel_futures([call])
        self._task = None

    async def _keep(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            left_s = self._sent_at + REPORT_EVERY_S - self._dispatcher.now()
            if left_s > 0:
                await asyncio.sleep(left_s)
            try:
                answer = await self._exchange()
            except Exception as problem:
                if not isinstance(problem, KeeperError):
                    _log.exception("unexpected %s in the connection to the quota keeper", type(problem).__name__)
                await self._handle_failure(problem)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, LONGEST_BACKOFF_S)
                continue
            now = self._dispatcher.now()
            if answer is not None and self.member.accept(answer, now):
                backoff_s = FIRST_BACKOFF_S
                self._answered(now)

    async def _exchange(self) -> Answer | None:
        """Send a report and return its answer; None if a newer report is due first."""
        now = self._sent_at = self._dispatcher.now()
        self._urgent.clear()
        demands = {key: self._demand(source) for key, source in self.member.sources.items()}
        call = asyncio.ensure_future(self._channel.exchange(self.member.report(now, demands)))
        urgent = asyncio.ensure_future(self._urgent.wait())
        try:
            gives_up_at = now + (TTL_S if self._overdue else ANSWERED_WITHIN_S)
            while not call.done() and now < gives_up_at:
                waiting, left_s = [call, urgent], REPORT_EVERY_S
                if urgent.done():
                    # An answer that arrives before the next report may go saves that report.
                    waiting, left_s = [call], self._sent_at + REPORT_EVERY_S - now
                    if left_s <= 0:
                        return None
                await asyncio.wait(waiting, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                now = self._next_look_at = self._dispatcher.now()
                self.look(now)
            if call.cancelled():
                raise KeeperSilent("the call to the quota keeper was cancelled by another task")
            if call.done():
                return call.result()
            raise KeeperSilent(f"the quota keeper did not answer within {gives_up_at - self._sent_at:g} s")
        finally:
            await cancel_futures([urgent, call])

    def _answered(self, now: float) -> None:
        if self._silent_s > ANSWERED_WITHIN_S:
            _log.info("the quota keeper answers again")
        self._looked_at, self._silent_s, self._overdue = now, 0.0, False
        self._end_at(self.member.valid_until)
        self._dispatcher.look_again()

    async def _handle_failure(self, problem: Exception) -> None:
        now = self._dispatcher.now()
        # Time in which this process was suspended does not count as the keeper's silence.
        self._silent_s += min(now - self._looked_at, TTL_S + LONGEST_BACKOFF_S)
        self._looked_at = now
        self._overdue = True
        if now < self.member.valid_until:
            _log.warning(
                "%s; this process keeps its shares of the limits for %.0f s", problem, self.member.valid_until - now
            )
        else:
            _log.log(logging.WARNING if self.member.accepted else logging.INFO, "%s", problem)
        if self._silent_s >= SILENT_AFTER_S:
            _log.error(
                "the quota keeper has not answered for %.0f s; killing it and starting a new one", self._silent_s
            )
            self._silent_s = 0.0
            await self._channel.end_keeper()

    def _end_at(self, moment: float) -> None:
        if self._ending is not None:
            self._ending.cancel()
        self._ending = asyncio.get_running_loop().call_at(moment, self._end_if_due)

    def _end_if_due(self) -> None:
        """If the shares have expired, stop sending and cancel requests whose quota other workers may use now."""
        now = self._dispatcher.now()
        if now < self.member.valid_until:
            if self._ending is not None:  # event loops run timers a little early
                self._end_at(self.member.valid_until)
            return
        if self.member.expire(now):
            _log.error(
                "the quota keeper has not answered for %g s: requests to sources with limits stop until it does",
                TTL_S,
            )
            for source in self.member.sources.values():
                if limits := source.quota.declared():
                    # Completion tokens count when the reply comes, possibly a window later in another worker's share.
                    self._dispatcher.call_back(source.limited, sent=not {"concurrency", "tokens"}.isdisjoint(limits))

    def _demand(self, source: MemberSource) -> Demand:
        return NOTHING if source.drains else Demand(*self._dispatcher.waiting_for(source.limited))


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error(
            "the sharing of limits has stopped; no request is sent to sources with limits", exc_info=task.exception()
        )


def channel_of(config: Config, *, processes: int = 1, starts: bool = True) -> OpenedChannel | None:
    """Open the channel that `engine.shared` selects, see `open_channel`.

    With `auto`, a machine's keeper is for declared rates, and not for `processes` above 1: whoever counts the processes
    that share the limits may have them on several machines, and each keeps to an equal part. A job of Ray that only
    calls functions without limits needs no keeper: its actor would cost a process of 100 MB and a second of start.
    """
    sources = config.sources.values()
    limits = [each.limits for each in sources]
    has_rates = any(each.requests_per_minute or each.tokens_per_minute for each in limits)
    has_rates = has_rates or any([config.engine.budget, *(each.budget for each in sources)])
    has_limits = has_rates or any(each.limits.concurrency or not kind_of(each).local for each in sources)
    return open_channel(
        config.engine.shared, has_rates=has_rates and processes == 1, has_limits=has_limits, starts=starts
    )


def open_channel(
    shared: Sharing, *, has_rates: bool, has_limits: bool = True, starts: bool = True
) -> OpenedChannel | None:
    """Open the channel to a keeper; None if limits are not shared: for `local` and `off`. `auto` is the keeper of the
    Ray job where Ray is initialised and there are limits, otherwise that of this machine if there are rates to keep,
    outside of simulated time. A keeper on Ray starts in the background, or without `starts` with the first report, as
    one of a machine does.

    Raises `ConfigurationError` for `ray` if Ray is not initialised, and for `machine` if the system has no Unix sockets
    or the directory cannot be used.
    """
    if shared == "ray" and not ray_is_up():
        remedy = "Call ray.init() before you create the engine, or set it to `auto`, `machine` or `local`."
        raise ConfigurationError([Mistake("engine.shared", missing_ray(), remedy)])
    if shared == "auto" and not has_limits:
        return None
    if shared in ("auto", "ray") and ray_is_up():
        if starts:
            start_ahead(NAME, KeeperActor)
        return RayKeeper()
    has_sockets = hasattr(socket, "AF_UNIX") and hasattr(os, "fork")
    if shared == "machine" and not has_sockets:
        problem = "needs Unix domain sockets, which this system does not have."
        raise ConfigurationError([Mistake("engine.shared", problem, "Use `local`.")])
    if shared == "machine" or (shared == "auto" and has_rates and has_sockets and not _in_simulated_time()):
        from .machine_channel import MachineChannel

        return MachineChannel()
    return None


def source_keys(config: Config) -> dict[str, str]:
    """Return a key of 24 hexadecimal digits for each source name of `config`.

    Keys are equal in all processes whose requests the provider counts together. They are hashes and reveal no secret.
    """
    providers = {name: provider_of(name, node, os.environ) for name, node in config.sources.items()}
    often = Counter(providers.values())
    return {
        name: _digest(provider.parts if often[provider] == 1 else (*provider.parts, name))
        for name, provider in providers.items()
    }


def budget_key(sources: Iterable[str], run: str) -> str:
    """Return the key of what the sources with these keys may spend together; with `run`, in this run."""
    return _digest(("budget", run, *sorted(sources)))


def _digest(parts: tuple[str, ...]) -> str:
    return hashlib.blake2b(joined(parts).encode(), digest_size=12, person=b"qreward source").hexdigest()


def _in_simulated_time() -> bool:
    return bool(getattr(asyncio._get_running_loop(), "is_simulated", False))
