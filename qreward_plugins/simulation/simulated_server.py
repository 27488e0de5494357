"""A server in virtual time as a source of the engine: one or several replicas of a `Server`, which answer verdicts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from ..config import Batch
from ..errors import QRewardError
from ..observers.statistics import ReplicaStatistics
from ..samples.spent import Usage
from ..sources.base import Reply, Request
from ..sources.replicas import Replicas, RoutingHints, TriedReplicas
from .draws import Luck, Trace, completion_tokens, prompt_tokens, verdict_text, work_of
from .poison import ABSURD_LIMITS, ABSURD_TOKENS, OF_ONE_REPLY, Poison, poison_of
from .request_server import RequestServer, Served
from .servers import Server

_FURTHER_CALL = 0.1
"""The part of its work for which a further call prolongs a request."""
_NO_VERDICT = "I would rather not say."


class SimulatedServer(RequestServer):
    """Plays `server`; a `Source` for the engine, and a neutral `serve` for the transports of other clients.

    `answer` writes the reply of a request whose verdict is valid (default: a verdict as LLM judges read it). See
    `RequestServer` for the rest.
    """

    def __init__(
        self,
        server: Server,
        luck: Luck,
        *,
        answer: Callable[[Request], str] | None = None,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(server, luck, trace=trace)
        self.closed = False
        self._answer = answer or verdict_text
        self._replicas = Replicas([f"{server.name}/{number}" for number in range(server.replicas)], name=server.name)

    @property
    def model(self) -> str:
        return "simulated"

    @property
    def slots(self) -> int | None:
        return None

    @property
    def batch(self) -> Batch | None:
        return self.server.batch

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Answer `request`, whose hidden work is `request.sample.extras["work"]`, with a verdict.

        Raises one `SourceError`, or hangs until it is cancelled.
        """
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> Sequence[Reply]:
        """Answer several calls in one request; see `Server.batch`. Otherwise as `send`."""
        works = [work_of(request) for request in requests]
        prompts = [prompt_tokens(request.size) for request in requests]
        completions = [
            completion_tokens(work, request.max_completion_tokens)
            for work, request in zip(works, requests, strict=True)
        ]
        poisons = [poison_of(request.sample) for request in requests]
        samples = [request.sample.id or "" for request in requests]
        served, on_judged = await self._routed(
            requests[0],
            on_sent,
            next((poison for poison in poisons if poison and poison not in OF_ONE_REPLY), poisons[0]),
            lambda poison: self.serve(
                samples[0],
                max(works) + _FURTHER_CALL * (sum(works) - max(works)),
                sum(prompts),
                sum(completions),
                poison=poison,
                others=list(zip(samples[1:], poisons[1:], strict=True)),
            ),
        )
        replies = []
        for request, prompt, completion, poison, valid in zip(
            requests, prompts, completions, poisons, served.each_valid, strict=True
        ):
            used = (ABSURD_TOKENS,) * 2 if poison == "usage" else (prompt, completion)
            replies.append(
                Reply(
                    text=self._answer(request) if valid and poison != "prose" else _NO_VERDICT,
                    usage=Usage(*used),
                    model="simulated",
                    finish_reason="stop",
                    announced=ABSURD_LIMITS if poison == "limits" else served.announced,
                    on_judged=on_judged,
                )
            )
        return replies

    def replica_statistics(self, now: float) -> Sequence[ReplicaStatistics]:
        """Return the statistics of each replica at this time of the event loop; empty if there is only one."""
        return self._replicas.statistics(now) if self._replicas.several else ()

    async def aclose(self) -> None:
        self.closed = True

    async def _routed(
        self,
        request: Request,
        on_sent: Callable[[], None],
        poison: Poison | None,
        serve: Callable[[Poison | None], Awaitable[Served]],
    ) -> tuple[Served, Callable[[bool, float], object | None] | None]:
        """Serve a request at one of the replicas, which is chosen and learns of its end as in a real source; return
        what the request got, and `Reply.on_judged`.
        """
        if not self._replicas.several:
            on_sent()
            return await serve(poison), None
        loop = asyncio.get_running_loop()
        tried = request.refusal if isinstance(request.refusal, TriedReplicas) else None
        failure: QRewardError | None = None
        with self._replicas.acquire(loop.time(), RoutingHints(tried=tried)) as lease:
            on_sent()
            try:
                # The last one is broken.
                served = await serve("refused" if lease.replica is self._replicas.all[-1] else poison)
            except QRewardError as error:
                failure = error
            except asyncio.CancelledError:
                lease.cancelled(loop.time())
                raise

        def read() -> Served:
            if failure is not None:
                raise failure
            return served

        return lease.read(loop.time(), read), lease.judged
