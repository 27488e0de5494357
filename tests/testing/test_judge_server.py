"""The judge server over the wire: what it answers, refuses, counts and limits, as a judge, as a service that scores
samples, and as the servers of reward models, whose forms `sources/test_reward_models.py` and `sources/test_faults.py`
read.
"""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import pytest

from qreward_plugins import Scored
from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.testing import (
    Faults,
    JudgeCall,
    JudgeServer,
    JudgeServerError,
    ScoreCall,
    ServerLimits,
    count_tokens,
    overlap_score,
)

from ..kit import each_of, make_samples, wired
from .conftest import NONCE, Client, judge_prompt, read_all

SAID = "scored by the judge server"


def adds_up(report: Any) -> bool:
    ended = report.answered + report.violations_total + report.refused + report.abandoned + report.scorer_errors_total
    return report.in_flight == 0 and report.requests == ended + sum(report.faults.values())


def test_the_scorer_sees_the_call() -> None:
    calls: list[JudgeCall] = []

    def score(call: JudgeCall) -> float:
        calls.append(call)
        return 1.0

    parts = [{"type": "text", "text": judge_prompt("four", "4")}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    said = (("user", "Hi"), ("user", parts), ("assistant", "?"))
    turns = [{"role": role, "content": content} for role, content in said]
    body = json.dumps({"model": "judge", "messages": turns, "temperature": 0.0, "seed": 7}).encode()
    with JudgeServer(score, models=("small", "judge")) as server:
        Client(server).send(body)
        Client(server).chat("just judge")
    call, bare = calls
    assert (call.model, call.nonce, call.blocks) == ("judge", NONCE, {"response": "four", "reference": "4"})
    assert (call.parameters, call.messages) == ({"temperature": 0.0, "seed": 7}, turns)
    assert (bare.nonce, dict(bare.blocks), bare.score_range, bare.criteria) == (None, {}, (0.0, 1.0), ())


async def async_score(call: JudgeCall) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"score": 3, "style": "good"}


def test_the_scorer_sees_the_sample_in_the_blocks_of_a_judge() -> None:
    calls: list[Any] = []
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    with JudgeServer(lambda call: calls.append(call) or 1.0, models=("rm", "judge")) as server:
        client = Client(server)
        client.score("42", "6 * 7?", label="42", task="math")
        client.score("42", turns, label={"answer": 42})
        client.score("42", [])
    one, two, three = calls
    assert (one.prompt, one.response, one.label, one.parameters) == ("6 * 7?", "42", "42", {"task": "math"})
    assert one.blocks == {"question": "6 * 7?", "response": "42", "reference": "42"}
    assert (one.model, one.nonce, one.score_range, one.max_tokens) == ("rm", None, (0.0, 1.0), None)
    assert two.messages == turns
    assert (two.label, two.blocks["question"], two.blocks["reference"]) == ({"answer": 42}, "6 * 7?", '{"answer": 42}')
    assert (three.prompt, dict(three.blocks)) == ("", {"question": "", "response": "42"})


@each_of(
    ("score", "chat", "scored"),
    [
        (async_score, '{"id": "0123456789ab", "score": 3, "style": "good"}', '{"score": 3, "style": "good"}'),
        (lambda call: "as it is", "as it is", "as it is"),
        (lambda call: 1, f'{{"id": "0123456789ab", "score": 1, "rationale": "{SAID}"}}', "1"),
        (lambda call: math.nan, f'{{"id": "0123456789ab", "score": NaN, "rationale": "{SAID}"}}', "NaN"),
    ],
)
def test_what_scorers_may_return(score: Any, chat: str, scored: str) -> None:
    with JudgeServer(score) as server:
        assert Client(server).chat().content == chat
        reply = Client(server).score()
    assert (reply.status, reply.body.decode()) == (200, scored)
    assert reply.headers["content-type"].startswith("application/json")


def test_a_number_stands_for_every_component_that_is_asked_for_and_a_mapping_for_itself() -> None:
    number = {"type": "number", "minimum": -10, "maximum": 10}
    components = {"type": "object", "properties": {"style": number, "proof": number}}
    schema = {"type": "object", "properties": {"score": number, "components": components}}
    form = {"type": "json_schema", "json_schema": {"schema": schema}}
    with JudgeServer(lambda call: call.score_range[1]) as server:
        verdict = Client(server).chat("no fence", response_format=form).verdict
    assert verdict == {"score": 10.0, "rationale": SAID, "components": {"style": 10.0, "proof": 10.0}}
    with JudgeServer(lambda call: {"components": {"style": 2}}) as server:
        assert Client(server).chat("no fence", response_format=form).verdict == {"components": {"style": 2}}


def test_the_built_in_scorer_scores_an_answer_to_the_question_higher_than_nonsense() -> None:
    for pair in PAIRS:
        template = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}<|im_end|>"
        texts = (template.format(pair.question, text) for text in (pair.good, pair.bad))
        good, bad = (overlap_score(ScoreCall("rm", [], {}, text)) for text in texts)
        assert good > bad


@each_of(
    ("score", "said"),
    [
        (lambda call: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda call: {"score": object()}, "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_a_failing_scorer_is_a_500_and_in_the_report(score: Any, said: str) -> None:
    with JudgeServer(score) as server:
        replies = [Client(server).chat() for _ in range(22)]
        report = server.report()
    assert (replies[0].status, replies[0].json["error"]["type"]) == (500, "server_error")
    assert said.split(":")[0] not in replies[0].raw.decode(), "the client is told nothing about it"
    assert report.scorer_errors[0].startswith(said)
    assert (len(report.scorer_errors), report.scorer_errors_total, report.statuses) == (20, 22, {500: 22})
    assert adds_up(report)


CHAT = "/v1/chat/completions"


@each_of(
    ("path", "body", "status", "said"),
    [
        (CHAT, b"{", 400, "not valid JSON"),
        (CHAT, b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}', 404, "does not exist"),
        (CHAT, b'{"model": "judge", "messages": []}', 400, "messages"),
        (CHAT, b'{"model": "judge", "messages": [{"role": "user"}], "n": 2}', 400, "one choice"),
        (CHAT, b'{"model": "judge", "messages": [{"role": "user"}], "max_tokens": 0}', 400, "max_tokens"),
        ("/score", b"{", 400, "not valid JSON"),
        ("/score", b'{"response": 4}', 400, "response"),
        ("/score", b'{"model": "judge", "queries": ["a", "b"], "documents": ["a", "b", "c"]}', 400, "same length"),
        ("/classify", b'{"model": "judge", "input": ["a", ""]}', 400, "cannot be empty"),
        ("/classify", b'{"model": "nobody", "input": ["a"]}', 404, "does not exist"),
        ("/predict", b'{"inputs": ["a", "b"]}', 422, "inputs"),
        ("/v1/messages", b'{"model": "judge", "max_tokens": 9, "messages": [{"role": "user"}]}', 400, "another form"),
        ("/v1/messages", b'{"model": "nobody", "max_tokens": 9, "messages": []}', 404, "does not exist"),
        ("/v1beta/models/nobody:generateContent", b'{"contents": []}', 404, "does not exist"),
    ],
)
def test_bad_requests_are_refused_as_a_whole(path: str, body: bytes, status: int, said: str) -> None:
    with JudgeServer() as server:
        reply = Client(server).send(body, path=path)
        report = server.report()
    assert reply.status == status
    assert said in reply.json["error"]["message"]
    assert (report.refused, report.statuses) == (1, {status: 1})
    assert adds_up(report)


def test_other_addresses() -> None:
    with JudgeServer(models=("a", "b")) as server:
        client = Client(server)
        assert client.send(b"", method="GET", path="/health").json == {"status": "ok"}
        models = client.send(b"", method="GET", path="/v1/models").json
        assert [model["id"] for model in models["data"]] == ["a", "b"]
        assert client.send(b"", method="GET", path="/v1/chat/completions").status == 405
        assert client.send(b"{}", path="/v1/completions").status == 404
        assert server.report().requests == 0


def test_the_key_is_asked_for_and_shown_nowhere() -> None:
    key = "sk-very-secret"
    with JudgeServer(lambda call: 0.5, api_key=key) as server:
        client, right = Client(server), {"Authorization": f"Bearer {key}"}
        assert client.chat().status == 401
        for wrong in ("Bearer sk-very-secre", key, "Bearer \xfc"):
            reply = client.send(headers={"Authorization": wrong})
            assert (reply.status, reply.json["error"]["code"]) == (401, "invalid_api_key")
            assert key.encode() not in reply.raw
        assert client.send(b"", method="GET", path="/v1/models").status == 401
        assert client.send(headers=right).status == 200
        assert client.send(b"", method="GET", path="/v1/models", headers=right).status == 200
        assert client.send(b"", method="GET", path="/health").status == 200
        report = server.report()
        assert key not in repr(server) + repr(report)
    assert (report.requests, report.refused, report.answered) == (5, 4, 1)


@each_of(
    ("settings", "problem"),
    [
        ({"requests_per_minute": 0}, "requests_per_minute"),
        ({"kind": "leaky"}, "kind"),
        ({"requests_per_minute": 30, "window_s": 1.0}, "make the window longer"),
    ],
)
def test_limits_that_cannot_be_enforced_are_refused(settings: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ServerLimits(**settings)


def test_request_window_admits_exactly_the_limit() -> None:
    with JudgeServer(lambda call: 0.5, limits=ServerLimits(requests_per_minute=5)) as server:
        replies = [Client(server).chat() for _ in range(8)]
        report = server.report()
    assert [reply.status for reply in replies] == [200] * 5 + [429] * 3
    assert [int(reply.headers["x-ratelimit-remaining-requests"]) for reply in replies] == [4, 3, 2, 1, 0, 0, 0, 0]
    assert {reply.headers["x-ratelimit-limit-requests"] for reply in replies} == {"5"}
    throttled = replies[-1]
    assert 1 <= int(throttled.headers["retry-after"]) <= 60
    assert throttled.json["error"]["code"] == "rate_limit_exceeded"
    assert (report.violations_total, report.throttled, report.violations_by_kind) == (3, 3, {"requests": 3})
    assert report.max_requests_in_window == 8
    violation = report.violations[0]
    assert (violation.kind, violation.over) == ("requests", 1)
    assert 0 < (violation.early_s or 0) <= 60
    assert adds_up(report)


def test_token_window_counts_prompts_at_arrival_and_completions_with_the_answer() -> None:
    answer = "x" * 40  # 10 tokens
    prompt_tokens = count_tokens("You are a judge." + judge_prompt())
    left = prompt_tokens + 9
    # What is over the token limit uses up no request.
    limits = ServerLimits(tokens_per_minute=3 * (prompt_tokens + 10) + left, requests_per_minute=5)
    with JudgeServer(lambda call: answer, limits=limits) as server:
        replies = [Client(server).chat() for _ in range(4)]
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        assert replies[2].headers["x-ratelimit-remaining-tokens"] == str(left)
        assert replies[3].headers["x-ratelimit-remaining-tokens"] == str(left), "what is rejected does not count"
        assert Client(server).chat(max_tokens=9).status == 200, "one token less fits exactly"
        assert [Client(server).chat().status for _ in range(2)] == [429, 429]
        report = server.report()
    over = [("tokens", 1), ("tokens", prompt_tokens), ("tokens", prompt_tokens)]
    assert [(each.kind, each.over) for each in report.violations] == over
    assert (report.prompt_tokens, report.completion_tokens) == (4 * prompt_tokens, 39)
    assert adds_up(report)


def test_concurrency_above_the_cap_is_a_violation() -> None:
    with JudgeServer(lambda call: 0.5, limits=ServerLimits(concurrency=3, requests_per_minute=5)) as server:
        server.hold()
        client = Client(server)
        held = [client.open() for _ in range(3)]
        server.wait_for(lambda report: report.in_flight == 3)
        over = client.send()
        assert over.status == 429
        assert "retry-after" not in over.headers
        (violation,) = server.report().violations
        assert (violation.kind, violation.over, violation.early_s) == ("concurrency", 1, None)
        server.release()
        for connection in held:
            with connection:
                assert read_all(connection).status == 200
        assert [client.send().status for _ in range(3)] == [200, 200, 429], "the rejected one used up no request"
        report = server.report()
    assert (report.peak_concurrency, report.answered, report.violations_total) == (3, 5, 2)
    assert adds_up(report)


def test_a_slot_that_its_client_has_abandoned_goes_to_the_next() -> None:
    with JudgeServer(lambda call: 0.5, limits=ServerLimits(concurrency=1, requests_per_minute=100)) as server:
        for turn in range(5):
            server.hold()
            abandoned = Client(server).open()
            server.wait_for(lambda report, turn=turn: report.in_flight == 1 and report.requests == 2 * turn + 1)
            abandoned.close()
            following = Client(server).open()
            server.wait_for(lambda report, turn=turn: report.requests == 2 * turn + 2 and report.abandoned == turn + 1)
            server.release()
            with following:
                assert following.recv(100).startswith(b"HTTP/1.1 200")
            server.wait_for(lambda report: report.in_flight == 0)
        report = server.report()
    assert (report.violations_total, report.answered, report.peak_concurrency) == (0, 5, 1)
    assert adds_up(report)


def test_waiting_in_vain_shows_the_report() -> None:
    with JudgeServer(limits=ServerLimits(requests_per_minute=1)) as server:
        assert server.report().latency_p50_s is None
        Client(server).chat()
        with pytest.raises(JudgeServerError, match=r"did not hold within 0 s.*requests=1"):
            server.wait_for(lambda report: report.requests == 2, timeout_s=0.0)


def test_logits_are_activated_unless_the_request_says_not_to() -> None:
    with JudgeServer(lambda call: {"bad": 0.0, "good": math.log(3)}) as server:
        (item,) = Client(server).post("/classify", model="judge", input="a").json["data"]
        assert item == {"index": 0, "label": "good", "probs": pytest.approx([0.25, 0.75]), "num_classes": 2}
    with JudgeServer(lambda call: 0.0) as server:
        assert Client(server).post("/predict", inputs="a").json == [[{"label": "LABEL_0", "score": 0.5}]]


def test_a_request_of_several_texts_counts_once() -> None:
    with JudgeServer(lambda call: 1.0, limits=ServerLimits(requests_per_minute=2)) as server:
        replies = [Client(server).post("/classify", model="judge", input=["a"] * 64) for _ in range(3)]
        assert [reply.status for reply in replies] == [200, 200, 429]
        report = server.report()
    assert (report.requests, report.answered, report.violations_total, report.prompt_tokens) == (3, 2, 1, 128)


# Protocols. `server/test_model_calls.py` reads their replies, streams and errors with the packages of their providers


@pytest.mark.parametrize("dialect", ["openai", "openai_reasoning", "responses", "anthropic", "gemini"])
def test_every_dialect_scores(dialect: str) -> None:
    judge = {"score_range": [0, 10], "criteria": {"style": "Good style."}}
    with JudgeServer(lambda call: sum(call.score_range) / 2, api_key="sk-test") as server:
        source = {"dialect": dialect, "api_key": "sk-test"}
        played = wired({"a": server}, make_samples(6), source=source, judge=judge)
        report = server.report()
    verdicts = [outcome.verdict for outcome in played.outcomes if isinstance(outcome, Scored)]
    assert [(verdict.score, verdict.components) for verdict in verdicts] == [(0.5, {"style": 0.5})] * 6
    assert (report.refused, report.violations_total) == (0, 0)
    assert report.prompt_tokens == sum(verdict.spent.usage.prompt_tokens for verdict in verdicts)


SHORT = {"model": "judge", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
CONTENTS = {"contents": [{"parts": [{"text": "x"}]}], "generationConfig": {"maxOutputTokens": 1}}


INPUT = {"model": "judge", "input": "x", "max_output_tokens": 1}


@each_of(
    ("path", "body", "reason", "form"),
    [
        (CHAT, SHORT, '"finish_reason":"length"', ("openai.types.chat", "ChatCompletion")),
        ("/v1/responses", INPUT, '"reason":"max_output_tokens"', ("openai.types.responses", "Response")),
        ("/v1/messages", SHORT, '"stop_reason":"max_tokens"', ("anthropic.types", "Message")),
        ("/v1beta/models/judge:generateContent", CONTENTS, '"finishReason":"MAX_TOKENS"', None),
        ("/v1/models/judge:generateContent", CONTENTS, '"finishReason":"MAX_TOKENS"', None),
    ],
)
def test_a_reply_has_the_form_of_its_provider_and_no_more_tokens_than_asked_for(
    path: str, body: Any, reason: str, form: Any
) -> None:
    with JudgeServer(lambda call: 0.5) as server:
        reply = Client(server).post(path, **body).body.decode()
    assert reason in reply
    if form is not None:
        getattr(pytest.importorskip(form[0]), form[1]).model_validate_json(reply)


def test_an_error_has_the_form_of_its_protocol() -> None:
    with JudgeServer(faults=Faults(script=["error_529", "error_429_seconds"])) as server:
        busy, throttled = (Client(server).post("/v1/messages", **SHORT) for _ in range(2))
    assert (busy.status, busy.json["error"]["type"]) == (529, "overloaded_error")
    assert (throttled.json["error"]["type"], throttled.headers["retry-after"]) == ("rate_limit_error", "1")


def test_a_server_may_serve_some_protocols_only() -> None:
    with JudgeServer(protocols=["anthropic"]) as server:
        assert Client(server).post("/v1/responses", model="judge", input="x").status == 404
        assert Client(server).post("/v1/messages", **SHORT).status == 200
    for wrong in ((), ("openai", "claude")):
        with pytest.raises(ValueError, match="protocols among openai, responses, anthropic, gemini"):
            JudgeServer(protocols=wrong)
