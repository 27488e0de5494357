"""Factories of `httpx.Auth`, as a configuration names them."""

from __future__ import annotations

from collections.abc import Generator

import httpx

TOKEN = "tok-0123456789-abcdef-secret"


class Renewing(httpx.Auth):
    """Sends a token, and asks for another one after a 401, as OAuth and digest do."""

    requires_response_body = True

    def __init__(self) -> None:
        self.number = 0

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        request.headers["Authorization"] = f"Bearer {TOKEN}-{self.number}"
        response = yield request
        if response.status_code == 401 and self.number == 0:
            self.number = 1
            request.headers["Authorization"] = f"Bearer {TOKEN}-{self.number}"
            yield request


class Raising(httpx.Auth):
    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        raise KeyError(TOKEN)
        yield request


def broken() -> httpx.Auth:
    raise KeyError(TOKEN)


def nothing() -> None:
    return None
