"""Defines `ReplicaSet`: equal servers of one model, which are started, supervised and stopped with the engine.

The servers run in a pool (`qreward_plugins.replicas`), which the engines of a process share, and those of a Ray job.
Requests and replies are those of the kind `openai` or `reward_model`: an inner source of this kind sends them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from ..config.source_models import SourceConfig
from ..errors import (
    ConfigurationError,
    Mistake,
    QRewardError,
    ReplicasNotChanged,
    ReplicasNotStarted,
    SourceHeld,
    SourceUnusable,
    TransientError,
)
from ..observers.events import ReplicaChanged
from ..observers.statistics import ReplicaStatistics
from ..quotas.tokens import Demand
from ..replicas import PoolSpec, ReplicaState
from ..replicas.pool import ChangeFailed, Mode, PoolFailed, Update, Weights, check_within
from ..replicas.pool_use import PoolUse
from ..replicas.server_kinds import CHAT
from ..secrets import environment_secrets, secrets_in
from ..system.ray_actors import missing_ray, ray_is_up
from .base import Reply, Request, ServedWeights
from .dialects.base import Refusal
from .kind import LOGITS, TEXT, Provider, SourceKind
from .replica import Mark
from .replica_set_config import ReplicaSetConfig, inner_source, pool_spec


@dataclass(frozen=True)
class WeightTransfer:
    """Weights from the memory of a trainer, by the server's own protocol.

    `receive` are the bodies of the requests by which a server receives tensors, in order: `update_info` of vLLM's
    `/update_weights`, the bodies of SGLang's `/update_weights_from_distributed` or `_from_tensor`. `begin` has one body
    for each replica: what lets it join the group of the trainer (`init_info` of vLLM's `/init_weight_transfer_engine`,
    the body of SGLang's `/init_weights_update_group`); empty if the servers have joined already.

    `send` is called with the numbers of the replicas that begin to receive, in the event loop of the caller, and sends
    the tensors. If it raises, the update fails, and the replicas are started again. None: the bodies hold the tensors.
    All bodies together may take 16 MB.
    """

    receive: Sequence[Mapping[str, Any]]
    begin: Sequence[Mapping[str, Any]] = ()
    send: Callable[[list[int]], Awaitable[None]] | None = None

    def check(self) -> None:
        """Raise `ValueError` for bodies that no server can be sent."""
        given: dict[str, Any] = {"receive": self.receive, "begin": self.begin}
        for name, bodies in given.items():
            if not isinstance(bodies, (list, tuple)) or not all(isinstance(body, Mapping) for body in bodies):
                raise ValueError(f"{name} of a WeightTransfer is a list of mappings, not {bodies!r:.80}")
        if not self.receive:
            raise ValueError("receive of the WeightTransfer is empty, so the replicas would receive nothing")

    async def run(self, use: PoolUse, update: Update) -> Weights:
        """Carry out `update` while sending. Raises what `PoolUse.update_weights` or `send` raises."""
        sends: list[asyncio.Future[None]] = []

        def begin(numbers: list[int]) -> None:
            if self.send is not None:
                sends.append(asyncio.ensure_future(_sent(self.send, numbers)))
                sends[-1].add_done_callback(check)

        def check(sent: asyncio.Future[None]) -> None:
            if not sent.cancelled() and sent.exception() is not None:
                updating.cancel()

        updating = asyncio.ensure_future(use.update_weights(update, begin))
        try:
            return await updating
        except asyncio.CancelledError:
            for sent in sends:
                if sent.done() and not sent.cancelled() and (error := sent.exception()) is not None:
                    raise error from None
            raise
        finally:
            updating.cancel()
            for sent in sends:
                sent.cancel()
            await asyncio.gather(updating, *sends, return_exceptions=True)


async def _sent(send: Callable[[list[int]], Awaitable[None]], numbers: list[int]) -> None:
    await send(numbers)


_T = TypeVar("_T")
_PROBLEM_CHARS = 300
"""Most characters of a problem that a server or its log states."""
_MOST_CHANGES = 1000
_MARKS: Mapping[str, Mark] = {"up": "up", "draining": "draining"}
_GONE = ("failed", "stopped")
"""The states of replicas that do not come back."""


class ReplicaSet(SourceKind):
    """Equal servers of one model, started and supervised here: vLLM, SGLang, llama.cpp or a command. It is the
    `CallGate` of its inner source, which sends the requests.

    Raises ConfigurationError for a topology that the devices or the model do not allow, for arguments that the servers
    get from here, and for what its inner source refuses.
    """

    Config: ClassVar[type[ReplicaSetConfig]] = ReplicaSetConfig

    answers = (TEXT, LOGITS)
    has_servers = True
    usual_latency_s = 2.0

    def __init__(self, name: str, config: ReplicaSetConfig) -> None:
        super().__init__(name, config)
        spec = pool_spec(name, config)
        self._config = config
        self._inner = inner_source(name, config)
        self.slots, self.batch, self.passes = self._inner.slots, self._inner.batch, self._inner.passes
        self.colocated = config.colocated
        if config.placement == "ray" and not ray_is_up():
            remedy = "Call ray.init() before you create the engine."
            raise ConfigurationError([Mistake(f"sources.{name}.placement", missing_ray(), remedy)])
        self._use = PoolUse(spec)
        given = [config.arguments, list(config.command or ()), list(config.program or ())]
        self._redactor = self._inner.redactor.beside(
            [*environment_secrets(), *spec.environment.values(), *secrets_in(given)]
        )
        self._path = "/v1" if config.task == CHAT else ""
        self._inner.replicas_asked.gate = self
        self._states: tuple[ReplicaState, ...] = ()
        """The states of the replicas at the last look."""
        self._seen = -1
        self._changes: list[ReplicaChanged] = []

    @classmethod
    def answered(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        return (TEXT,) if settings.get("task", CHAT) == CHAT else (LOGITS,)

    @property
    def spec(self) -> PoolSpec:
        """What its servers are started with."""
        return self._use.spec

    @property
    def replicas(self) -> tuple[ReplicaState, ...]:
        """The state of each replica; empty before the start."""
        return self._use.states

    @property
    def asleep(self) -> bool:
        """Whether all replicas slept when the pool was last heard of."""
        return self._use.asleep

    @property
    def started(self) -> bool:
        """Whether the servers have been started."""
        return self._use.started

    @property
    def begun(self) -> bool:
        """Whether the servers have been started, or are being started."""
        return self._use.begun

    async def start(self) -> None:
        """Start the servers, or find those that another engine has started, and wait until all are ready.

        Raises `ReplicasNotStarted`. Cancelling ends only the wait; `aclose` stops the servers.
        """
        problem, log = "", ""
        try:
            await self._use.start()
        except PoolFailed as error:
            problem, log = self._redactor.of(error.problem, _PROBLEM_CHARS), error.log
        if problem:
            raise ReplicasNotStarted(f"source {self._name!r} cannot start its servers: {problem}{self._shown(log)}")
        self.look()

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """See `Source.send`. The first request starts the servers, if `start` has not."""
        await self._prepare()
        return self._replied(await self._inner.send(request, on_sent=on_sent))

    async def send_batch(
        self, requests: Sequence[Request], *, on_sent: Callable[[], None]
    ) -> Sequence[Reply | QRewardError]:
        """Send several requests as one; see `Source`."""
        await self._prepare()
        replies = await self._inner.send_batch(requests, on_sent=on_sent)
        return [self._replied(reply) if isinstance(reply, Reply) else reply for reply in replies]

    def _replied(self, reply: Reply) -> Reply:
        """Return the reply with the model of the configuration. SGLang and llama.cpp state the private name that tells
        the servers of a pool apart from others.
        """
        if reply.model:
            reply.model = self._config.model
        return reply

    def question(self, request: Request) -> object:
        """See `Endpoint.question`. Addresses and topology change no answer, so they are not part of it; the weights
        are, as soon as they are not those of the configuration.
        """
        return self.question_of(request, self.weights)

    def question_of(self, request: Request, weights: ServedWeights | None) -> object:
        """Return what `question` returns while the replicas have these weights."""
        question = self._inner.question(request)
        return question if weights is None or not weights.identity else (question, weights.identity)

    def identity(self, request: Request) -> object:
        """See `Endpoint.identity`; other weights are another model."""
        own, weights = self._inner.identity(request), self.weights
        return own if not weights.identity else (own, weights.identity)

    def written(self, *requests: Request) -> str:
        """See `Endpoint.written`."""
        return self._inner.written(*requests)

    def demand(self, request: Request) -> Demand | None:
        """See `Source.demand`."""
        return self._inner.demand(request)

    def unmet(self, asked: Mapping[str, Any], *, thinking_tokens: int = 0) -> Sequence[Refusal]:
        """See `Source.unmet`."""
        return self._inner.unmet(asked, thinking_tokens=thinking_tokens)

    def replica_statistics(self, now: float) -> Sequence[ReplicaStatistics]:
        """See `Source.replica_statistics`."""
        return self._inner.replica_statistics(now)

    @property
    def weights(self) -> ServedWeights:
        """The weights of the pool: the new ones as soon as one replica has them."""
        weights = self._use.weights
        return ServedWeights(weights.version, weights.identity)

    # Changes while they run

    async def update_weights(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        transfer: WeightTransfer | None = None,
        version: str = "",
        mode: Mode = "rolling",
        within_s: float = 600.0,
    ) -> Weights:
        """See `RewardEngine.update_weights`."""
        if (path is None) == (transfer is None):
            raise ValueError("update_weights takes either `path` or `transfer`")
        how: dict[str, Any] = {"mode": mode, "within_s": within_s}
        if transfer is None:
            return await self._changed(self._use.update_weights(Update(version, _absolute(path), **how)))
        if not isinstance(transfer, WeightTransfer):
            raise ValueError(f"transfer is a WeightTransfer, not a {type(transfer).__name__}")
        transfer.check()
        update = Update(version, begin=tuple(transfer.begin), receive=tuple(transfer.receive), **how)
        return await self._changed(transfer.run(self._use, update))

    async def sleep(self, *, within_s: float = 600.0) -> None:
        """See `RewardEngine.sleep`."""
        check_within(within_s)
        await self._changed(self._use.sleep(within_s=within_s))

    async def wake_up(self) -> None:
        """See `RewardEngine.wake_up`."""
        await self._changed(self._use.wake_up())

    async def _changed(self, change: Coroutine[Any, Any, _T]) -> _T:
        """Carry out a command of the pool, once it is ready. Raises `ReplicasNotChanged`."""
        replicas: Sequence[int] = ()
        try:
            await self.start()
            result = await change
            self.look()
            return result
        except ChangeFailed as error:
            problem, log, replicas = error.problem, error.log, error.replicas
        except PoolFailed as error:
            problem, log = error.problem, error.log
        finally:
            change.close()
        shown = self._redactor.of(problem, 4 * _PROBLEM_CHARS)
        raise ReplicasNotChanged(f"source {self._name!r}: {shown}{self._shown(log)}", replicas=replicas)

    def held(self) -> str:
        """See `Source`: why calls wait, although nothing is wrong."""
        return self._use.held

    def listen(self, notify: Callable[[], None]) -> None:
        """Call `notify` after every change of a replica, in another thread."""
        self._use.on_change = notify

    def changes(self) -> Sequence[ReplicaChanged]:
        """Update the states of the replicas from the pool, and return the changes since the last call. Call it in the
        event loop.
        """
        self.look()
        changes, self._changes = self._changes, []
        return changes

    # The `CallGate` of the inner source

    def look(self) -> None:
        """Update the inner source from the states of the pool."""
        if self._seen == self._use.version:
            return
        self._seen = self._use.version
        were = {state.number: state for state in self._states}
        self._states = self._use.states
        asked = self._inner.replicas_asked
        running = {state.url + self._path: state for state in self._states if state.url}
        asked.absent = sum(not state.url and state.state not in _GONE for state in self._states)
        self._inner.move(list(running))
        for replica, state in zip(asked.all, running.values(), strict=True):
            asked.mark(replica, _MARKS.get(state.state, "down"))
            if state.state == "up":
                replica.weights = ServedWeights(state.version, state.identity)
            elif state.abort:
                asked.abort(replica)
        now = asyncio.get_running_loop().time()
        for state in self._states:
            was = were.get(state.number)
            if was is None or (was.state, was.version) != (state.state, state.version):
                before = "" if was is None else was.state
                problem = self._redactor.of(state.problem, _PROBLEM_CHARS)
                self._changes.append(
                    ReplicaChanged(now, self._name, state.number, state.state, before, state.version, problem)
                )
        del self._changes[:-_MOST_CHANGES]

    def enter(self, base_url: str) -> bool:
        return self._use.enter(base_url.removesuffix(self._path))

    def leave(self, base_url: str) -> None:
        self._use.leave(base_url.removesuffix(self._path))

    async def aclose(self) -> None:
        """Close the connections, and stop the servers if no other engine uses them. Idempotent."""
        self._use.on_change = _ignore
        try:
            await self._inner.aclose()
        finally:
            await self._use.aclose()

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what identifies its servers: everything that they are started with."""
        known = config.model_dump(mode="json", exclude=set(SourceConfig.model_fields) - {"kind"})
        return Provider(config.kind, (json.dumps(known, sort_keys=True),), config.model)

    async def _prepare(self) -> None:
        problem = ""
        if not self._use.started:
            try:
                await self.start()
            except ReplicasNotStarted as error:
                problem = str(error)
        if problem:
            raise SourceUnusable(problem, certain=True)
        self.look()
        states = self._states
        if any(state.state == "up" for state in states):
            return
        if self._use.held:
            raise SourceHeld(f"source {self._name!r}: {self._use.held}")
        shown = "; ".join(f"replica {state.number} is {state.state}" for state in states) or "its pool has ended"
        if self._use.ended or (states and all(state.state in ("failed", "stopped") for state in states)):
            raise SourceUnusable(f"source {self._name!r}: no replica is left ({shown})", certain=True)
        raise TransientError(f"source {self._name!r}: no replica is up ({shown})")

    def _shown(self, log: str) -> str:
        lines = [self._redactor.of(line, _PROBLEM_CHARS) for line in log.splitlines()]
        return "".join(["\nthe last lines of its log:", *(f"\n  {line}" for line in lines if line)]) if lines else ""


def _absolute(path: object) -> str:
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError(f"path is the path of a checkpoint, not {path!r:.80}")
    return os.path.abspath(text)


def _ignore() -> None:
    """Ignore a change, after the source was closed."""
