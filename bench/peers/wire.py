"""An httpx transport whose servers are the simulated ones: what the OpenAI client of a peer gets in place of sockets.

The host of the URL names the source. Time-outs are httpx's own: the `read` time of a request's `timeout`.
"""

from __future__ import annotations

import asyncio
import json

import httpx

from .stage import HTTPFailure, NetworkFailure, Stage


class SimulatedTransport(httpx.AsyncBaseTransport):
    """Chat completions of the simulated servers."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(await request.aread())
        item = self._stage.item_of(body["messages"])
        timeout_s = request.extensions.get("timeout", {}).get("read")
        try:
            answer = await self._stage.ask(request.url.host, item, timeout_s=timeout_s)
        except HTTPFailure as failure:
            headers = {"retry-after": failure.retry_after} if failure.retry_after else {}
            kind = "rate_limit_exceeded" if failure.status == 429 else "server_error"
            error = {"error": {"message": f"simulated {failure.status}", "type": kind, "code": kind}}
            return httpx.Response(failure.status, headers=headers, json=error, request=request)
        except NetworkFailure as failure:
            raise httpx.ConnectError(str(failure), request=request) from None
        except asyncio.TimeoutError:
            raise httpx.ReadTimeout("simulated time-out", request=request) from None
        completion = {
            "id": f"chatcmpl-{item.id}",
            "object": "chat.completion",
            "created": 1_800_000_000,
            "model": body["model"],
            "choices": [
                {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": answer.text}}
            ],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }
        return httpx.Response(200, json=completion, request=request)


__all__ = ["SimulatedTransport"]
