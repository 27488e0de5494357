"""Defines `PlayedSource`: a source over a simulated server, which answers in the form that the sample's judge reads.

`SimulatedServer` answers in the form of one judge only. The sources here answer for all judges of the configuration
(language models, services and functions), so that the engine reads verdicts as strictly as in a real run. All attempts
are recorded.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence

from ..config import Batch, Config, judge_for
from ..errors import SampleRefused, SourceError
from ..judges import kind_of as judge_kind_of
from ..samples.spent import Usage
from ..simulation.draws import score_of
from ..simulation.simulated_server import SimulatedServer
from ..sources import Reply, Request, kind_of
from .picture import Bar, BarEnd
from .rollouts import BYTES_PER_TOKEN

FIXED = 0.5
"""The part of the time of a request of one call that does not grow with the number of its calls."""


class PlayedSource:
    """A `Source` over a simulated server. If the configured source has a `batch`, a request takes several calls; its
    work is `FIXED`, plus the rest for each of them.
    """

    model = "simulated"

    def __init__(
        self,
        server: SimulatedServer,
        config: Config,
        *,
        slots: int | None,
        verdict_tokens: float,
        record: list[Bar],
    ) -> None:
        self.server = server
        self.name = server.name
        self._config = config
        self.slots = slots
        self._verdict_tokens = verdict_tokens
        self._record = record
        self.batch: Batch | None = getattr(config.sources[server.name], "batch", None)
        self._fixed_work = FIXED if self.batch is not None else 0.0

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Return a valid verdict after the server's latency. Errors of the server pass through."""
        return (await self.send_batch([request], on_sent=on_sent))[0]

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> list[Reply]:
        """Return a valid verdict for each call of one request. Errors of the server pass through."""
        on_sent()
        time = asyncio.get_running_loop().time
        sent_at = time()
        names = [self._asked_for(request) for request in requests]
        used = list(map(self._tokens, requests))
        prompt, completion = sum(one for one, _ in used), sum(one for _, one in used)
        end: BarEnd = "cancelled"
        try:
            work = self._fixed_work + (1 - self._fixed_work) * len(requests)
            await self.server.serve(names[0], work, prompt, completion)
            end = "answered"
        except SourceError:
            end = "failed"
            raise
        finally:
            self._record.append(Bar(self.name, end, sent_at, time(), prompt + completion))
        return [
            self._reply(request, Usage(*tokens) if tokens[0] else None)
            for request, tokens in zip(requests, used, strict=True)
        ]

    async def aclose(self) -> None:
        return None

    def _asked_for(self, request: Request) -> str:
        """Return the name of the request: the sample, plus the judge for a part of a sum, whose luck is independent."""
        sample = request.sample
        whole = judge_for(self._config, sample.data_source) == request.judge
        return sample.id or "" if whole else f"{sample.id} {request.judge}"

    def _tokens(self, request: Request) -> tuple[int, int]:
        if kind_of(self._config.sources[self.name]).local:
            return 0, 0
        # Only a language model writes tokens.
        completion = round(self._verdict_tokens) if request.messages else 0
        return -(-request.size // BYTES_PER_TOKEN), min(completion, request.max_completion_tokens or completion)

    def _reply(self, request: Request, usage: Usage | None) -> Reply:
        judge = self._config.judges.get(request.judge)
        if judge is None:
            raise SampleRefused("the request has no name of a judge (Request.judge), so its reply cannot be simulated")
        reply = judge_kind_of(judge).rehearsed(judge, request, score_of(request.sample.id or "") / 10)
        return dataclasses.replace(reply, usage=usage, model="simulated")
