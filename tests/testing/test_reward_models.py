"""The judge server as a reward model: bodies with lists, its limits, and faults that one text provokes."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from qreward_plugins.testing import Faults, JudgeServer, Latency, PlayFault, ScoreCall, ServerLimits


def length(call: ScoreCall) -> float:
    return float(len(call.response))


@pytest.fixture
def post(client_of: Any) -> Any:
    def posted(server: JudgeServer, path: str, **body: Any) -> Any:
        return client_of(server).send(json.dumps(body).encode(), path=path)

    return posted


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
        assert post(server, "/predict", inputs=[["a"], ["bb"]], raw_scores=True).json == [
            [{"label": "LABEL_0", "score": 1.0}],
            [{"label": "LABEL_0", "score": 2.0}],
        ]
        assert post(server, "/get_reward", query=["a", "bb"], prompts=["?", "?"]).json == {"rewards": [1.0, 2.0]}
        assert post(server, "/v1/embeddings", input=["a"]).json["data"] == [{"index": 0, "embedding": [1.0]}]
        assert post(server, "/score", prompt="?", response="abc").json == 3.0


def test_logits_are_activated_unless_the_request_says_not_to(post: Any) -> None:
    with JudgeServer(lambda call: {"bad": 0.0, "good": math.log(3)}) as server:
        (item,) = post(server, "/classify", model="judge", input="a").json["data"]
        assert item == {"index": 0, "label": "good", "probs": pytest.approx([0.25, 0.75]), "num_classes": 2}
    with JudgeServer(lambda call: 0.0) as server:
        assert post(server, "/predict", inputs="a").json == [[{"label": "LABEL_0", "score": 0.5}]]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/classify", {"model": "judge", "input": ["a", ""]}, 400),
        ("/classify", {"model": "judge", "input": []}, 400),
        ("/classify", {"model": "judge", "input": [1, 2]}, 400),
        ("/classify", {"model": "nobody", "input": ["a"]}, 404),
        ("/classify", {"model": "judge", "inputs": ["a"]}, 400),
        ("/classify", {"model": "judge", "messages": []}, 400),
        ("/score", {"model": "judge", "queries": ["a", "b"], "documents": ["a", "b", "c"]}, 400),
        ("/predict", {"inputs": ["a", "b"]}, 422),
        ("/get_reward", {}, 400),
    ],
)
def test_mistakes_are_refused_as_a_whole(post: Any, path: str, body: Any, status: int) -> None:
    with JudgeServer(length) as server:
        assert post(server, path, **body).status == status
        assert server.report().refused == 1


def test_a_request_counts_once_whatever_it_carries(post: Any) -> None:
    with JudgeServer(length, limits=ServerLimits(requests_per_minute=2)) as server:
        body = {"model": "judge", "input": ["a"] * 64}
        assert [post(server, "/classify", **body).status for _ in range(3)] == [200, 200, 429]
        report = server.report()
    assert (report.requests, report.answered, report.violations_total) == (3, 2, 1)
    assert report.prompt_tokens == 128


def test_each_text_takes_its_time(post: Any) -> None:
    with JudgeServer(length, latency=Latency(each_s=0.05)) as server:
        post(server, "/classify", model="judge", input=["a"] * 4)
        assert (server.report().latency_p50_s or 0) >= 0.2
    with pytest.raises(ValueError, match=r"Latency\.each_s"):
        Latency(each_s=-1)


def test_one_text_fails_its_request(post: Any) -> None:
    def score(call: ScoreCall) -> float:
        if call.response == "bad":
            raise PlayFault("reset")
        return length(call)

    with JudgeServer(score) as server:
        assert post(server, "/classify", model="judge", input=["a", "bad"]).was_reset
        assert post(server, "/classify", model="judge", input=["a"]).status == 200
        report = server.report()
    assert (report.faults, report.answered, report.scorer_errors_total) == ({"reset": 1}, 1, 0)


def test_a_judge_may_play_a_fault_too(client_of: Any) -> None:
    def score(call: Any) -> float:
        raise PlayFault("error_503")

    with JudgeServer(score) as server:
        assert client_of(server).chat().status == 503
        assert server.report().faults == {"error_503": 1}


def test_faults_that_change_an_answer_cannot_be_raised() -> None:
    with pytest.raises(ValueError, match="a scorer that raises gives none"):
        PlayFault("score_nan")
    with pytest.raises(ValueError, match="did you mean"):
        PlayFault("error_40")


@pytest.mark.parametrize(
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


def test_a_scorer_of_texts_is_told_what_it_got_wrong(post: Any) -> None:
    with JudgeServer(lambda call: "fine") as server:
        assert post(server, "/classify", model="judge", input=["a"]).status == 500
        assert "mapping of labels to numbers" in server.report().scorer_errors[0]
