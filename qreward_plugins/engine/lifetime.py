"""The life of an engine: its parts, the event loop that they serve, and their end.

Sources, judges, journal, observers and the connection to the keeper outlive an event loop. The scoring and its
dispatcher belong to one: they are made in the loop of the first call, and dropped when that loop is found closed.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import anyio

from ..config import Config, JournalConfig, configured_name
from ..config.names import without_keys
from ..errors import ConfigurationError, EngineError, Mistake
from ..journal.journal import Journal, current_run
from ..judges.router import JudgeRouter
from ..observers import Observer, Observers, Statistics, load_observers, with_names
from ..samples import Sample
from ..scheduling.dispatcher import Dispatcher, close_all
from ..scheduling.upstream import Upstream, Upstreams
from ..sharing.member import Limited
from ..sharing.membership import Channel, Membership, OpenedChannel, budget_key, channel_of, source_keys
from ..sources import Source
from ..system.threads import cancel_all
from .opened_sources import open_budgets, open_upstreams
from .remote import RemoteScoring, RemoteServer, open_server
from .scoring import Scoring
from .starts import SourceStarts, StartProbe

_log = logging.getLogger("qreward_plugins.engine")

CLOSE_WITHIN_S = 10.0
"""Most seconds for closing the scheduler, again for all sources together, and for a source that was removed."""
END_WITHIN_S = 2.0
"""Most seconds to wait for a part that did not close in time and was cancelled."""

_Close = Callable[[], Awaitable[None]]


class Lifetime:
    """The parts of one engine. The arguments are those of `RewardEngine`. Raises `ConfigurationError` with all
    mistakes. Quotas and learned estimates are kept in the upstreams, because the provider goes on counting.
    """

    def __init__(
        self,
        config: Config,
        *,
        processes: int,
        sources: Mapping[str, Source],
        channel: Channel | None,
        observers: Iterable[Observer],
        statistics: Statistics,
    ) -> None:
        self.given = sources
        """The sources that the caller has opened."""
        self.config = without_keys(config, sources)
        theirs = [*load_observers(self.config.observers), *with_names(observers)]
        self.observers = Observers(statistics, theirs)
        settings = self.config.engine
        self.server: RemoteServer | None = None if settings.server is None else open_server(settings.server)
        """The reward server that scores instead of this process; None: this process scores."""
        self.opened_channel: OpenedChannel | None = None
        """The connection to the keeper, if the engine has opened it itself."""
        if self.server is None and channel is None:
            channel = self.opened_channel = channel_of(config, processes=processes)
        self.processes = 1 if settings.shared == "off" else processes
        self._shared = channel is not None
        self.budgets = open_budgets(self.config, processes=self.processes, shared=self._shared)
        self.upstreams = Upstreams(self.opened(self.config), on_drained=self._drained)
        # Also without a channel: a kind that cannot name its provider is a mistake before the first reload needs it.
        keys, run = source_keys(self.config), current_run() if self.budgets else ""
        self._budgets = {
            budget_key([keys[name] for name in names], "" if names and budget.per == "hour" else run): budget
            for names, budget in self.budgets.items()
        }
        """The budgets by the keys under which processes share them."""
        self.membership = Membership(self.by_key(), channel) if channel else None
        self.rng = random.Random(settings.seed)
        self._key = (
            secrets.token_bytes(32) if settings.seed is None else hashlib.sha256(str(settings.seed).encode()).digest()
        )
        self.router = self.routed(self.config, self.upstreams)
        self.source_starts = SourceStarts([upstream.source for upstream in self.upstreams.values()])
        self.start_probe = StartProbe(self.router.leaves.values(), given=sources)
        self.journal = None if settings.journal is None else _opened(settings.journal, settings.seed)
        self.reuse = bool(settings.journal and settings.journal.reuse)
        """Whether recorded answers of the journal are used instead of asking again."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that is served; None before the first call."""
        self.scoring: Scoring | None = None
        """The scoring of `loop`; None before the first call."""
        self.on_started: Callable[[], None] | None = None
        """Called in each event loop that is served, at first."""
        self.is_closing = False
        """Whether the engine takes no more samples."""
        self.closed_first: dict[str, _Close] = {}
        """What else has to end before the scheduler closes."""
        self._pid = os.getpid()
        self._ended = False
        self._end: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        """Removed sources that are being closed."""

    def opened(self, config: Config) -> dict[str, Upstream]:
        """Return new upstreams for the sources of `config`. Raises `ConfigurationError`."""
        return open_upstreams(config, self.given, self.budgets, processes=self.processes, shared=self._shared)

    def compares(self, sample: Sample) -> bool:
        """Whether a judge, here or at the reward server, compares a sample with its siblings."""
        if self.server is not None:
            return self.server.facts.compares and sample.split != "val"
        return self.router.compares(sample)

    def routed(self, config: Config, upstreams: Mapping[str, Upstream]) -> JudgeRouter:
        """Return new judges for `config`. Raises `ConfigurationError`, also if they do not suit their sources."""
        router = JudgeRouter(config, key=self._key)
        mistakes: list[Mistake] = []
        for judge in router.leaves.values():
            # Sources that are given need not be those of the configuration.
            own = [name for name in judge.sources if name not in self.given]
            mistakes += judge.mistakes({name: upstreams[name].source for name in own})
        if mistakes:
            raise ConfigurationError(mistakes)
        return router

    def upstreams_of(self, source: str) -> list[Upstream]:
        """Return the upstreams of a source of the configuration, one for each of its keys, or the one named `NAME#1`.
        Raises `EngineError`.
        """
        meant = [each for name, each in self.upstreams.items() if source in (name, configured_name(name))]
        if not meant:
            raise EngineError(f"unknown source {source!r}; sources: {', '.join(self.upstreams)}")
        return meant

    def server_source(self, name: str) -> Any:
        """Return a source that has servers of its own. Raises `EngineError`."""
        sources = {each: upstream.source for each, upstream in self.upstreams.items()}
        found = {each: source for each, source in sources.items() if source.has_servers}
        if not isinstance(name, str) or name not in found:
            raise EngineError(f"{name!r} is no source of kind replicas; such sources: {', '.join(found) or 'none'}")
        return found[name]

    def by_key(self) -> dict[str, Limited]:
        """Return the upstreams and budgets by the keys under which processes share them."""
        keys = source_keys(self.config)
        return {**{keys[name]: upstream for name, upstream in self.upstreams.items()}, **self._budgets}

    # The event loop

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher of `loop`; None before the first call."""
        return self.scoring.dispatcher if self.scoring is not None else None

    def bind(self) -> Scoring:
        """Return the scoring of the running event loop; create it on the first call.

        Raises `EngineError` if the engine is closed, after a fork, and if another loop that is still open is served.
        """
        if self.is_closing:
            raise EngineError("this RewardEngine is closed; make a new one")
        loop = asyncio.get_running_loop()
        return self.bound_to(loop) or self._start(loop)

    def bound_to(self, loop: asyncio.AbstractEventLoop) -> Scoring | None:
        """Return the scoring of `loop`; None if there is none yet. Raises as `bind` does, except if closed."""
        if self.loop is not None and self._pid != os.getpid():
            raise EngineError("this RewardEngine was used before a fork; make a new one in this process")
        if self.scoring is not None and self.loop is loop:
            return self.scoring
        if self.loop is not None and not self.loop.is_closed():
            raise EngineError(
                "this RewardEngine serves another event loop that is still open; "
                "make one engine per loop, or share one through RewardEngine.portal()"
            )
        return None

    def _start(self, loop: asyncio.AbstractEventLoop) -> Scoring:
        for upstream in self.upstreams.all:
            upstream.abandon_attempts(loop.time())
        for budget in self.budgets.values():
            budget.quota.forget_in_flight(loop.time())
        self.loop, self._pid = loop, os.getpid()
        scoring = self.scoring = self._scoring()
        scoring.dispatcher = Dispatcher(
            self.upstreams,
            rng=self.rng,
            max_attempts=self.config.engine.max_attempts,
            settings=self.config.engine.scheduling,
            asks_once=self.reuse if self.config.engine.ask_once is None else self.config.engine.ask_once,
            on_cutoff=scoring.cut_off,
            on_pumped=self.membership.look if self.membership is not None else None,
            observers=self.observers,
        )
        if self.membership is not None:
            self.membership.start(scoring.dispatcher)
        if self.on_started is not None:
            self.on_started()
        return scoring

    def _scoring(self) -> Scoring:
        if self.server is not None:
            engine = self.config.engine
            own = engine.priority if "priority" in engine.model_fields_set else None
            return RemoteScoring(self.server, router=self.router, observers=self.observers, priorities=own)
        return Scoring(
            self.router,
            sources={name: upstream.source for name, upstream in self.upstreams.items()},
            journal=self.journal,
            reuse=self.reuse,
            observers=self.observers,
        )

    # How much it can do

    @property
    def calls_per_s(self) -> float:
        """The calls per second that the declared limits allow in this process; infinity without limits."""
        return sum(upstream.most_calls * upstream.quota.rate_per_s for upstream in self.upstreams.values())

    @property
    def stream_window(self) -> int:
        """Enough samples to keep every source busy, but at most what the limits allow in half a deadline."""
        if self.server is not None:
            return self.server.facts.window
        busy = 4 * sum(upstream.most_calls * upstream.quota.most_at_once for upstream in self.upstreams.values())
        allowed = self.calls_per_s * self.config.engine.deadline_s / 2
        return max(1, int(min(busy, allowed / self.router.most_calls)))

    def warn_if_too_many(self, batch: Sequence[Sample], deadline_s: float) -> None:
        """Log a warning if the limits do not allow all calls of `batch` within `deadline_s` seconds."""
        rate = self.calls_per_s
        at_once = sum(upstream.most_calls * upstream.quota.burst for upstream in self.upstreams.values())
        most = rate * deadline_s + at_once
        # Most batches are far smaller, so their calls are not counted.
        requests = self.router.calls_of(batch) if len(batch) * self.router.most_calls > most else 0
        if requests > most:
            _log.warning(
                "%d samples take about %.0f s at the %.0f requests/min that the sources allow; the deadline is %.0f s: "
                "samples will fail. Raise engine.deadline_s, or add sources.",
                len(batch),
                requests / rate,
                60 * rate,
                deadline_s,
            )

    # The end

    def _drained(self, upstream: Upstream) -> None:
        """Close a source that was removed, after its last attempt."""
        if self.membership is not None:
            self.membership.drained(upstream)
        if upstream.name not in self.given:
            # What the caller has opened may come back, and closes with the engine.
            self.close_later(upstream)

    def close_later(self, upstream: Upstream) -> None:
        """Close a source that is not used any more."""
        task = asyncio.get_running_loop().create_task(_closed(upstream))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def aclose(self) -> None:
        """Close all parts. May be called again; a cancelled caller ends only its own wait."""
        self.is_closing = True
        loop = asyncio.get_running_loop()
        # After a fork, everything that is open belongs to the parent.
        while not self._ended and self._pid == os.getpid():
            task = self._end
            if task is None or task.done() or task.get_loop() is not loop:
                task = self._end = loop.create_task(self._close())
            # A cancelled caller stops waiting here; the task goes on closing.
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()
                return

    async def _close(self) -> None:
        loop = asyncio.get_running_loop()
        self.source_starts.close()
        interrupted: asyncio.CancelledError | None = None
        for step in self._steps(loop):
            try:
                await self._close_all(step)
            except asyncio.CancelledError as cancelled:
                interrupted = cancelled
        if interrupted is None:
            self.observers.close(loop.time())
        if self.journal is not None:
            try:
                await self.journal.aclose()
            except Exception:
                self._ended = interrupted is None
                raise
        if interrupted is not None:
            raise interrupted
        self._ended = True

    def _steps(self, loop: asyncio.AbstractEventLoop) -> Iterator[dict[str, _Close]]:
        """Yield what closes at the same time, one step after the other."""
        if self.scoring is not None and self.loop is loop:
            yield {"the start probe": self.start_probe.aclose, **self.closed_first}
            yield {"the scheduler": self.scoring.aclose}
            if self.membership is not None:
                yield {"the connection to the quota keeper": self.membership.aclose}
        if self.opened_channel is not None:
            yield {"the channel to the quota keeper": self.opened_channel.aclose}
        # Attempts at sources that were removed have ended, and some of these may be closing by now.
        sources = {f"source {name}": source for name, source in self.given.items()}
        sources |= {f"source {name}": upstream.source for name, upstream in self.upstreams.items()}
        sources |= {
            f"source {upstream.name} (removed, {number})": upstream.source
            for number, upstream in enumerate(self.upstreams.draining)
            if upstream.name not in self.given
        }
        parts: dict[str, _Close] = {what: source.aclose for what, source in sources.items()}
        yield {**parts, "the sources that were removed": self._end_closing}

    async def _end_closing(self) -> None:
        if self._closing:
            await asyncio.wait(list(self._closing))

    async def _close_all(self, parts: Mapping[str, _Close]) -> None:
        """Close `parts` at the same time. A failure of one does not stop the others."""
        tasks = {asyncio.ensure_future(_call(aclose)): what for what, aclose in parts.items()}
        if not tasks:
            return
        try:
            await asyncio.wait(tasks, timeout=CLOSE_WITHIN_S)
        finally:
            # Also after a cancellation, so that parts that are closing have time to end.
            for task in await cancel_all(tasks, within_s=END_WITHIN_S):
                _log.warning("%s could not be closed within %g s, and is abandoned", tasks[task], CLOSE_WITHIN_S)
            for task, what in tasks.items():
                failed = task.exception() if task.done() and not task.cancelled() else None
                if failed is not None:
                    _log.warning("%s could not be closed", what, exc_info=failed)


async def _call(aclose: _Close) -> None:
    # A task needs a coroutine. A foreign source may return another awaitable, or raise when called.
    await aclose()


async def _closed(upstream: Upstream) -> None:
    try:
        with anyio.fail_after(CLOSE_WITHIN_S):
            await close_all([upstream])
            await upstream.source.aclose()
    except Exception:
        _log.warning("source %s, which was removed, could not be closed", upstream.name, exc_info=True)


def _opened(config: JournalConfig, seed: int | None) -> Journal:
    return Journal(
        config.path, keep=config.keep, texts_mb=config.texts_mb, redact=config.redact, rng=random.Random(seed)
    )
