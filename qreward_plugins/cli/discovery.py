"""Asks an endpoint for its models and its dialect, for `qreward init`.

The list of models at `/models` differs between OpenAI-compatible servers, Anthropic and Gemini, and so tells the
dialect.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from ..sources.dialects import DIALECTS
from ..sources.http import proxy_for
from ..sources.replies import json_of

CONNECT_S = 5.0
"""Most seconds to connect."""
LIST_S = 5.0
"""Most seconds for a list of models. Servers have it at hand, so one that takes longer hangs."""
_MOST_BYTES = 4_194_304
_LONGEST_NAME_CHARS = 200
_COMPATIBLE = "openai"
_LISTING = (_COMPATIBLE, "anthropic", "gemini")
"""The dialects that have a list of models of their own form."""


@dataclass(frozen=True)
class Discovered:
    """What an endpoint serves.

    `url` is the URL for the configuration: `/v1` is added if only there is a list of models. `models` are the names in
    that list. `dialect` is the one in whose form the list is. `answers` is false if there is no HTTP answer. `problem`
    says why `models` is empty.
    """

    url: str
    models: tuple[str, ...] = ()
    dialect: str = _COMPATIBLE
    answers: bool = True
    problem: str = ""


async def discover(url: str, key: str = "") -> Discovered:
    """Ask the endpoint at `url` for its models, with the API key `key` ("" for none). Raises nothing."""
    problems: list[str] = []
    try:
        for candidate in _candidates(url):
            for name in _LISTING:
                status, body = await _get(URL(f"{candidate}/models"), name, key)
                dialect = _lister(body) if status == 200 else None
                if dialect is not None:
                    return Discovered(candidate, _names(body), dialect)
                problems.append(f"{urlsplit(candidate).path}/models answered {status}")
                if status == 404 and not key:
                    break
    except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        return Discovered(url, answers=False, problem=f"no answer: {why}")
    return Discovered(url, problem=", ".join(dict.fromkeys(problems)))


async def _get(url: URL, dialect: str, key: str) -> tuple[int, Any]:
    """Return the status and the JSON of the answer."""
    carrier, before = DIALECTS[dialect].key_header
    headers = {**DIALECTS[dialect].headers, **({carrier: f"{before}{key}"} if key else {})}
    timeout = aiohttp.ClientTimeout(total=LIST_S, connect=CONNECT_S)
    async with (
        aiohttp.ClientSession(cookie_jar=aiohttp.DummyCookieJar(), timeout=timeout, trust_env=False) as session,
        session.get(url, headers=headers, proxy=proxy_for(url), allow_redirects=False) as reply,
    ):
        text = b""
        while len(text) < _MOST_BYTES and (more := await reply.content.read(_MOST_BYTES - len(text))):
            text += more
        return reply.status, json_of(text)


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
    found = (
        # Gemini writes models/NAME. Elsewhere this is a part of the name, such as a folder that vLLM serves.
        str(entry.get("id") or str(entry.get("name") or "").removeprefix("models/"))
        for entry in entries
        if isinstance(entry, dict)
    )
    return tuple(name for name in found if name and name.isprintable() and len(name) <= _LONGEST_NAME_CHARS)
