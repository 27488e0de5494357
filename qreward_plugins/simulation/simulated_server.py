"""A server in virtual time as a source of the engine, which answers verdicts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..config import Batch
from ..samples.spent import Usage
from ..sources.base import Reply, Request
from .draws import Luck, Trace, completion_tokens, prompt_tokens, verdict_text, work_of
from .poison import ABSURD_LIMITS, ABSURD_TOKENS, OF_ONE_REPLY, poison_of
from .request_server import RequestServer
from .servers import Server

_FURTHER_CALL = 0.1
"""The part of its work for which a further call prolongs a request."""
_NO_VERDICT = "I would rather not say."


class SimulatedServer(RequestServer):
    """Plays `server`; a `Source` for the engine, and a neutral `serve` for the transports of other clients.

    The reply of a request whose verdict is valid is a verdict as LLM judges read it. See `RequestServer` for the rest.
    """

    def __init__(self, server: Server, luck: Luck, *, trace: Trace | None = None) -> None:
        super().__init__(server, luck, trace=trace)
        self.closed = False

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
        on_sent()
        served = await self.serve(
            samples[0],
            max(works) + _FURTHER_CALL * (sum(works) - max(works)),
            sum(prompts),
            sum(completions),
            poison=next((poison for poison in poisons if poison and poison not in OF_ONE_REPLY), poisons[0]),
            others=list(zip(samples[1:], poisons[1:], strict=True)),
        )
        replies = []
        for request, prompt, completion, poison, valid in zip(
            requests, prompts, completions, poisons, served.each_valid, strict=True
        ):
            used = (ABSURD_TOKENS,) * 2 if poison == "usage" else (prompt, completion)
            replies.append(
                Reply(
                    text=verdict_text(request) if valid and poison != "prose" else _NO_VERDICT,
                    usage=Usage(*used),
                    model="simulated",
                    finish_reason="stop",
                    announced=ABSURD_LIMITS if poison == "limits" else served.announced,
                )
            )
        return replies

    async def aclose(self) -> None:
        self.closed = True
