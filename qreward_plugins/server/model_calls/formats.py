"""The formats of clients' requests: their paths, where the model is, and how errors are written.

A request with a path of none of these is refused: files, batches, fine-tuning and stored responses belong to one
provider, and cannot be moved to another one.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar
from urllib.parse import unquote

from ...errors import InputError

_GENERATE = re.compile(r".*/models/(?P<model>[^:]+):(?P<verb>generateContent|streamGenerateContent)")
_ACTING_TOOL = re.compile("mcp|code|shell|computer")
"""What is in the type of a tool that the provider runs itself and that may change something."""


class Format(ABC):
    """One format. `dialects` are the dialects of the sources that read it."""

    dialects: ClassVar[tuple[str, ...]]
    path: ClassVar[str]
    """How its paths end, for messages."""

    @abstractmethod
    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        """Return the body of an error. `cause` is infra, verdict or policy; `reason` is one word for metrics."""

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
        return ""

    def refusal(self, body: Mapping[str, Any]) -> str:
        """Return why a request cannot be sent on; "" if it can."""
        # Some servers take 1 or "true" for true. Their stream would then look like a reply that cannot be read.
        stream = body.get("stream")
        return "" if stream is None or isinstance(stream, bool) else "`stream` must be true or false"


class OpenAIFormat(Format):
    """OpenAI's chat completions."""

    dialects: ClassVar[tuple[str, ...]] = ("openai", "openai_reasoning")
    path = "/chat/completions"

    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        kind = _OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": reason, "cause": cause}}


class ResponsesFormat(OpenAIFormat):
    """OpenAI's responses."""

    dialects: ClassVar[tuple[str, ...]] = ("responses",)
    path = "/responses"

    def state(self, body: Mapping[str, Any]) -> str:
        return next((key for key in ("previous_response_id", "conversation") if body.get(key)), "")

    def refusal(self, body: Mapping[str, Any]) -> str:
        if body.get("background"):
            return "a response in the background cannot be fetched through here"
        return super().refusal(body)


class EmbeddingsFormat(OpenAIFormat):
    """OpenAI's embeddings."""

    dialects: ClassVar[tuple[str, ...]] = ("embeddings",)
    path = "/embeddings"

    def refusal(self, body: Mapping[str, Any]) -> str:
        return "embeddings are no stream; leave out `stream`" if body.get("stream") else super().refusal(body)


class MessagesFormat(Format):
    """Anthropic's messages."""

    dialects: ClassVar[tuple[str, ...]] = ("anthropic",)
    path = "/messages"

    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
        return {
            "type": "error",
            "error": {"type": kind, "message": message, "cause": cause, "reason": reason},
            "request_id": None,
        }

    def state(self, body: Mapping[str, Any]) -> str:
        return "container" if body.get("container") else ""


class GeminiFormat(Format):
    """Gemini's generateContent."""

    dialects: ClassVar[tuple[str, ...]] = ("gemini",)
    path = "/models/MODEL:generateContent"

    def model_of(self, path: str, body: Mapping[str, Any]) -> str:
        found = _GENERATE.fullmatch(path)
        return "" if found is None else unquote(found["model"])

    def streams(self, path: str, body: Mapping[str, Any]) -> bool:
        return path.endswith(":streamGenerateContent")

    def error(self, status: int, message: str, cause: str, reason: str) -> dict[str, Any]:
        details = [
            {"@type": "type.googleapis.com/google.rpc.ErrorInfo", "reason": reason, "metadata": {"cause": cause}}
        ]
        known = _GOOGLE_STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
        return {"error": {"code": status, "message": message, "status": known, "details": details}}

    def state(self, body: Mapping[str, Any]) -> str:
        return "cachedContent" if body.get("cachedContent") else ""


_OPENAI_TYPES = {401: "authentication_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}
_GOOGLE_STATUSES = {
    401: "UNAUTHENTICATED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}

CHAT = OpenAIFormat()
MESSAGES = MessagesFormat()
GEMINI = GeminiFormat()
FORMATS: tuple[Format, ...] = (CHAT, ResponsesFormat(), EmbeddingsFormat(), MESSAGES, GEMINI)


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
