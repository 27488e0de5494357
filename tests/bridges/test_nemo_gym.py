"""The resources server for NeMo-Gym: as its verify endpoint calls it, and in NeMo-Gym itself where it is installed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import yaml
from pydantic import BaseModel


class Config(BaseModel):
    name: str = "quality"


class Request(BaseModel):
    responses_create_params: BaseModel
    response: BaseModel


class Response(Request):
    reward: float


class Server(BaseModel):
    config: Config


class JudgeError(Exception):
    pass


STAND_INS = {
    "nemo_gym": {},
    "nemo_gym.judge": {"JudgeError": JudgeError},
    "nemo_gym.base_resources_server": {
        "BaseResourcesServerConfig": Config,
        "BaseVerifyRequest": Request,
        "BaseVerifyResponse": Response,
        "SimpleResourcesServer": Server,
    },
}


class Anything(BaseModel, extra="allow"):
    """Parameters of a request, or a response."""


def output(text):
    return [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I think."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]},
    ]


def verified(bridge, path, text, **row: Any):
    server = bridge.QRewardResourcesServer(config=bridge.QRewardServerConfig(judges=str(path)))
    asked = Anything(input=[{"role": "user", "content": "How much?"}, {"type": "function_call", "name": "add"}])
    body = bridge.QRewardVerifyRequest(
        responses_create_params=Anything(instructions="Be short.", **asked.model_dump()),
        response=Anything(output=output(text)),
        **row,
    )
    return asyncio.run(server.verify(body))


@pytest.fixture
def bridge(imported):
    return imported("nemo_gym", STAND_INS)


def test_a_rollout_is_scored(bridge, seen, written):
    tree, samples = seen
    answer = verified(bridge, written(tree), "It is 42", expected_answer="42", level=3, reward="of the row")
    assert (answer.reward, answer.model_extra["score/words"]) == (1.0, 3.0)
    assert (answer.expected_answer, answer.level) == ("42", 3)
    (sample,) = samples()
    assert [turn["content"] for turn in sample.messages] == ["Be short.", "How much?"]
    assert (sample.response, sample.ground_truth) == ("It is 42", "42")
    assert (dict(sample.extras), bool(sample.group_id)) == ({"level": 3, "reward": "of the row"}, True)


def test_what_has_no_reward_is_a_judge_that_failed(bridge, tree, written):
    for response, said in ((7, "response cannot be read"), ("so: refuse", "leave it out of training")):
        with pytest.raises(JudgeError, match=said):
            verified(bridge, written(tree), response)


@pytest.mark.filterwarnings("ignore")
def test_in_nemo_gym(tree, written, block):
    pytest.importorskip("nemo_gym.judge")
    from fastapi.testclient import TestClient
    from nemo_gym.server_utils import ServerClient

    from qreward_plugins.bridges.nemo_gym import QRewardServerConfig

    app = {"__name__": "app"}
    exec(block("NeMo-Gym", "py"), app)
    settings = yaml.safe_load(block("NeMo-Gym", "yml"))["quality"]["resources_servers"]["quality"]
    assert settings.keys() <= QRewardServerConfig.model_fields.keys()
    settings |= {"host": "127.0.0.1", "port": 1, "name": "quality", "judges": str(written(tree))}
    config = QRewardServerConfig.model_validate(settings)
    server = app["QRewardResourcesServer"](config=config, server_client=ServerClient.model_construct())
    client = TestClient(server.setup_webserver())

    def verify(text):
        message = {"id": "m", "type": "message", "role": "assistant", "status": "completed"}
        message["content"] = [{"type": "output_text", "text": text, "annotations": []}]
        response = {"id": "r", "created_at": 0.0, "model": "policy", "object": "response", "output": [message]}
        response |= {"parallel_tool_calls": False, "tool_choice": "auto", "tools": []}
        asked = {"input": [{"role": "user", "content": "How much?"}]}
        answer = client.post(
            "/verify", json={"responses_create_params": asked, "response": response, "expected_answer": "42"}
        )
        assert answer.status_code == 200, answer.text
        return answer.json()

    scored = verify("so: 0.25")
    assert (scored["reward"], scored["mask_sample"], scored["expected_answer"]) == (0.25, False, "42")
    failed = verify("so: refuse")
    assert (failed["mask_sample"], failed["failure_kind"]) == (True, "judge_failed")
    assert failed["_ng_failure_class"] == "judge_failed"
    assert "leave it out of training" in failed["failure_reason"]
