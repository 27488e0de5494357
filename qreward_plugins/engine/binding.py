"""Binds an engine to the event loop that it serves."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from ..errors import EngineError
from ..scheduling import Dispatcher, Upstream
from ..scheduling.upstreams import with_draining
from .remote import RemoteScoring
from .scoring import Scoring
from .wiring import Wiring


class LoopBinding:
    """Holds what belongs to one event loop: the scoring and its dispatcher.

    They are created in the loop of the first call, and dropped when that loop is found closed. Quotas and learned
    estimates are kept in the upstreams, because the provider goes on counting.
    """

    def __init__(self, wiring: Wiring) -> None:
        self._wiring = wiring
        self.loop: asyncio.AbstractEventLoop | None = None
        """The loop that is served; None before the first call."""
        self.scoring: Scoring | None = None
        """The scoring of `loop`; None before the first call."""
        self.pid = os.getpid()
        """The process that opened what is open."""
        self.on_started: Callable[[], None] | None = None
        """Called in each event loop that is served, at first."""
        self.on_drained: Callable[[Upstream], None] | None = None
        """`Dispatcher.on_drained` of each loop."""

    @property
    def dispatcher(self) -> Dispatcher | None:
        """The dispatcher of `loop`; None before the first call."""
        return self.scoring.dispatcher if self.scoring is not None else None

    def bind(self) -> Scoring:
        """Return the scoring of the running event loop; create it on the first call.

        Raises `EngineError` after a fork, and if another loop that is still open is served.
        """
        loop = asyncio.get_running_loop()
        return self.bound_to(loop) or self._start(loop)

    def bound_to(self, loop: asyncio.AbstractEventLoop) -> Scoring | None:
        """Return the scoring of `loop`; None if there is none yet. Raises as `bind` does."""
        if self.loop is not None and self.pid != os.getpid():
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
        wiring = self._wiring
        for upstream in with_draining(wiring.upstreams):
            upstream.abandon_attempts(loop.time())
        self.loop, self.pid = loop, os.getpid()
        scoring = self.scoring = self._scoring()
        scoring.dispatcher = Dispatcher(
            wiring.upstreams,
            rng=wiring.rng,
            max_attempts=wiring.config.engine.max_attempts,
            settings=wiring.config.engine.scheduling,
            keeps_late=wiring.journal is not None,
            on_cutoff=scoring.cut_off,
            on_pumped=wiring.membership.look if wiring.membership is not None else None,
            observers=wiring.observers,
        )
        if wiring.membership is not None:
            wiring.membership.start(scoring.dispatcher)
        scoring.dispatcher.on_drained = self.on_drained
        if self.on_started is not None:
            self.on_started()
        return scoring

    def _scoring(self) -> Scoring:
        wiring = self._wiring
        if wiring.server is not None:
            engine = wiring.config.engine
            own = engine.priority if "priority" in engine.model_fields_set else None
            return RemoteScoring(wiring.server, router=wiring.router, observers=wiring.observers, priorities=own)
        return Scoring(
            wiring.router,
            sources={name: upstream.source for name, upstream in wiring.upstreams.items()},
            journal=wiring.journal,
            reuse=wiring.reuse,
            observers=wiring.observers,
        )
