"""The OpenAPI description of the reward server, made from its forms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .forms import Form

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "cause": {
                    "type": ["string", "null"],
                    "description": "infra, verdict or policy",
                },
                "reason": {"type": "string", "description": "one word, for metrics"},
                "detail": {"type": "string", "description": "one sentence, for people"},
            },
        }
    },
}
_ERRORS = {
    "400": "The body is not JSON.",
    "401": "The token is missing or wrong.",
    "403": "The server has no token, and a web page, or a request for another host, asks.",
    "413": "The body is too large.",
    "415": "The server has no token, and the body's type is not application/json.",
    "422": "The body is not in this form, or the judge cannot take the sample (cause policy).",
    "429": "The queue cannot be done in time; see Retry-After.",
    "502": "The judge gave no valid verdict (cause verdict).",
    "503": "The sources do not answer (cause infra), or the server is about to stop.",
    "504": "No reward by the deadline (cause infra).",
}

PROXIED = (
    ("/v1/chat/completions", "Passes on a chat completion of OpenAI's format."),
    ("/v1/responses", "Passes on a response of OpenAI's format."),
    ("/v1/messages", "Passes on a message of Anthropic's format."),
    ("/v1beta/models/{model}:generateContent", "Passes on a request of Gemini's format."),
)
"""Paths of the proxy, each with what it does."""


def describe(forms: Iterable[Form], *, bearer: bool) -> Mapping[str, Any]:
    """Return the description as a JSON value. `bearer`: whether callers need a token."""
    from qreward_plugins import __version__

    paths: dict[str, Any] = {form.path: {"post": _operation(form)} for form in forms}
    for path, summary in PROXIED:
        replies = {"200": {"description": "The reply of a source, as it came."}}
        paths[path] = {"post": {"summary": summary, "responses": replies}}
    for path, summary in (
        ("/v1/models", "The models that clients may ask for."),
        ("/healthz", "200 as long as the process lives."),
        ("/readyz", "200 if some source takes samples, 503 if none does or the server is about to stop."),
        ("/metrics", "Metrics in the text format of Prometheus."),
    ):
        paths[path] = {"get": {"summary": summary, "responses": {"200": {"description": summary}}}}
    description: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "qreward reward server", "version": __version__},
        "paths": paths,
    }
    if bearer:
        description["components"] = {"securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}}
        description["security"] = [{"token": []}]
    return description


def _operation(form: Form) -> dict[str, Any]:
    replies = {"200": {"description": "Every sample has a reward.", "content": _json(form.reply)}}
    if form.path == "/score":
        replies["207"] = {"description": "Some samples have no reward; see their causes.", "content": _json(form.reply)}
    errors = {status: {"description": text, "content": _json(_ERROR)} for status, text in _ERRORS.items()}
    return {
        "summary": form.summary,
        "requestBody": {"required": True, "content": _json(form.request)},
        "responses": {**replies, **errors},
    }


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
