"""`qreward init` tells the dialect of a server by what it answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from qreward_plugins.cli import detection
from qreward_plugins.testing import JudgeServer

KEY = "sk-test-0123456789abcdefghij"


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_PAUSE_S", 0.0)


def found(base_url: str) -> str:
    server = detection.Server((base_url,), "judge", KEY, {}, verify_tls=True, connect_s=5.0)
    return asyncio.run(detection.ask(server)).dialect


def test_the_server_tells_its_dialect() -> None:
    dialects = ["openai", "responses", "anthropic", "gemini"]
    for protocols in (dialects, *([dialect] for dialect in dialects)):
        with JudgeServer(lambda call: 0.5, protocols=protocols, api_key=KEY) as server:
            assert found(server.base_url) == protocols[0]


class Scripted(BaseHTTPRequestHandler):
    """Answers by `answers`: (method, path) to (status, body); everything else is a 404."""

    answers: dict[tuple[str, str], tuple[int, Any]]

    def _answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, body = self.answers.get((self.command, self.path), (404, {"detail": "Not Found"}))
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = _answer

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[Any]:
    servers: list[ThreadingHTTPServer] = []

    def make(answers: dict[tuple[str, str], tuple[int, Any]]) -> str:
        handler = type("Handler", (Scripted,), {"answers": answers})
        server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}/v1"

    yield make
    for server in servers:
        server.shutdown()
        server.server_close()


LIST = {"object": "list", "data": [{"id": "judge", "object": "model"}]}
UNSUPPORTED = {"error": {"code": "unsupported_parameter", "message": "Use max_completion_tokens."}}


@pytest.mark.parametrize(
    ("answers", "dialect"),
    [
        (
            {("GET", "/v1/models"): (200, LIST), ("POST", "/v1/chat/completions"): (400, UNSUPPORTED)},
            "openai_reasoning",
        ),
        ({("POST", "/v1/chat/completions"): (200, {}), ("GET", "/v1/models"): (200, LIST)}, "openai"),
        ({("GET", "/v1/models"): (200, LIST), ("POST", "/v1/responses"): (422, {"detail": []})}, "responses"),
        ({("POST", "/v1/messages"): (400, {"type": "error", "error": {}})}, "anthropic"),
        ({("POST", "/v1/models/judge:generateContent"): (400, {"error": {"code": 400}})}, "gemini"),
    ],
)
def test_a_server_without_a_list_is_told_by_its_paths(answers: Any, dialect: str, scripted: Any) -> None:
    assert found(scripted(answers)) == dialect


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({}, "/messages answered 404"),
        ({("GET", "/v1/models"): (200, LIST), ("POST", "/v1/chat/completions"): (401, {})}, "the key was refused"),
        ({("GET", "/v1/models"): (503, {})}, "/models answered 503"),
        (
            {
                ("GET", "/v1/models"): (200, LIST),
                ("POST", "/v1/chat/completions"): (404, {"error": {"code": "model_not_found"}}),
            },
            "unknown path or model",
        ),
    ],
)
def test_one_error_if_it_cannot_be_told(answers: Any, says: str, scripted: Any) -> None:
    with pytest.raises(detection.Undetected) as caught:
        found(scripted(answers))
    assert says in str(caught.value)
    assert KEY not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    with JudgeServer(lambda call: 0.5) as server:
        url = server.base_url
    with pytest.raises(detection.Undetected, match=r"no answer \(Connection refused\)"):
        found(url)
