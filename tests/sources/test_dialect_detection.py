"""`dialect: auto` is told by what the server answers."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.sources.dialects import detection
from qreward_plugins.testing import JudgeServer

KEY = "sk-test-0123456789abcdefghij"
SAMPLE = Sample([{"role": "user", "content": "6 * 7?"}], "42", ground_truth="42")


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detection, "_found", {})
    monkeypatch.setattr(detection, "_PAUSE_S", 0.0)


def config(base_url: str, **settings: Any) -> dict[str, Any]:
    source = {"kind": "openai", "base_url": base_url, "model": "judge", "dialect": "auto", "api_key": KEY, **settings}
    return {"sources": {"a": source}, "judges": {"main": {"kind": "llm"}}}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("protocols", "dialect"),
    [
        (["openai", "responses", "anthropic", "gemini"], "openai"),
        (["openai"], "openai"),
        (["responses"], "responses"),
        (["anthropic"], "anthropic"),
        (["gemini"], "gemini"),
    ],
)
async def test_the_server_tells_its_dialect(
    protocols: list[str], dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    with JudgeServer(lambda call: 0.5, protocols=protocols, api_key=KEY) as server, caplog.at_level(logging.INFO):
        async with RewardEngine(config(server.base_url)) as engine:
            assert engine.upstreams["a"].source.dialect.name == dialect  # type: ignore[attr-defined]
            assert isinstance(await engine.score(SAMPLE), Scored)
        asked = server.report().requests
        RewardEngine(config(server.base_url))
        assert server.report().requests == asked
    [said] = [record.getMessage() for record in caplog.records if "dialect" in record.getMessage()]
    assert said.startswith(f"source a: dialect {dialect}, because ")
    assert KEY not in caplog.text


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


def found(base_url: str) -> str:
    engine = RewardEngine(config(base_url))
    return str(engine.upstreams["a"].source.dialect.name)  # type: ignore[attr-defined]


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
    with pytest.raises(ConfigurationError) as caught:
        found(scripted(answers))
    [mistake] = caught.value.mistakes
    assert mistake.path == "sources.a.dialect"
    assert says in mistake.problem
    assert KEY not in str(caught.value)


def test_a_server_that_is_not_there() -> None:
    with JudgeServer(lambda call: 0.5) as server:
        url = server.base_url
    with pytest.raises(ConfigurationError, match=r"no answer \(Connection refused\)"):
        RewardEngine(config(url))


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"proxy": "http://127.0.0.1:9"}, "proxy"),
        ({"proxy": "socks5://127.0.0.1:9"}, "proxy"),
        ({"cert": "client.pem"}, "cert"),
        ({"auth": "signing:make"}, "auth"),
    ],
)
def test_no_server_is_asked_past_the_options_of_the_client(options: dict[str, Any], key: str) -> None:
    with JudgeServer(lambda call: 0.5) as server:
        node = config(server.base_url, client="httpx", httpx=options)
        if key == "auth":
            del node["sources"]["a"]["api_key"]
        with pytest.raises(ConfigurationError, match=rf"auto asks the server without httpx\.{key}"):
            RewardEngine(node)
        assert server.report().requests == 0
