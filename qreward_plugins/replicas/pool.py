"""Defines `Pool`: starts all replicas together, restarts those that die, and stops all of them. It serves `Weights`,
which an `Update` changes.

`Changes` updates the weights of its replicas, and lets them sleep and wake.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio

from ..system.threads import cancel_futures
from .control import ServerFailed
from .server_kinds import PoolSpec

if TYPE_CHECKING:
    from .ray_server import RayServer
    from .server import LocalServer

_log = logging.getLogger("qreward_plugins.replicas")

_BACKOFF_S = (1.0, 60.0)
"""Seconds before the first restart, which double with each further one, and their bound."""
_STEADY_S = 600.0
"""Seconds after which a replica that has been up for so long may be restarted as often as at first."""


Mode = Literal["rolling", "together"]
"""`rolling`: one replica after the other. `together`: all at once, so that there is one version at a time."""
_LONGEST_VERSION_CHARS = 200
State = Literal["starting", "up", "draining", "updating", "asleep", "stale", "down", "failed", "stopped"]
"""`draining`: it ends its calls and gets no more. `updating`: it gets other weights. `asleep`: its devices are free.
`stale`: it runs without the weights of the pool, which came from memory. `down`: it ended, and is started again.
`failed`: it ended too often."""
Server: TypeAlias = "LocalServer | RayServer"
"""One start of one server, wherever it runs."""


@dataclass(frozen=True)
class ReplicaState:
    """The state of one replica, as its pool reports it. `url` is "" while its server does not run. `restarts` counts
    all restarts so far.

    `version` and `identity` are those of its weights (`Weights`). `ticket` numbers the times that it was drained;
    `abort`: its calls have had their time to end, and are to be sent again elsewhere.
    """

    number: int
    state: State = "starting"
    url: str = ""
    devices: str = ""
    restarts: int = 0
    problem: str = ""
    version: str = ""
    identity: str = ""
    ticket: int = 0
    abort: bool = False


@dataclass(frozen=True)
class Weights:
    """The weights that a pool serves: those of the configured model (`revision` 0), or of the last update.

    `version` is the name that the caller of the update gave. `identity` is equal for equal weights: a hash of the
    files, or a random token for weights from memory; it is "" for the configured model. `path` is the checkpoint, or ""
    for weights from the memory of a trainer. `revision` counts the updates of the pool.
    """

    version: str = ""
    identity: str = ""
    path: str = ""
    revision: int = 0

    @property
    def from_memory(self) -> bool:
        """Whether they came from the memory of a trainer, so that a server that is started again cannot load them."""
        return self.revision > 0 and not self.path


@dataclass(frozen=True)
class Update:
    """An update of weights: from the checkpoint `path`, or from memory.

    From memory, `begin` has the body that joins each replica to the transfer (none: nothing is to be joined), and
    `receive` the bodies of the calls by which a replica receives tensors, in order. `within_s` is the time in seconds
    that calls under way have to end, before they are cancelled and sent again.
    """

    version: str
    path: str = ""
    begin: tuple[Mapping[str, Any], ...] = ()
    receive: tuple[Mapping[str, Any], ...] = ()
    mode: Mode = "rolling"
    within_s: float = 600.0

    def __post_init__(self) -> None:
        """Raises `ValueError` for values that no pool can carry out."""
        if self.mode not in ("rolling", "together"):
            raise ValueError(f"mode is rolling or together, not {self.mode!r}")
        check_within(self.within_s)
        # Verdicts, logs and metrics carry it.
        version: object = self.version
        if not isinstance(version, str) or not version.isprintable() or len(version) > _LONGEST_VERSION_CHARS:
            problem = f"version is a printable text of at most {_LONGEST_VERSION_CHARS} characters"
            raise ValueError(f"{problem}, not {version!r:.80}")
        if self.receive and not version:
            raise ValueError("weights from memory need a `version`")


def check_within(within_s: object) -> None:
    """Raise `ValueError` for what is no time that calls may have to end."""
    if isinstance(within_s, bool) or not isinstance(within_s, (int, float)) or not 0 <= within_s < float("inf"):
        raise ValueError(f"within_s is a number of seconds from 0 on, not {within_s!r}")


class PoolFailed(ServerFailed):
    """A pool could not be started. `log` are the last lines of the server at fault, not redacted."""


class ChangeFailed(ServerFailed):
    """An update, a sleep or a wake-up of a pool failed. `replicas` are the numbers of the replicas at fault; `log` are
    the last lines of the log of the first one, not redacted.
    """

    def __init__(self, problem: str, *, replicas: Sequence[int] = (), log: str = "") -> None:
        super().__init__(problem, log)
        self.replicas = tuple(replicas)


def change_failure(failed: Mapping[int, ServerFailed], then: str) -> ChangeFailed:
    """Return the failure of a change in which these replicas failed. `then` says what happens to them now."""
    problems = "; ".join(f"replica {number}: {error.problem}" for number, error in sorted(failed.items()))
    log = next((error.log for _, error in sorted(failed.items()) if error.log), "")
    return ChangeFailed(f"{problems}; {then}", replicas=sorted(failed), log=log)


_ABORTED_S = 30.0
"""Seconds that the users of a replica have to cancel their calls. One that hangs is not waited for."""


async def _at_once(state: ReplicaState) -> None:
    """Return at once: for a pool whose users are not known."""


class Pool:
    """The replicas of one source. It serves the event loop in which it was started.

    `server` makes the server of a replica, for each start anew. `on_change` is called after every change of `states`.
    `idle` waits until no user has calls at a replica that is draining. `weights` are those of an earlier pool that this
    one replaces; default: those of the configuration. `asleep`: that one slept, so this one starts its servers when it
    wakes.
    """

    def __init__(
        self,
        spec: PoolSpec,
        server: Callable[[int], Server],
        on_change: Callable[[], None] = lambda: None,
        *,
        idle: Callable[[ReplicaState], Awaitable[None]] = _at_once,
        weights: Weights | None = None,
        asleep: bool = False,
    ) -> None:
        self.spec = spec
        self.starts_asleep = asleep
        self._weights = weights or Weights()
        self.has: dict[int, Weights] = {}
        """By replica: the weights with which it last took calls."""
        self.receiving: tuple[str, list[int]] = ("", [])
        """The token of the last update from memory, and the replicas that receive its tensors."""
        self.servers: dict[int, Server] = {}
        """The last start of each replica."""
        self.may_open = asyncio.Event()
        """Not set while a replica that was started again must not take calls yet."""
        self.may_open.set()
        self._server = server
        self._on_change = on_change
        self._idle = idle
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stopping: asyncio.Task[None] | None = None
        topology = spec.topology
        # Users remember whether a pool slept, so it says so from its first state on.
        first: State = "asleep" if asleep else "starting"
        self._states = [
            ReplicaState(number, first, devices=topology.shown_devices(number))
            for number in range(topology.data_parallel)
        ]

    @property
    def states(self) -> tuple[ReplicaState, ...]:
        """The state of each replica."""
        return tuple(self._states)

    @property
    def weights(self) -> Weights:
        """What replicas are started with from now on. Users hear of a change at once: the journal's keys have it."""
        return self._weights

    @weights.setter
    def weights(self, weights: Weights) -> None:
        if weights != self._weights:
            self._weights = weights
            self._on_change()

    async def start(self) -> None:
        """Start all replicas at the same time, and wait until all are ready.

        If one of them ends, or is not ready within `start_within_s`, all are stopped. Raises `PoolFailed` then.
        Cancelling stops all, too. A pool that starts asleep starts none.
        """
        if self.starts_asleep:
            return
        starts = [asyncio.ensure_future(self._start_first(state.number)) for state in self._states]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            await cancel_futures(starts)
            await self.stop()
            raise
        for state in self._states:
            self.supervise(state.number)

    async def _start_first(self, number: int) -> None:
        failed = await self.try_to_start(number)
        if failed is not None:
            raise PoolFailed(f"replica {number}: {failed.problem}", failed.log)

    async def stop(self) -> None:
        """Stop all replicas at the same time, with every process of theirs. Idempotent; cancelling ends only the
        wait.
        """
        if self._stopping is None:
            self._stopping = asyncio.ensure_future(self._stop())
        await asyncio.shield(self._stopping)

    async def _stop(self) -> None:
        await cancel_futures(list(self._tasks.values()))
        results = await asyncio.gather(*(server.stop() for server in self.servers.values()), return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                _log.warning("a replica of %s could not be stopped", self.spec.name, exc_info=result)
        for state in self._states:
            self.set(state.number, "stopped", url="")

    async def start_one(self, number: int, weights: Weights | None = None) -> None:
        """Start the server of a replica, and wait until it serves `weights`; default: those of the pool, also if these
        change meanwhile. Raises `ServerFailed`.
        """
        while True:
            wanted = weights or self.weights
            server = self.servers[number] = self._server(number)
            url = await server.start(wanted)
            if self.spec.in_place and wanted.path:
                await server.call("load", path=wanted.path)
            if weights is not None:
                break
            await self.may_open.wait()
            if self.weights is wanted:
                break
            await server.stop()
        if wanted.from_memory:
            self.has.pop(number, None)
            self.set(number, "stale", url=url, problem=f"the weights {wanted.version} came from memory; update again")
        else:
            self.ready(number, wanted, url)

    def ready(self, number: int, weights: Weights, url: str) -> None:
        """Record that a replica serves `weights` and takes calls."""
        self.has[number] = weights
        self.set(number, "up", url=url, problem="", version=weights.version, identity=weights.identity)

    def receive(self, token: str, numbers: list[int]) -> None:
        """Record that these replicas begin to receive the tensors of an update from memory."""
        self.receiving = (token, numbers)
        self._on_change()

    def supervise(self, number: int, failed: ServerFailed | None = None) -> None:
        """Start a replica again whenever it ends, from now on. `failed`: it has ended already, or is to be ended."""
        earlier = self._tasks.get(number)
        if earlier is not None:
            earlier.cancel()
        self._tasks[number] = asyncio.ensure_future(self._supervise(number, failed))

    def keep(self, number: int) -> None:
        """Supervise a replica that runs, unless that is done already."""
        if number not in self._tasks:
            self.supervise(number)

    async def leave_alone(self, numbers: Iterable[int]) -> None:
        """Stop supervising these replicas, until `supervise`."""
        await cancel_futures([self._tasks.pop(number) for number in numbers if number in self._tasks])

    async def drain(self, numbers: Sequence[int], *, within_s: float) -> None:
        """Let replicas get no more calls, and wait until their calls have ended. After `within_s` seconds, users are
        told to cancel them and to send them again.
        """
        numbers = [number for number in numbers if self._states[number].state == "up"]
        for number in numbers:
            self.set(number, "draining", ticket=self._states[number].ticket + 1, abort=False)
        waits = {asyncio.ensure_future(self._idle(self._states[number])): number for number in numbers}
        try:
            for limit_s in (within_s, _ABORTED_S):
                late = [number for wait, number in waits.items() if not wait.done()]
                for number in late if limit_s is _ABORTED_S else ():
                    self.set(number, "draining", abort=True)
                if late:
                    await asyncio.wait(waits, timeout=limit_s)
        finally:
            await cancel_futures(list(waits))

    async def _supervise(self, number: int, failed: ServerFailed | None) -> None:
        """Start a replica again whenever it ends, until it has ended too often in a row."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            server, up_at = self.servers[number], loop.time()
            if failed is None:
                failed = await server.ended()
                if loop.time() - up_at >= _STEADY_S:
                    failures = 0
            failures += 1
            await server.stop()
            over = failures > self.spec.restarts
            state = self._states[number]
            self.set(number, "failed" if over else "down", url="", problem=failed.problem)
            then = "it is not started again" if over else "it is started again"
            _log.warning("replica %d of %s: %s; %s", number, self.spec.name, failed.problem, then)
            if over:
                return
            least_s, most_s = _BACKOFF_S
            await asyncio.sleep(min(most_s, least_s * 2 ** (failures - 1)))
            self.set(number, "starting", restarts=state.restarts + 1)
            failed = await self.try_to_start(number)

    async def try_to_start(self, number: int, weights: Weights | None = None) -> ServerFailed | None:
        """Start a replica as `start_one` does, within `start_within_s` seconds. Return why it did not start."""
        try:
            # Not `asyncio.wait_for`: before Python 3.12 it loses a cancellation that comes just after the start.
            with anyio.fail_after(self.spec.start_within_s):
                await self.start_one(number, weights)
        except ServerFailed as error:
            return error
        except TimeoutError:
            within = f"{self.spec.start_within_s:g} s (start_within_s)"
            problem = f"it is not ready after {within}: /v1/models does not list the name that it was started with"
            return ServerFailed(problem, getattr(self.servers[number], "log_tail", str)())
        except Exception as error:
            _log.warning("replica %d of %s", number, self.spec.name, exc_info=error)
            return ServerFailed(f"it cannot be started ({type(error).__name__})")
        return None

    def set(self, number: int, state: State, **changes: Any) -> None:
        """Change the reported state of a replica."""
        new = replace(self._states[number], state=state, **changes)
        if self._states[number] != new:
            self._states[number] = new
            self._on_change()
