"""The resources server for NeMo-Gym: as its verify endpoint calls it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
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
