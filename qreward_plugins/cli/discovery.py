"""Asks an endpoint what it serves, for `qreward init`: its models, its dialect, and the limits that it announces.

The list of models at `/models` differs between OpenAI-compatible servers, Anthropic and Gemini. An OpenAI-compatible
server gets one request of at most 16 tokens, because only an answer shows whether the model refuses `max_tokens` and
`temperature`. These requests do not count in the quotas of a source, which does not exist yet.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson
from yarl import URL

from ..sources.dialects import DIALECTS
from ..sources.http import proxy_for
from ..sources.rate_limit_headers import announced_limits
from ..sources.replies import Problem, json_of

CONNECT_S = 5.0
"""Most seconds to connect."""
LIST_S = 5.0
"""Most seconds for a list of models. Servers have it at hand, so one that takes longer hangs."""
SURVEY_S = 30.0
"""Most seconds for a few tokens of a model."""
_MOST_MODELS = 1000
_MOST_BYTES = 4_194_304
_PROBE_TOKENS = 16
_LONGEST_NAME_CHARS = 200
_COMPATIBLE = "openai"
_LISTING = (_COMPATIBLE, "anthropic", "gemini")
"""The dialects that have a list of models of their own form."""
_REFUSED_PARAMETER = ("unsupported_parameter", "unsupported_value")
_HINTS = {
    200: ", but with no list of models; is this the URL of the API?",
    401: ": it wants another key",
    403: ": the key has no permission",
}


@dataclass(frozen=True)
class Discovered:
    """What an endpoint serves.

    `url` is the URL for the configuration: `/v1` is added if only there is a list of models. `models` are the names in
    that list. `dialect` is the one in whose form the list is. `server` is the program that serves, if it says so
    ("vllm", "sglang", "tei" ...). `announced` are the limits in its headers. `answers` is false if there is no HTTP
    answer. `problem` says why `models` is empty.
    """

    url: str
    models: tuple[str, ...] = ()
    dialect: str = _COMPATIBLE
    server: str = ""
    announced: Mapping[str, float] = field(default_factory=dict)
    answers: bool = True
    problem: str = ""


async def discover(url: str, key: str = "") -> Discovered:
    """Ask the endpoint at `url` for its models, with the API key `key` ("" for none). Raises nothing."""
    problems: list[str] = []
    try:
        for candidate in _candidates(url):
            for name in _LISTING:
                status, body, announced = await _ask(f"{candidate}/models", name, key, within_s=LIST_S)
                dialect = _lister(body) if status == 200 else None
                if dialect is not None:
                    return Discovered(candidate, _names(body), dialect, _owner(body), announced)
                problems.append(f"{urlsplit(candidate).path}/models answered {status}{_HINTS.get(status, '')}")
                if status == 404 and not key:
                    break
        status, body, _ = await _ask(str(URL(url).origin() / "info"), _COMPATIBLE, key, within_s=LIST_S)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        return Discovered(url, answers=False, problem=f"no answer ({_cause(error)})")
    if status == 200 and isinstance(body, dict) and isinstance(body.get("model_id"), str):
        return Discovered(url, (body["model_id"],), server="tei")
    return Discovered(url, problem=", ".join(dict.fromkeys(problems)))


async def survey(found: Discovered, model: str, key: str = "") -> tuple[str, Mapping[str, float]]:
    """Return the dialect in which `model` answers, and the announced limits. Raises nothing."""
    if found.dialect != _COMPATIBLE:
        return found.dialect, found.announced
    url = found.url + DIALECTS[_COMPATIBLE].path
    asked: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": "Say OK."}]}
    asked |= {"max_tokens": _PROBE_TOKENS, "temperature": 0}
    try:
        status, body, announced = await _ask(url, _COMPATIBLE, key, asked, within_s=SURVEY_S)
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
        return _COMPATIBLE, {}
    refused = status in (400, 422) and Problem.of(body).has(_REFUSED_PARAMETER)
    return "openai_reasoning" if refused else _COMPATIBLE, announced


async def _ask(
    url: str, dialect: str, key: str, body: object = None, *, within_s: float
) -> tuple[int, Any, Mapping[str, float]]:
    """GET a URL, or POST a body to it. Return the status, the JSON and the announced limits of the answer."""
    carrier, before = DIALECTS[dialect].key_header
    headers = {**DIALECTS[dialect].headers, **({carrier: f"{before}{key}"} if key else {})}
    data = None if body is None else orjson.dumps(body)
    if data is not None:
        headers["Content-Type"] = "application/json"
    timeout = aiohttp.ClientTimeout(total=within_s, connect=CONNECT_S)
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, trust_env=False) as session,
        session.request(
            "GET" if data is None else "POST",
            URL(url),
            data=data,
            headers=headers,
            proxy=proxy_for(URL(url)),
            allow_redirects=False,
        ) as reply,
    ):
        text = b""
        while len(text) < _MOST_BYTES and (more := await reply.content.read(_MOST_BYTES - len(text))):
            text += more
        return reply.status, json_of(text), announced_limits(reply.headers)


def _lister(body: Any) -> str | None:
    """Return the dialect in whose form a list of models is; None for another body."""
    if not isinstance(body, dict):
        return None
    data, models = body.get("data"), body.get("models")
    if isinstance(data, list):
        first = data[0] if data else {}
        if isinstance(first, dict) and first.get("type") == "model" and "object" not in body:
            return "anthropic"
        return _COMPATIBLE if body.get("object") == "list" else None
    if isinstance(models, list) and any(isinstance(m, dict) and "supportedGenerationMethods" in m for m in models):
        return "gemini"
    return None


def _candidates(url: str) -> list[str]:
    """The URLs whose `/models` is asked for: the given one, and the usual version below a URL without a path."""
    url = url.rstrip("/")
    return [url] if urlsplit(url).path.strip("/") else [f"{url}/v1", url, f"{url}/v1beta"]


def _names(body: Any) -> tuple[str, ...]:
    """The names in a list of models; names that a terminal cannot show, or that are too long, are left out."""
    entries = body.get("data") or body.get("models") or ()
    found = [
        # Gemini writes models/NAME. Elsewhere this is a part of the name, such as a folder that vLLM serves.
        str(entry.get("id") or str(entry.get("name") or "").removeprefix("models/"))
        for entry in entries[:_MOST_MODELS]
        if isinstance(entry, dict)
    ]
    return tuple(filter(_can_be_shown, found))


def _owner(body: Any) -> str:
    entries = body.get("data") or ()
    owner = entries[0].get("owned_by") if entries and isinstance(entries[0], dict) else ""
    return owner if isinstance(owner, str) and _can_be_shown(owner) else ""


def _can_be_shown(name: str) -> bool:
    return bool(name) and name.isprintable() and len(name) <= _LONGEST_NAME_CHARS


def _cause(error: Exception) -> str:
    """Return the system's words for an error of the network, or the name of its class."""
    number = error.errno if isinstance(error, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else type(error).__name__
