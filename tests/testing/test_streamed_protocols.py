"""What the judge server streams, as the official packages read it."""

from __future__ import annotations

import json
from typing import Any
from urllib.request import Request, urlopen

import pytest
from pydantic import TypeAdapter

from qreward_plugins.testing import JudgeServer

TEXT = json.dumps({"rationale": "fine " * 20, "score": 5})
ASKED = [{"role": "user", "content": "Judge this."}]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai": ("/v1/chat/completions", {"messages": ASKED, "stream": True}),
    "responses": ("/v1/responses", {"input": ASKED, "stream": True}),
    "anthropic": ("/v1/messages", {"messages": ASKED, "stream": True, "max_tokens": 500}),
    "gemini": ("/v1beta/models/judge:streamGenerateContent?alt=sse", {"contents": [{"parts": [{"text": "Judge."}]}]}),
}


def events_of(server: JudgeServer, protocol: str) -> list[dict[str, Any]]:
    path, body = PATHS[protocol]
    root = server.base_url.removesuffix("/v1")
    body = body if protocol == "gemini" else {"model": "judge", **body}
    headers = {"Content-Type": "application/json", "anthropic-version": "2023-06-01"}
    with urlopen(Request(f"{root}{path}", json.dumps(body).encode(), headers), timeout=10) as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        lines = reply.read().decode().splitlines()
    found = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith("data: {"):
            found.append(json.loads(line.removeprefix("data: ")))
            if before.startswith("event: "):
                assert before == f"event: {found[-1]['type']}"
    return found


def kind_of_event(protocol: str) -> Any:
    if protocol == "openai":
        from openai.types.chat import ChatCompletionChunk

        return ChatCompletionChunk
    if protocol == "responses":
        from openai.types.responses import ResponseStreamEvent

        return ResponseStreamEvent
    if protocol == "anthropic":
        from anthropic.types import RawMessageStreamEvent

        return RawMessageStreamEvent
    return pytest.importorskip("google.genai.types").GenerateContentResponse


@pytest.mark.parametrize("protocol", PATHS)
def test_every_event_is_one_of_the_official_package(protocol: str) -> None:
    adapter = TypeAdapter(kind_of_event(protocol))
    with JudgeServer(lambda call: TEXT) as server:
        events = events_of(server, protocol)
    assert len(events) > 20
    for event in events:
        if event.get("type") != "ping":
            adapter.validate_python(event)


def said_by_package(protocol: str, root: str) -> tuple[str, Any]:
    """Stream with the official client; return the text that it assembles, and the completion tokens."""
    if protocol == "openai":
        from openai import OpenAI

        with (
            OpenAI(base_url=f"{root}/v1", api_key="x") as client,
            client.chat.completions.stream(model="judge", messages=ASKED) as stream,  # type: ignore[arg-type]
        ):
            completion = stream.get_final_completion()
            return completion.choices[0].message.content or "", None
    if protocol == "responses":
        from openai import OpenAI

        with (
            OpenAI(base_url=f"{root}/v1", api_key="x") as client,
            client.responses.stream(model="judge", input="Judge this.") as stream,
        ):
            response = stream.get_final_response()
            return response.output_text, response.usage.output_tokens
    if protocol == "anthropic":
        from anthropic import Anthropic

        with (
            Anthropic(base_url=root, api_key="x") as client,
            client.messages.stream(model="judge", messages=ASKED, max_tokens=500) as stream,  # type: ignore[arg-type]
        ):
            message = stream.get_final_message()
            return "".join(block.text for block in message.content), message.usage.output_tokens  # type: ignore[union-attr]
    genai = pytest.importorskip("google.genai")
    with genai.Client(api_key="x", http_options={"base_url": root}) as client:
        chunks = list(client.models.generate_content_stream(model="judge", contents="Judge this."))
        return "".join(chunk.text or "" for chunk in chunks), chunks[-1].usage_metadata.candidates_token_count


@pytest.mark.parametrize("protocol", PATHS)
def test_the_official_client_reads_the_stream(protocol: str) -> None:
    with JudgeServer(lambda call: TEXT) as server:
        text, tokens = said_by_package(protocol, server.base_url.removesuffix("/v1"))
        assert text == TEXT
        assert tokens in (None, server.report().completion_tokens)
