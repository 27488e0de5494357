"""Who may ask a reward server: callers with its token, or without one the programs of its own machine.

A web page in a browser of that machine is no such program. It can send requests to any port of it, so a server without
a token looks at what a page cannot change: `Origin`, `Host`, and a `Content-Type` that needs the server's consent.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from urllib.parse import urlsplit

from aiohttp import web

from ..errors import InputError
from .forms import Refused
from .proxy import KEY_HEADERS, PREFIXES

OPEN_PATHS = ("/healthz", "/readyz")
"""Paths that need no token: an orchestrator asks them, and they tell nothing about samples."""


class Access:
    """The rule of a server that listens on `host`.

    Raises `InputError` for a host that others can reach without a token, and for a blank token.
    """

    def __init__(self, token: str | None, host: str) -> None:
        if token is not None and not token.strip():
            raise InputError("the token is empty; set a long random text, or none on a loopback address")
        if token is None and not _is_loopback(host):
            raise InputError(
                f"{host} can be reached by others, so a token is needed: put it into an environment variable and name "
                "that variable with --token-env; or listen on 127.0.0.1"
            )
        self._token = None if token is None else _digest(token.strip())

    def check(self, request: web.Request) -> None:
        """Raise `Refused` for a caller that may not ask."""
        if self._token is None:
            _check_sender(request)
            return
        scheme, _, given = request.headers.get("Authorization", "").partition(" ")
        if request.path.startswith(PREFIXES):
            for header in KEY_HEADERS:
                if header in request.headers:
                    scheme, given = "bearer", request.headers[header]
        # Digests have one length, so that the comparison does not tell the length of the token.
        if scheme.lower() != "bearer" or not hmac.compare_digest(_digest(given.strip()), self._token):
            raise Refused(401, "token", "send the server's token as `Authorization: Bearer TOKEN`")


def _check_sender(request: web.Request) -> None:
    origin, host, body = request.headers.get("Origin"), request.host, request.content_type
    # Browsers say so of what another page loads, also without an `Origin`, as of a picture.
    loaded = request.headers.get("Sec-Fetch-Site") in ("cross-site", "same-site")
    status, what, remedy = 403, "", "start the server with --token-env"
    if origin is not None and origin.partition("://")[2] != host:
        what = f"a request of the web page {origin}"
    elif loaded and (request.method != "GET" or request.headers.get("Sec-Fetch-Mode") != "navigate"):
        what = "a request of another web page"
    elif not _is_address(host):
        what, remedy = f"a request for the host {host}", f"ask for 127.0.0.1 or localhost, or {remedy}"
    elif request.can_read_body and body != "application/json":
        status, what = 415, f"a body of the type {body}"
        remedy = f"send `Content-Type: application/json`, or {remedy}"
    if what:
        raise Refused(status, "sender", f"{what} needs a token, because any web page could send it; {remedy}")


def _is_address(host: str) -> bool:
    """Whether a `Host` is an address, with or without a port. A web page can point any other name to this machine."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
