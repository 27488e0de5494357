"""Applies the limits of a simulated server to its requests, and announces them."""

from __future__ import annotations

from collections.abc import Mapping

from .servers import Server
from .strict_limits import RequestBucket, Window

CONCURRENCY_RETRY_AFTER_S = 1.0
"""Retry-After of a full server, which cannot know when a place gets free."""
SIZE = "window as a whole"
"""The name of the limit for a request that is larger than a whole token window."""
_NOTHING: Mapping[str, float] = {}


class ServerLimits:
    """The limits of one server, with the requests and tokens that it has admitted. Times are seconds."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._requests = _request_window(server)
        per_window = server.tokens_per_window
        self._tokens = None if per_window is None else Window(per_window, server.window_s)

    def broken(self, tokens: int, in_flight: int, now: float) -> tuple[str, float]:
        """Return the limit that a request of `tokens` would break and the seconds until it fits; "" and 0 if none."""
        concurrency = self._server.concurrency
        if concurrency is not None and in_flight >= concurrency:
            return "concurrency", CONCURRENCY_RETRY_AFTER_S
        if self._requests is not None:
            wait_s = self._requests.wait_s(1, now)
            if wait_s > 0:
                return "requests", wait_s
        if self._tokens is not None:
            wait_s = self._tokens.wait_s(tokens, now)
            if wait_s > 0:
                return (SIZE if tokens > self._tokens.limit else "tokens"), wait_s
        return "", 0.0

    def enter(self, tokens: int, now: float) -> None:
        """Count a request that is admitted."""
        if self._requests is not None:
            self._requests.enter(1, now)
        if self._tokens is not None:
            self._tokens.enter(tokens, now)

    def announced(self, now: float) -> Mapping[str, float]:
        """Return the limits that an answer announces, as in `Reply.announced`."""
        if self._server.announces is None:
            return _NOTHING
        factor = 1.0 if self._server.announces == "right" else self._server.wrong_by
        announced: dict[str, float] = {}
        for what, window, limit in (
            ("requests", self._requests, self._server.requests_per_window),
            ("tokens", self._tokens, self._server.tokens_per_window),
        ):
            if window is not None and limit is not None:
                announced[f"{what}_per_window"] = factor * limit
                # A bucket states its rate and what is left of that, as providers do, and nothing of its burst.
                whole = limit if isinstance(window, RequestBucket) else window.limit
                announced[f"{what}_remaining"] = factor * max(0, whole - window.used(now))
                announced[f"{what}_reset_s"] = window.reset_s(now)
        return announced


def _request_window(server: Server) -> Window | RequestBucket | None:
    per_window = server.requests_per_window
    if per_window is None or server.requests_per_minute is None:
        return None
    if server.window == "bucket":
        return RequestBucket(server.requests_per_minute, server.burst)
    return Window(per_window, server.window_s)
