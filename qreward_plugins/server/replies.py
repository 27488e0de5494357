"""HTTP replies of the reward server, and the errors that it answers with."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import orjson
from aiohttp import web

from .proxy import PREFIXES, in_form


class Refused(Exception):
    """A request that is answered with an error.

    `cause` is that of a missing reward. `retry_after_s`: seconds after which the request may be sent again.
    """

    def __init__(
        self, status: int, reason: str, detail: str, *, cause: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.reason, self.detail = status, reason, detail
        self.cause, self.retry_after_s = cause, retry_after_s

    def response(self, request: web.Request) -> web.Response:
        """Return the reply, in the form of the client that sent `request`."""
        retry_after = None if self.retry_after_s is None else str(math.ceil(self.retry_after_s))
        if request.path.startswith(PREFIXES):
            return in_form(request, self.status, self.reason, self.detail, retry_after)
        error = {"cause": self.cause, "reason": self.reason, "detail": self.detail}
        return json_reply({"error": error}, self.status, {} if retry_after is None else {"Retry-After": retry_after})


def json_reply(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    """Return a JSON value."""
    return web.Response(body=orjson.dumps(value), status=status, headers=headers, content_type="application/json")
