"""HTTP replies of the reward server, and the errors that it answers with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web


class Refused(Exception):
    """A request that is answered with an error. `retry_after_s`: seconds after which it may be sent again."""

    def __init__(self, status: int, reason: str, detail: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail, self.retry_after_s = status, reason, detail, retry_after_s

    def response(self) -> web.Response:
        """Return the reply."""
        return error_reply(self.status, self.reason, self.detail, retry_after_s=self.retry_after_s)


def error_reply(
    status: int, reason: str, detail: str, *, cause: str | None = None, retry_after_s: float | None = None
) -> web.Response:
    """Return an error in the form of all errors of this server."""
    error = {"cause": cause, "reason": reason, "detail": detail}
    headers = {} if retry_after_s is None else {"Retry-After": str(math.ceil(retry_after_s))}
    return json_reply({"error": error}, status, headers)


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON value."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")
