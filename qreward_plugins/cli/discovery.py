"""Asks an endpoint what it serves, for `qreward init`: its models, its dialect, and the limits that it announces.

These requests do not count in the quotas of a source, which does not exist yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import anyio

from ..sources.dialects import DIALECTS
from .detection import Probe, Server, Undetected, ask, lister, open_session

CONNECT_S = 5.0
"""Most seconds to connect."""
LIST_S = 5.0
"""Most seconds for a list of models. Servers have it at hand, so one that takes longer hangs."""
SURVEY_S = 30.0
"""Most seconds to find the dialect of a model: it generates a few tokens for that."""
_MOST_MODELS = 1000
_LONGEST_NAME_CHARS = 200
_COMPATIBLE = "openai"
_LISTING = (_COMPATIBLE, "anthropic", "gemini")
"""The dialects that have a list of models of their own form."""


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
    ("vllm", "sglang", "tei" ...). `answers` is false if there is no HTTP answer. `problem` says why `models` is empty.
    """

    url: str
    models: tuple[str, ...] = ()
    dialect: str = _COMPATIBLE
    server: str = ""
    answers: bool = True
    problem: str = ""


@dataclass(frozen=True)
class Surveyed:
    """The dialect in which a model answers, and the limits in the headers of its answers (`announced_limits`)."""

    dialect: str
    announced: Mapping[str, float] = field(default_factory=dict)


async def discover(url: str, key: str = "") -> Discovered:
    """Ask the endpoint at `url` for its models, with the API key `key` ("" for none). Raises nothing."""
    server = Server((url,), "", key, {}, verify_tls=True, connect_s=CONNECT_S, request_s=LIST_S)
    problems: list[str] = []
    async with open_session(server) as session:
        for candidate in _candidates(url):
            probe = Probe(session, server, candidate)
            for name in _LISTING:
                try:
                    status, body = await probe.send("GET", "/models", DIALECTS[name], tries=1)
                except Undetected as error:
                    problem = str(error)
                    if problem.startswith("no answer"):
                        return Discovered(url, answers=False, problem=problem)
                    problems.append(problem)
                    continue
                found = lister(body) if status == 200 else None
                if found is not None:
                    return Discovered(candidate, _names(body), found.name, _owner(body))
                problems.append(f"{urlsplit(candidate).path}/models answered {status}{_HINTS.get(status, '')}")
                if name == _COMPATIBLE and status == 404 and not key:
                    break
        try:
            status, body = await Probe(session, server, _root(url)).send("GET", "/info", DIALECTS[_COMPATIBLE], tries=1)
        except Undetected:
            status, body = 0, None
        if status == 200 and isinstance(body, dict) and isinstance(body.get("model_id"), str):
            return Discovered(url, (body["model_id"],), server="tei")
    return Discovered(url, problem=", ".join(dict.fromkeys(problems)))


async def survey(url: str, model: str, key: str = "") -> Surveyed | None:
    """Find the dialect of `model` with at most one small request. Returns None if it is not recognized in time."""
    server = Server((url,), model, key, {}, verify_tls=True, connect_s=CONNECT_S)
    with anyio.move_on_after(SURVEY_S), suppress(Undetected):
        found = await ask(server)
        return Surveyed(found.dialect, found.announced)
    return None


def _candidates(url: str) -> list[str]:
    """The URLs whose `/models` is asked for: the given one, and the usual version below a URL without a path."""
    url = url.rstrip("/")
    return [url] if urlsplit(url).path.strip("/") else [f"{url}/v1", url, f"{url}/v1beta"]


def _root(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _names(body: Any) -> tuple[str, ...]:
    """The names in a list of models; names that a terminal cannot show, or that are too long, are left out."""
    entries = body.get("data") or body.get("models") or ()
    found = [
        # Gemini writes models/NAME. Elsewhere this is a part of the name, such as a folder that vLLM serves.
        str(entry.get("id") or str(entry.get("name") or "").removeprefix("models/"))
        for entry in entries[:_MOST_MODELS]
        if isinstance(entry, dict)
    ]
    return tuple(name for name in found if name and name.isprintable() and len(name) <= _LONGEST_NAME_CHARS)


def _owner(body: Any) -> str:
    entries = body.get("data") or ()
    owner = entries[0].get("owned_by") if entries and isinstance(entries[0], dict) else ""
    return owner if isinstance(owner, str) and owner.isprintable() and len(owner) <= _LONGEST_NAME_CHARS else ""
