"""The formats of clients' requests: their paths, where the model is, how errors and lists of models are written; and
the headers with which every caller sets a deadline and a priority.

A request with a path of none of these is refused: files, batches, fine-tuning and stored responses belong to one
provider, and cannot be moved to another one.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import unquote

from ...config.nodes import MOST_PRIORITY, PRIORITIES
from ...errors import InputError

DEADLINE_HEADER = "X-QReward-Deadline-S"
"""Seconds that a request may take, waiting included. Default: `engine.deadline_s`."""
PRIORITY_HEADER = "X-QReward-Priority"
"""Priority of a request: `high`, `normal`, `low`, or a whole number; higher goes first. Default: that of the
configuration for samples, `normal` for calls of clients."""
_WHOLE = re.compile(r"[+-]?[0-9]{1,12}")
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

    def reference(self, body: Mapping[str, Any]) -> str:
        """Return the key of a body that refers to something that one provider keeps, files included; "" if none."""
        return self.state(body) or _kept_by_provider(body)

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


_USERS_OWN = ("metadata", "functionCall", "function_call", "functionResponse", "function_response")
"""Keys whose values have the words of a client or of its tools, where `file_id` is any word."""
_GEMINI_FILE = re.compile(r"/v\d\w*/files/")


def _kept_by_provider(body: Mapping[str, Any]) -> str:
    """Return the first key with the id of an uploaded file, a vector store or a stored item; "" if there is none."""
    waiting: list[Any] = [value for key, value in body.items() if key not in _USERS_OWN]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting.extend(each for each in value if isinstance(each, dict | list))
        elif isinstance(value, dict):
            key = _reference_key(value)
            if key:
                return key
            called = value.get("type") in {"tool_use", "server_tool_use", "mcp_tool_use"}
            waiting.extend(
                each
                for key, each in value.items()
                if isinstance(each, dict | list) and key not in _USERS_OWN and not (called and key == "input")
            )
    return ""


def _reference_key(value: Mapping[str, Any]) -> str:
    if value.get("type") == "item_reference":
        return "item_reference"
    if isinstance(value.get("file_id"), str):
        return "file_id"
    for key in ("file_ids", "vector_store_ids"):
        ids = value.get(key)
        if isinstance(ids, list) and ids and all(isinstance(each, str) for each in ids):
            return key
    for key in ("fileUri", "file_uri"):
        uri = value.get(key)
        if isinstance(uri, str) and _GEMINI_FILE.search(uri):
            return key
    return ""


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
    """Return the format in which a client reads errors and lists, by its path and its headers."""
    found = format_of(path)
    if found is not None:
        return found
    names = {name.lower() for name in headers}
    if "anthropic-version" in names:
        return MESSAGES
    return GEMINI if "x-goog-api-key" in names or "x-goog-api-client" in names else CHAT


def model_list(form: Format, models: Sequence[str]) -> dict[str, Any]:
    """Return the list of models in the form of a client."""
    if form is GEMINI:
        return {"models": [model_entry(form, model) for model in models]}
    entries = [model_entry(form, model) for model in models]
    if form is MESSAGES:
        ends = {"first_id": models[0] if models else None, "last_id": models[-1] if models else None}
        return {"data": entries, "has_more": False, **ends}
    return {"object": "list", "data": entries}


def model_entry(form: Format, model: str) -> dict[str, Any]:
    """Return what a list of models says of one, in the form of a client."""
    if form is GEMINI:
        methods = ["generateContent", "streamGenerateContent"]
        return {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}
    if form is MESSAGES:
        return {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
    return {"id": model, "object": "model", "created": 0, "owned_by": "qreward"}


def read_terms(headers: Mapping[str, str]) -> tuple[float | None, int | None]:
    """Return the deadline in seconds and the priority; None for a header that is not there. Names of `headers` are in
    any case. Raises `InputError`.
    """
    values = {name.lower(): value for name, value in headers.items()}
    deadline, priority = values.get(DEADLINE_HEADER.lower()), values.get(PRIORITY_HEADER.lower())
    return (
        None if deadline is None else _seconds(deadline),
        None if priority is None else read_priority(priority.strip().lower(), PRIORITY_HEADER),
    )


def read_priority(value: Any, what: str) -> int:
    """Return a priority: a name, a whole number, or its text. Raises `InputError`."""
    if isinstance(value, str):
        value = PRIORITIES.get(value) if value in PRIORITIES else int(value) if _WHOLE.fullmatch(value) else None
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MOST_PRIORITY:
        raise InputError(f"{what} must be a whole number, or high, normal or low")
    return value


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise InputError(f"{DEADLINE_HEADER} must be a number of seconds above 0")
    return seconds
