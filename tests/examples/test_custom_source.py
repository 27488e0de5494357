"""`examples/custom_source`: a kind of source of another package, and a server that speaks its protocol."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from qreward_plugins import ConfigurationError, RewardEngine, Sample, Scored, load_config
from qreward_plugins.config import registry
from qreward_plugins.errors import InvalidReply, SourceUnusable, Throttled, TransientError
from qreward_plugins.sources import Request, open_source
from qreward_plugins.testing import JudgeCall

KEY = "sk-messages-0123456789"


class Server:
    """Answers with the verdict that a judge asks for, after the replies that it is told to give first."""

    def __init__(self, *first):
        self.first = list(first)
        self.bodies = []
        self.headers = []
        self.times = []
        self.in_flight = self.most_in_flight = 0

    async def answer(self, request):
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            self.headers.append(request.headers)
            self.bodies.append(await request.json())
            self.times.append(asyncio.get_running_loop().time())
            if self.first:
                status, body, headers = self.first.pop(0)
                return web.json_response(body, status=status, headers=headers)
            call = JudgeCall("m", self.bodies[-1]["messages"])
            await asyncio.sleep(0)
            verdict = {"id": call.nonce, "rationale": "fine", "score": 10 if "right" in call.blocks["response"] else 0}
            return web.json_response(said(json.dumps(verdict)))
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def url(self):
        app = web.Application()
        app.router.add_post("/v1/messages", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


def said(text, **fields):
    return {
        "model": "judge-1",
        "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": text}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 50, "output_tokens": 7},
        **fields,
    }


def problem(kind):
    return {"type": "error", "error": {"type": kind, "message": "as it is"}}


def tree(url="http://judge", **node):
    source = {"kind": "messages", "url": url, "model": "judge-1", "api_key": KEY, **node}
    return {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}, "engine": {"seed": 1}}


def sample(response):
    return Sample([{"role": "user", "content": "What is right?"}], response)


def test_it_is_registered_with_its_package():
    (found,) = registry.sources.registrations("messages")
    assert (found.package, found.version) == ("qreward-messages", "0.1.0")


def test_rollouts_are_scored_within_its_limits():
    server = Server()

    async def score():
        async with server.url() as url, RewardEngine(tree(url, limits={"concurrency": 3})) as engine:
            return await engine.score_all([sample(text) for text in ("right", "wrong") * 8])

    outcomes = asyncio.run(score())
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [1.0, 0.0] * 8
    assert server.most_in_flight <= 3
    assert len(server.bodies) == 16
    assert server.headers[0]["x-api-key"] == KEY
    assert server.headers[0]["anthropic-version"] == "2023-06-01"
    assert {message["role"] for message in server.bodies[0]["messages"]} == {"user"}
    assert server.bodies[0]["system"]
    assert isinstance(outcomes[0], Scored)
    assert (outcomes[0].verdict.model, outcomes[0].verdict.usage.completion_tokens) == ("judge-1", 7)


@pytest.mark.parametrize(
    ("status", "body", "headers", "error"),
    [
        (529, problem("overloaded_error"), {}, Throttled),
        (429, problem("rate_limit_error"), {"Retry-After": "7"}, Throttled),
        (401, problem("authentication_error"), {}, SourceUnusable),
        (500, problem("api_error"), {}, TransientError),
        (200, {"type": "message"}, {}, TransientError),
        (200, said("", stop_reason="refusal"), {}, InvalidReply),
    ],
)
def test_every_failure_has_its_class(status, body, headers, error):
    async def ask():
        async with Server((status, body, headers)).url() as url:
            source = open_source("judge", load_config(tree(url)).sources["judge"])
            try:
                messages = ({"role": "user", "content": "?"},)
                await source.send(Request(sample("x"), messages=messages), on_sent=lambda: None)
            finally:
                await source.aclose()

    with pytest.raises(error) as caught:
        asyncio.run(ask())
    assert type(caught.value) is error
    assert KEY not in str(caught.value)
    if headers:
        assert caught.value.retry_after_s == 7.0


def test_mistakes_are_found_when_the_configuration_is_read():
    with pytest.raises(ConfigurationError) as caught:
        load_config(tree(modle="x", thinking_tokens=10, url="judge.example"))
    assert {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught.value.mistakes} == {
        "sources.judge.url": "a URL must start with http:// or https:// and have a host.",
        "sources.judge.modle": "unknown key. Did you mean `model`?",
        "sources.judge.thinking_tokens": "must be 1024 or more, not 10.",
    }
