"""The judge server as a service that scores samples, and as the servers of reward models, whose forms
`sources/test_reward_models.py` and `sources/test_faults.py` read.
"""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qreward_plugins.testing import JudgeCall, JudgeServer, ScoreCall, ServerLimits

from ..kit import each_of
from .conftest import Client


def length(call: ScoreCall) -> float:
    return float(len(call.response))


@pytest.fixture
def post() -> Any:
    def posted(server: JudgeServer, path: str, **body: Any) -> Any:
        return Client(server).send(json.dumps(body).encode(), path=path)

    return posted


@each_of(("answer", "body"), [(math.nan, "NaN"), ({"score": 1, "of": "é"}, '{"score": 1, "of": "é"}'), ("[1]", "[1]")])
def test_what_scorers_return_is_the_reply(answer: Any, body: str) -> None:
    with JudgeServer(lambda call: answer) as server:
        reply = Client(server).score()
        assert server.score_url == f"{server.root_url}/score"
    assert (reply.status, reply.body.decode()) == (200, body)
    assert reply.headers["content-type"].startswith("application/json")


def test_the_scorer_sees_the_sample_in_the_blocks_of_a_judge() -> None:
    calls: list[ScoreCall] = []

    def score(call: JudgeCall) -> float:
        assert isinstance(call, ScoreCall)
        calls.append(call)
        return 1.0

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    with JudgeServer(score, models=("rm", "judge")) as server:
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
    ("path", "body", "status"),
    [
        ("/score", b"{", 400),
        ("/score", b'{"response": 4}', 400),
        ("/score", b'{"model": "judge", "queries": ["a", "b"], "documents": ["a", "b", "c"]}', 400),
        ("/classify", b'{"model": "judge", "input": ["a", ""]}', 400),
        ("/classify", b'{"model": "nobody", "input": ["a"]}', 404),
        ("/predict", b'{"inputs": ["a", "b"]}', 422),
    ],
)
def test_mistakes_are_refused_as_a_whole(path: str, body: bytes, status: int) -> None:
    with JudgeServer(length) as server:
        assert Client(server).send(body, path=path).status == status
        report = server.report()
    assert (report.requests, report.refused, report.statuses) == (1, 1, {status: 1})


def test_logits_are_activated_unless_the_request_says_not_to(post: Any) -> None:
    with JudgeServer(lambda call: {"bad": 0.0, "good": math.log(3)}) as server:
        (item,) = post(server, "/classify", model="judge", input="a").json["data"]
        assert item == {"index": 0, "label": "good", "probs": pytest.approx([0.25, 0.75]), "num_classes": 2}
    with JudgeServer(lambda call: 0.0) as server:
        assert post(server, "/predict", inputs="a").json == [[{"label": "LABEL_0", "score": 0.5}]]


def test_a_request_of_several_texts_counts_once(post: Any) -> None:
    with JudgeServer(length, limits=ServerLimits(requests_per_minute=2)) as server:
        body = {"model": "judge", "input": ["a"] * 64}
        assert [post(server, "/classify", **body).status for _ in range(3)] == [200, 200, 429]
        report = server.report()
    assert (report.requests, report.answered, report.violations_total, report.prompt_tokens) == (3, 2, 1, 128)
