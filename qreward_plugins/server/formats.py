"""The formats of clients' requests: their paths, where the model is, and how errors are written.

A request with a path of none of these is refused: files, batches, fine-tuning and stored responses belong to one
provider, and cannot be moved to another one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from ..errors import InputError

_GENERATE = re.compile(r".*/models/(?P<model>[^:]+):(?P<verb>generateContent|streamGenerateContent)")
_ACTING_TOOL = re.compile("mcp|code|shell|computer")
"""What is in the type of a tool that the provider runs itself and that may change something."""


@dataclass(frozen=True)
class Format:
    """One format. `path` is how its paths end. `dialects` are the dialects of the sources that read it. `kept`: keys of
    a body that goes on with something that one provider keeps. `refused`: keys that cannot be sent on, and why.
    """

    path: str
    dialects: tuple[str, ...]
    kept: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        """Return the body of an error, as the clients of OpenAI and Anthropic read it. `cause` is infra, verdict or
        policy; `reason` is one word for metrics.
        """
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        error = {"message": message, "type": kind, "param": None, "code": reason, "cause": cause, "reason": reason}
        return {"type": "error", "error": error, "request_id": None}

    def model_of(self, path: str, body: Mapping[str, Any]) -> str:
        """Return the model that a request asks for. Raises `InputError` if it names none."""
        model = body.get("model")
        if not isinstance(model, str) or not model:
            raise InputError("the body needs the name of a `model`")
        return model

    def streams(self, path: str, body: Mapping[str, Any]) -> bool:
        """Whether a request asks for a stream."""
        return body.get("stream") is True

    def changes_something(self, body: Mapping[str, Any]) -> bool:
        """Whether sending a request twice may change something twice: it is stored, or its tools act."""
        tools = body.get("tools")
        acting = any(
            isinstance(tool, Mapping) and _ACTING_TOOL.search(str(tool.get("type")))
            for tool in (tools if isinstance(tools, list) else ())
        )
        return acting or body.get("store") is True or bool(body.get("mcp_servers")) or self.state(body) != ""

    def state(self, body: Mapping[str, Any]) -> str:
        """Return the key of a body that goes on with something that one provider keeps; "" if there is none."""
        return next((key for key in self.kept if body.get(key)), "")

    def refusal(self, body: Mapping[str, Any], *, alone: bool) -> str:
        """Return why a request cannot be sent on; "" if it can. `alone`: its model has one source with one key."""
        for key, why in self.refused.items():
            if body.get(key):
                return why
        # Some servers take 1 or "true" for true. Their stream would then look like a reply that cannot be read.
        if body.get("stream") is not None and not isinstance(body["stream"], bool):
            return "`stream` must be true or false"
        state = self.state(body)
        if alone or not state:
            return ""
        return (
            f"{state!r} refers to what one account keeps, and this model has several sources or keys; name a model "
            "that has one source with one key"
        )


class GeminiFormat(Format):
    """Gemini's generateContent, which has the model in its path, and errors of its own."""

    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        details = [
            {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "metadata": {"cause": cause}}
        ]
        known = _GOOGLE_STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": status, "message": message, "status": known, "details": details}}

    def model_of(self, path: str, body: Mapping[str, Any]) -> str:
        found = _GENERATE.fullmatch(path)
        return "" if found is None else unquote(found["model"])

    def streams(self, path: str, body: Mapping[str, Any]) -> bool:
        return path.endswith(":streamGenerateContent")


_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_IN_BACKGROUND = "a response in the background cannot be fetched through here"

CHAT = Format("/chat/completions", ("openai", "openai_reasoning"))
RESPONSES = Format(
    "/responses", ("responses",), ("previous_response_id", "conversation"), {"background": _IN_BACKGROUND}
)
EMBEDDINGS = Format("/embeddings", ("embeddings",), refused={"stream": "embeddings are no stream; leave out `stream`"})
MESSAGES = Format("/messages", ("anthropic",), ("container",))
GEMINI = GeminiFormat("/models/MODEL:generateContent", ("gemini",), ("cachedContent",))
FORMATS: tuple[Format, ...] = (CHAT, RESPONSES, EMBEDDINGS, MESSAGES, GEMINI)


def format_of(path: str) -> Format | None:
    """Return the format of the requests at a path; None if it is none of them."""
    if _GENERATE.fullmatch(path):
        return GEMINI
    return next((each for each in FORMATS if path.endswith(each.path)), None)


def client_format(path: str, headers: Mapping[str, str]) -> Format:
    """Return the format in which a client reads errors, by its path and its headers."""
    found = format_of(path)
    if found is not None:
        return found
    names = {name.lower() for name in headers}
    if "anthropic-version" in names:
        return MESSAGES
    return GEMINI if "x-goog-api-key" in names or "x-goog-api-client" in names else CHAT
