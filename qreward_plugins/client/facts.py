"""Defines `ServerFacts`: the judges of a reward server, and how long its samples may take.

Workers of one training run must get the same keys for every sample, and rewards from the same judges. So an engine
asks for the facts once, before its first sample, and every later connection must have the same fingerprint.
"""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from ..errors import RewardServerError
from ..secrets import one_line
from .rows import unreadable

PROTOCOL = 2
"""Number of the form of frames and rows. A server and an engine with different numbers refuse each other."""
FACTS_PATH = "/facts"
_PAUSE_S = 0.5
_ONE_TRY_S = 10.0
_MOST_BYTES = 2**20
_TRY_AGAIN = (429, 502, 503, 504)


@dataclass(frozen=True)
class ServerFacts:
    """The facts of a server.

    `fingerprint` names judges, routes and models: what may change a reward. `components` and `defines_correct` are
    those of `telemetry.Facts`. `deadline_s` is that of samples without one. `window` is the number of samples that keep
    its sources busy. `max_bytes` is the size of the largest frame that it takes.
    """

    fingerprint: str
    components: tuple[str, ...]
    defines_correct: bool
    deadline_s: float
    window: int
    max_bytes: int

    def as_row(self) -> dict[str, Any]:
        """Return them as a JSON value."""
        return {
            "protocol": PROTOCOL,
            "fingerprint": self.fingerprint,
            "components": list(self.components),
            "defines_correct": self.defines_correct,
            "deadline_s": self.deadline_s,
            "window": self.window,
            "max_bytes": self.max_bytes,
        }


def facts_of(row: Mapping[str, Any]) -> ServerFacts:
    """Return the facts in a JSON value. Raises `RewardServerError` for another protocol, or what is no such value."""
    try:
        protocol = row["protocol"]
        if protocol != PROTOCOL:
            problem = f"it speaks protocol {protocol}, and this version protocol {PROTOCOL}"
            raise RewardServerError(f"{problem}; install the same version of qreward-plugins on both sides")
        return ServerFacts(
            str(row["fingerprint"]),
            tuple(map(str, row["components"])),
            bool(row["defines_correct"]),
            float(row["deadline_s"]),
            int(row["window"]),
            int(row["max_bytes"]),
        )
    except (LookupError, TypeError, ValueError) as error:
        raise unreadable(error) from None


def ask_facts(url: str, token: str | None, *, within_s: float) -> ServerFacts:
    """Ask the server at `url` for its facts. Blocks; it may still be starting, so it is asked again for `within_s`.

    Raises `RewardServerError` if it refuses, or does not answer in time.
    """
    request = urllib.request.Request(url + FACTS_PATH)
    if token is not None:
        request.add_header("Authorization", f"Bearer {token}")
    # A proxy of the environment would get samples that are meant for one machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects())
    until = time.monotonic() + within_s
    while True:
        error: RewardServerError
        try:
            with opener.open(request, timeout=min(_ONE_TRY_S, max(0.1, until - time.monotonic()))) as reply:
                row = orjson.loads(reply.read(_MOST_BYTES))
            if not isinstance(row, Mapping):
                raise unreadable(TypeError("no object"))
            return facts_of(row)
        except urllib.error.HTTPError as failed:
            failed.close()
            error = RewardServerError(f"it answered {failed.code}{_REMEDY.get(failed.code, '')}", status=failed.code)
            if failed.code not in _TRY_AGAIN:
                raise error from None
        except (orjson.JSONDecodeError, http.client.InvalidURL) as failed:
            raise unreadable(failed) from None
        except (OSError, http.client.HTTPException) as failed:
            # A tunnel or a proxy accepts connections before the server behind it does, and then breaks them.
            reason = getattr(failed, "reason", failed)
            hint = "; does it speak http, not https?" if isinstance(reason, ssl.SSLError) else ""
            error = RewardServerError(f"it cannot be reached ({type(reason).__name__}{hint})")
        if time.monotonic() + _PAUSE_S >= until:
            raise error from None
        time.sleep(_PAUSE_S)


_REMEDY = {
    401: "; set token_env to the variable that holds its token",
    404: "; there is no reward server (`qreward serve`) of this version at this URL",
}


def redirected(location: str) -> str:
    """Return what to say of a redirect. It is not followed: samples would go to another host, and its rewards count."""
    place = one_line(location.partition("?")[0], 200)
    return f"it redirects to {place}; redirects are not followed, so set the URL of the server itself"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        fp.close()
        raise RewardServerError(redirected(newurl), status=code)
