"""Scores the samples of one event loop at a reward server (`engine.server`), with the interface of `Scoring`.

`RewardClient` moves the samples. Whatever happens to the server, each sample gets one outcome by its deadline.
"""

from __future__ import annotations

import asyncio
import math
import os
from dataclasses import dataclass, field
from functools import partial

from anyio.from_thread import start_blocking_portal

from ..client.client import RewardClient
from ..client.rows import ServerFacts
from ..config.models import Priorities, ServerConfig
from ..config.source_models import is_framework_url
from ..errors import ConfigurationError, InputError, Mistake, RewardServerError
from ..judges import JudgeRouter
from ..observers import Observers, SampleSubmitted
from ..samples import Cause, Failed, Outcome, Sample
from ..samples.check import Rejected, named
from ..scheduling.batches import Batch
from .outcomes import Pending
from .scoring import Scoring
from .siblings import Siblings

_PATH = "engine.server"
_REMEDIES = {
    None: "Start it with `qreward serve`.",
    401: "Set token_env to the variable that holds its token.",
    404: "Start a server of this version there with `qreward serve`.",
}
_OTHER_JUDGES = "; start the run anew, or give the server its former configuration"


@dataclass(frozen=True)
class RemoteServer:
    """A reward server, and its first facts."""

    url: str
    facts: ServerFacts
    token: str | None = field(default=None, repr=False)


def open_server(config: ServerConfig) -> RemoteServer:
    """Ask the server for its facts. Blocks for `config.start_s` at most, while the server may still be starting.

    Raises `ConfigurationError` if the token is not set, or the server cannot be reached or refuses.
    """
    url = config.url.rstrip("/")
    if is_framework_url(url):
        remedy = "Write the URL of `qreward serve`."
        raise ConfigurationError([Mistake(_PATH, "a training framework starts no reward server.", remedy)])
    given = config.token
    token = _token(config.token_env) if given is None else given.get_secret_value().strip()
    failed: RewardServerError | None = None

    async def ask() -> ServerFacts:
        async with RewardClient(url, token=token, retry_for_s=config.start_s) as client:
            return await client.facts()

    try:
        # In a thread of its own: the caller's may run an event loop.
        with start_blocking_portal() as portal:
            facts = portal.call(ask)
    except RewardServerError as error:
        failed = error
    if failed is not None:
        # Raised outside of the `except`: what is below the error may hold the token.
        raise ConfigurationError([Mistake(_PATH, f"{failed}.", _REMEDIES.get(failed.status, ""))])
    return RemoteServer(url, facts, token)


def _token(variable: str | None) -> str | None:
    """Return the token in an environment variable; None if no variable is named."""
    if variable is None:
        return None
    token = os.environ.get(variable, "").strip()
    if not token:
        problem = f"the environment variable {variable} is not set."
        raise ConfigurationError([Mistake(f"{_PATH}.token_env", problem, "Set it to the token of the reward server.")])
    return token


class RemoteScoring(Scoring):
    """The samples of one event loop at `server`. Of its dispatcher, only the batches are used.

    `priorities`: those of the local configuration; None: those of the server's count.
    """

    def __init__(
        self, server: RemoteServer, *, router: JudgeRouter, observers: Observers, priorities: Priorities | None
    ) -> None:
        super().__init__(router, sources={}, journal=None, reuse=False, observers=observers)
        self._priorities = priorities
        self._waiting: dict[Pending, asyncio.Future[Outcome]] = {}
        fingerprint = server.facts.fingerprint
        self._client = RewardClient(server.url, token=server.token, retry_for_s=math.inf, fingerprint=fingerprint)

    def submit(
        self,
        sample: Sample | Rejected,
        batch: Batch | None,
        due_at: float,
        *,
        priority: int | None = None,
        groups: dict[str, Siblings] | None = None,
    ) -> asyncio.Future[Outcome]:
        self.statistics.sample_submitted()
        self.emit(SampleSubmitted, named(sample))
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        member = self.batches.join(self.batches.of_singles() if batch is None else batch, named(sample).group_id)
        pending = Pending(self, named(sample), member, future)
        if isinstance(sample, Rejected):
            pending.end(Failed(Cause.INFRA, "input", sample.problem))
            return future
        if priority is None and self._priorities is not None:
            priority = self._priorities.validation if sample.split == "val" else self._priorities.train
        try:
            asked = self._client.submit(sample, "the sample", due_at, priority=priority, batch=batch)
        except InputError as error:
            pending.end(Failed(Cause.INFRA, "input", str(error)))
            return future
        self._waiting[pending] = asked
        asked.add_done_callback(partial(self._answered, pending))
        future.add_done_callback(lambda _: asked.cancel())
        return future

    def cut_off(self, batch: Batch) -> None:
        self._fail_all("cutoff", "the batch stopped waiting, its quorum was in", batch)

    async def aclose(self) -> None:
        self._fail_all("closed", "the engine was closed before the sample was scored")
        self.dispatcher.close()
        await self._client.aclose()
        await self.dispatcher.aclose()

    def _fail_all(self, reason: str, detail: str, batch: Batch | None = None) -> None:
        """Fail the samples without an outcome, of `batch` or of all. Their ends cancel them at the server."""
        for pending in list(self._waiting):
            if batch is None or pending.member.batch is batch:
                pending.end(Failed(Cause.INFRA, reason, detail))

    def _answered(self, pending: Pending, asked: asyncio.Future[Outcome]) -> None:
        del self._waiting[pending]
        if asked.cancelled():
            pending.leave()
            return
        error = asked.exception()
        if error is None:
            pending.end(asked.result())
            return
        reason = error.reason if isinstance(error, RewardServerError) else "bug"
        detail = f"{error}{_OTHER_JUDGES}" if reason == "other_judges" else str(error)
        pending.end(Failed(Cause.INFRA, reason, detail))
