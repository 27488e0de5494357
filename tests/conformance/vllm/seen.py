"""What a server of vLLM sees: a middleware that records each model call inside vLLM's own process.

Usage: --middleware tests.conformance.vllm.seen.Seen, then GET /seen: a list with a mapping for each call so far, which
it then forgets. `at` and `until` are seconds of one clock, of the arrival of the request and the end of its reply.
"""

from __future__ import annotations

import base64
import json
import time
from typing import Any


class Seen:
    """Records the calls (POST below /v1) of the application that it wraps."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._calls: list[dict[str, Any]] = []
        self._under_way = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] == "/seen":
            await self._answer(send)
        elif scope["type"] == "http" and scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            await self._record(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _record(self, scope: Any, receive: Any, send: Any) -> None:
        self._under_way += 1
        call: dict[str, Any] = {"path": scope["path"], "at": time.monotonic(), "under_way": self._under_way}
        request, reply = bytearray(), bytearray()

        async def received() -> Any:
            message = await receive()
            request.extend(message.get("body", b""))
            return message

        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                call["status"] = message["status"]
            reply.extend(message.get("body", b""))
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                ended()
            await send(message)

        def ended() -> None:
            # The client knows it as soon as the last part is sent, which is before the application returns.
            if "until" not in call:
                self._under_way -= 1
                call["until"] = time.monotonic()

        try:
            await self._app(scope, received, sent)
        finally:
            ended()
            bodies = {"request": base64.b64encode(request).decode(), "reply": base64.b64encode(reply).decode()}
            self._calls.append({**call, **bodies})

    async def _answer(self, send: Any) -> None:
        calls, self._calls = self._calls, []
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(calls).encode()})
