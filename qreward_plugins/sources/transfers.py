"""Defines `WeightTransfer`: sends weights from the memory of a trainer to the servers of a source."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from ..replicas.pool_use import PoolUse
from ..replicas.weights import Update, Weights


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
            if isinstance(bodies, str) or not isinstance(bodies, Sequence):
                raise ValueError(f"{name} of a WeightTransfer is a list of mappings, not a {type(bodies).__name__}")
            for number, body in enumerate(bodies):
                if not isinstance(body, Mapping):
                    raise ValueError(f"{name}[{number}] of the WeightTransfer is a mapping, not {body!r:.80}")
                try:
                    orjson.dumps(dict(body))
                except TypeError as error:
                    raise ValueError(f"{name}[{number}] of the WeightTransfer is not JSON ({error})") from None
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
