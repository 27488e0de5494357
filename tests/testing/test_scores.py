"""The judge server as a service that scores samples, and as the servers of reward models."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qreward_plugins.testing import Faults, JudgeCall, JudgeServer, Latency, ScoreCall, ServerLimits

from ..kit import each_of


def length(call: ScoreCall) -> float:
    return float(len(call.response))


@pytest.fixture
def post(client_of: Any) -> Any:
    def posted(server: JudgeServer, path: str, **body: Any) -> Any:
        return client_of(server).send(json.dumps(body).encode(), path=path)

    return posted


@each_of(("answer", "body"), [(math.nan, "NaN"), ({"score": 1, "of": "é"}, '{"score": 1, "of": "é"}'), ("[1]", "[1]")])
def test_what_scorers_return_is_the_reply(answer: Any, body: str, client_of: Any) -> None:
    with JudgeServer(lambda call: answer) as server:
        reply = client_of(server).score()
        assert server.score_url == f"{server.root_url}/score"
    assert (reply.status, reply.body.decode()) == (200, body)
    assert reply.headers["content-type"].startswith("application/json")


def test_the_scorer_sees_the_sample_in_the_blocks_of_a_judge(client_of: Any) -> None:
    calls: list[ScoreCall] = []

    def score(call: JudgeCall) -> float:
        assert isinstance(call, ScoreCall)
        calls.append(call)
        return 1.0

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    with JudgeServer(score, models=("rm", "judge")) as server:
        client = client_of(server)
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


def test_scores_share_key_limits_and_report_with_chat(client_of: Any) -> None:
    limits = ServerLimits(requests_per_minute=3, tokens_per_minute=1_000)
    with JudgeServer(lambda call: 0.5, limits=limits, api_key="s3cret") as server:
        client, key = client_of(server), {"Authorization": "Bearer s3cret"}
        assert client.score().status == 401
        replies = [client.score(headers=key), client.send(headers=key), *(client.score(headers=key) for _ in range(2))]
        report = server.report()
        assert client.send(b"", method="GET", path="/score").status == 405
        assert "/score" in client.send(b"{}", path="/scores").json["error"]["message"]
    assert [reply.status for reply in replies] == [200, 200, 200, 429]
    assert replies[0].headers["x-ratelimit-remaining-requests"] == "2"
    assert (report.requests, report.answered, report.violations_by_kind) == (5, 3, {"requests": 1})


@each_of(
    ("path", "body", "status"),
    [
        ("/score", b"{", 400),
        ("/score", b'{"response": 4}', 400),
        ("/score", b'{"response": "4", "prompt": ["x"]}', 400),
        ("/score", b'{"model": "judge", "queries": ["a", "b"], "documents": ["a", "b", "c"]}', 400),
        ("/classify", b'{"model": "judge", "input": ["a", ""]}', 400),
        ("/classify", b'{"model": "nobody", "input": ["a"]}', 404),
        ("/classify", b'{"model": "judge", "messages": []}', 400),
        ("/predict", b'{"inputs": ["a", "b"]}', 422),
        ("/get_reward", b"{}", 400),
    ],
)
def test_mistakes_are_refused_as_a_whole(path: str, body: bytes, status: int, client_of: Any) -> None:
    with JudgeServer(length) as server:
        assert client_of(server).send(body, path=path).status == status
        report = server.report()
    assert (report.requests, report.refused, report.statuses) == (1, 1, {status: 1})


def test_vllm_numbers_its_results_and_counts_tokens(post: Any) -> None:
    with JudgeServer(length) as server:
        reply = post(server, "/classify", model="judge", input=["aaaa", "aa"], use_activation=False).json
        assert [(each["index"], each["probs"]) for each in reply["data"]] == [(0, [4.0]), (1, [2.0])]
        assert reply["usage"] == {"prompt_tokens": 2, "total_tokens": 2}
        assert post(server, "/pooling", model="judge", input="a", use_activation=False).json["data"][0]["data"] == [1.0]
        pairs = post(server, "/score", model="judge", queries="?", documents=["a", "bb"], use_activation=False).json
        assert [each["score"] for each in pairs["data"]] == [1.0, 2.0]
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "abc"}]
        conversation = post(server, "/classify", model="judge", messages=turns, use_activation=False).json
        assert conversation["data"][0]["probs"] == [3.0]


def test_the_other_servers_answer_in_their_own_forms(post: Any) -> None:
    with JudgeServer(length) as server:
        assert post(server, "/classify", text=["a", "bb"]).json == [{"embedding": [1.0]}, {"embedding": [2.0]}]
        predicted = post(server, "/predict", inputs=[["a"], ["bb"]], raw_scores=True).json
        assert predicted == [[{"label": "LABEL_0", "score": number}] for number in (1.0, 2.0)]
        assert post(server, "/get_reward", query=["a", "bb"], prompts=["?", "?"]).json == {"rewards": [1.0, 2.0]}
        assert post(server, "/v1/embeddings", input=["a"]).json["data"] == [{"index": 0, "embedding": [1.0]}]


def test_logits_are_activated_unless_the_request_says_not_to(post: Any) -> None:
    with JudgeServer(lambda call: {"bad": 0.0, "good": math.log(3)}) as server:
        (item,) = post(server, "/classify", model="judge", input="a").json["data"]
        assert item == {"index": 0, "label": "good", "probs": pytest.approx([0.25, 0.75]), "num_classes": 2}
    with JudgeServer(lambda call: 0.0) as server:
        assert post(server, "/predict", inputs="a").json == [[{"label": "LABEL_0", "score": 0.5}]]


def test_a_request_counts_once_and_each_text_takes_its_time(post: Any) -> None:
    with JudgeServer(length, limits=ServerLimits(requests_per_minute=2), latency=Latency(each_s=0.002)) as server:
        body = {"model": "judge", "input": ["a"] * 64}
        assert [post(server, "/classify", **body).status for _ in range(3)] == [200, 200, 429]
        report = server.report()
    assert (report.requests, report.answered, report.violations_total, report.prompt_tokens) == (3, 2, 1, 128)
    assert (report.latency_p50_s or 0) >= 64 * 0.002


@each_of(
    ("fault", "indices"),
    [
        ("results_too_few", [0]),
        ("results_too_many", [0, 1, 1]),
        ("results_shuffled", [1, 0]),
        ("results_unnumbered", [None, None]),
        ("results_misnumbered", [0, 0]),
    ],
)
def test_faults_of_lists(post: Any, fault: str, indices: list[Any]) -> None:
    with JudgeServer(length, faults=Faults(script=[fault, fault])) as server:
        data = post(server, "/classify", model="judge", input=["a", "bb"], use_activation=False).json["data"]
        assert [each.get("index") for each in data] == indices
        rewards = post(server, "/get_reward", query=["a", "bb"]).json["rewards"]
        assert len(rewards) == (2 if fault not in ("results_too_few", "results_too_many") else len(indices))
        assert server.report().faults == {fault: 2}
