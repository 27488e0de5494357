"""Finds the dialect of a chat server by asking it, for `qreward init`.

1. The list of models at `/models` differs between OpenAI-compatible servers, Anthropic and Gemini.
2. A server without a list is told by the paths that answer an empty request with a complaint about it.
3. An OpenAI-compatible server gets one request of at most 16 tokens, because only an answer shows whether the model
   refuses `max_tokens` and `temperature`.

The order is fixed, so the same server always gives the same dialect. These requests do not count in any quota.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson
from yarl import URL

from ..sources.dialects import DIALECTS, Dialect
from ..sources.http import proxy_for
from ..sources.rate_limit_headers import announced_limits
from ..sources.replies import Problem, json_of

_MOST_BYTES = 4_194_304
_TRIES = 3
_PAUSE_S = 0.5
_PROBE_TOKENS = 16
_ABSENT = (404, 405, 501)
_COMPLAINT = (400, 422)
_REFUSED_PARAMETER = ("unsupported_parameter", "unsupported_value")
_CHAT, _MESSAGES, _RESPONSES, _GEMINI = (DIALECTS[name] for name in ("openai", "anthropic", "responses", "gemini"))


class Undetected(Exception):
    """The dialect cannot be told. The text says what the server answered, without secrets."""


@dataclass(frozen=True)
class Server:
    """The server that is asked. `key` is "" without one; `headers` are those of the configuration. `request_s`: most
    seconds for one request.
    """

    urls: tuple[str, ...]
    model: str
    key: str
    headers: Mapping[str, str]
    verify_tls: bool
    connect_s: float
    request_s: float = 20.0


@dataclass(frozen=True)
class Detected:
    """What a server is. `announced` are the limits in the headers of its answers (`announced_limits`)."""

    dialect: str
    why: str
    announced: Mapping[str, float] = field(default_factory=dict)


async def ask(server: Server) -> Detected:
    """Return the dialect of the first URL that tells it. Raises `Undetected`."""
    async with open_session(server) as session:
        problems: list[str] = []
        for url in server.urls:
            probe = Probe(session, server, url)
            try:
                dialect, why = await probe.dialect()
            except Undetected as error:
                problems.append(f"{url}: {error}")
            else:
                return Detected(dialect, why, probe.announced)
    raise Undetected("; ".join(problems))


def open_session(server: Server) -> aiohttp.ClientSession:
    """Open a session for the requests of probes."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=server.verify_tls),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=server.request_s, connect=server.connect_s),
        trust_env=False,
    )


@dataclass(frozen=True)
class Probe:
    """Asks a server at one URL."""

    session: aiohttp.ClientSession
    server: Server
    url: str
    announced: dict[str, float] = field(default_factory=dict)
    """The limits that its latest answers announced."""

    async def dialect(self) -> tuple[str, str]:
        """Return the dialect at this URL, and why it is this one."""
        answers: list[str] = []
        listing: tuple[Dialect, ...] = (_CHAT, _MESSAGES, _GEMINI)
        for dialect in listing:
            status, body = await self.send("GET", "/models", dialect)
            answers.append(f"/models answered {status}")
            found = lister(body) if status == 200 else None
            if found is _CHAT:
                return await self._of_openai()
            if found is not None:
                return found.name, f"its list of models is in the form of {found.title}"
        for dialect in (*listing[:2], _RESPONSES, _GEMINI):
            path = self._path(dialect)
            status, body = await self.send("POST", path, dialect, {})
            answers.append(f"{path} answered {status}")
            if status in _COMPLAINT and isinstance(body, (dict, list)):
                if dialect is _CHAT:
                    return await self._of_openai()
                return dialect.name, f"{path} answered {status} to an empty request"
        raise Undetected(", ".join(dict.fromkeys(answers)))

    async def _of_openai(self) -> tuple[str, str]:
        """Return which of OpenAI's dialects the model takes."""
        path = self._path(_CHAT)
        asked: dict[str, Any] = {"model": self.server.model, "messages": [{"role": "user", "content": "Say OK."}]}
        asked |= {"max_tokens": _PROBE_TOKENS, "temperature": 0}
        status, body = await self.send("POST", path, _CHAT, asked)
        problem = Problem.of(body)
        if status in _COMPLAINT and problem.has(_REFUSED_PARAMETER):
            return "openai_reasoning", f"{path} refuses max_tokens or temperature for this model"
        if 200 <= status < 300:
            return "openai", f"{path} answered"
        if status in _ABSENT and not problem.has(("model_not_found",)):
            other, _ = await self.send("POST", self._path(_RESPONSES), _RESPONSES, {})
            if other in _COMPLAINT:
                return "responses", f"{path} is absent, and {self._path(_RESPONSES)} is not"
        hint = {401: ": the key was refused", 403: ": the key has no permission", 404: ": unknown path or model"}
        raise Undetected(f"{path} answered {status}{hint.get(status, '')}")

    def _path(self, dialect: Dialect) -> str:
        model = self.server.model if "/" in self.server.model else f"models/{self.server.model}"
        return dialect.path.replace("{model}", quote(model, safe="/"))

    async def send(
        self, method: str, path: str, dialect: Dialect, body: object = None, *, tries: int = _TRIES
    ) -> tuple[int, Any]:
        """Return the status and the JSON of an answer. Raises `Undetected` if there is none after so many tries."""
        carrier, before = dialect.key_header
        headers = {**dialect.headers, **self.server.headers}
        if self.server.key:
            headers[carrier] = f"{before}{self.server.key}"
        target = URL(self.url + path)
        data = None if body is None else orjson.dumps(body)
        if data is not None:
            headers["Content-Type"] = "application/json"
        problem = ""
        for attempt in range(tries):
            if attempt:
                await asyncio.sleep(_PAUSE_S)
            try:
                async with self.session.request(
                    method, target, data=data, headers=headers, proxy=proxy_for(target), allow_redirects=False
                ) as response:
                    text = await response.content.read(_MOST_BYTES)
                    while len(text) < _MOST_BYTES and (more := await response.content.read(_MOST_BYTES - len(text))):
                        text += more
            except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
                problem = f"no answer ({_cause(error)})"
                continue
            self.announced.update(announced_limits(response.headers))
            problem = f"{path} answered {response.status}"
            if response.status != 429 and (response.status < 500 or response.status == 501):
                return response.status, json_of(text)
        raise Undetected(problem)


def lister(body: Any) -> Dialect | None:
    """Return the dialect in whose form a list of models is; None for another body."""
    if not isinstance(body, dict):
        return None
    data, models = body.get("data"), body.get("models")
    if isinstance(data, list):
        first = data[0] if data else {}
        if isinstance(first, dict) and first.get("type") == "model" and "object" not in body:
            return _MESSAGES
        return _CHAT if body.get("object") == "list" else None
    if isinstance(models, list) and any(isinstance(m, dict) and "supportedGenerationMethods" in m for m in models):
        return _GEMINI
    return None


def _cause(error: Exception) -> str:
    """Return the system's words for an error of the network, or the name of its class."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else type(error).__name__
