"""The bridges to NeMo-Gym, verifiers, OpenEnv and ms-swift: as the library calls each, and in the library itself where
it is installed.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from qreward_plugins import ConfigurationError, RewardMissing, Sample
from qreward_plugins.bridges.ms_swift import SwiftReward
from qreward_plugins.bridges.verifiers import reward

# NeMo-Gym: as its verify endpoint calls the resources server


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


# verifiers: as `Task.score` calls the reward function


class TaskData(BaseModel):
    prompt: object = "How much?"
    system_prompt: str | None = "Be short."
    answer: str = "42"
    level: int = 3


def rollout(reply):
    metrics = {}
    return SimpleNamespace(
        id="rollout-1",
        task=SimpleNamespace(key="task-1"),
        last_reply=reply,
        transcript="[user]\nHow much?\n\n[assistant]\nso: 1",
        metrics=metrics,
        record_metric=metrics.__setitem__,
    )


def score(function, trace):
    return asyncio.run(function(task=TaskData(), trace=trace))


def test_a_trace_is_scored(seen):
    tree, samples = seen
    trace = rollout("It is 42")
    assert score(reward(tree), trace) == 1.0
    assert trace.metrics == {"qreward/score/words": 3.0}
    (sample,) = samples()
    assert [turn["content"] for turn in sample.messages] == ["Be short.", "How much?"]
    assert (sample.response, sample.ground_truth, dict(sample.extras)) == ("It is 42", "42", {"level": 3})
    assert (sample.id, sample.group_id) == ("rollout-1", "task-1")


def test_the_judge_may_see_the_whole_rollout_and_one_without_a_reward_is_an_error(tree):
    assert score(reward(tree), rollout("so: 0.25")) == 0.25
    assert score(reward(tree, view="full_trace"), rollout("so: 0.25")) == 1.0
    with pytest.raises(RewardMissing, match="leave it out of training"):
        score(reward(tree), rollout("so: refuse"))


def test_a_judge_that_compares_is_refused(tree):
    tree["judges"] |= {"ranked": {"kind": "rank", "judge": "quality"}}
    tree["routes"] = {"default": "ranked"}
    with pytest.raises(ConfigurationError, match="verifiers asks for one reward at a time"):
        reward(tree)


@pytest.mark.parametrize(("reply", "wanted"), [("so: 0.25", 0.25), ("so: refuse", None)])
def test_in_verifiers(tree, tmp_path, written, block, reply, wanted):
    vf = pytest.importorskip("verifiers.v1")
    tomllib = pytest.importorskip("tomllib")

    class Data(vf.TaskData):
        answer: str

    class Task(vf.Task[Data]):
        pass

    written(tree)
    (tmp_path / "my_quality.py").write_text(block("verifiers", "python"))
    settings = tomllib.loads(block("verifiers", "toml"))["env"]["taskset"]["task"]
    settings["rewards"]["quality"] |= {"fn": f"{tmp_path}/my_quality.py:quality", "weight": 0.5}
    task = Task(Data(idx=0, prompt="How much?", answer="42"), vf.TaskConfig.model_validate(settings))
    turns = [vf.UserMessage(content="How much?"), vf.AssistantMessage(content=reply)]
    trace = vf.Trace(
        task=vf.TraceTask(type="Task", data=task.data),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        nodes=[
            vf.MessageNode(parent=number - 1 if number else None, message=turn, sampled=number == 1)
            for number, turn in enumerate(turns)
        ],
    )
    if wanted is not None:
        asyncio.run(task.score(trace))
        assert (trace.rewards["quality"].score, trace.reward) == (wanted, wanted / 2)
        return
    with pytest.raises(vf.TaskError, match="no reward for this sample"):
        asyncio.run(task.score(trace))
    assert trace.rewards == {"quality": None}


# OpenEnv: as an environment calls the rubric


class Rubric:
    """`openenv.core.rubrics.Rubric` 0.10 for an async `forward`, without hooks."""

    last_score = None

    async def __call__(self, action, observation):
        self.last_score = await self.forward(action, observation)
        return self.last_score


OPENENV = {"openenv": {}, "openenv.core": {}, "openenv.core.rubrics": {"Rubric": Rubric}}


def sample_of(action, observation):
    return Sample([{"role": "user", "content": observation}], action)


def test_a_step_is_scored_or_an_error(imported, seen, tree):
    bridge = imported("openenv", OPENENV)
    rubric = bridge.QRewardRubric(seen[0], sample_of)
    assert asyncio.run(rubric("It is 42", "How much?")) == 1.0
    assert (rubric.last_score, rubric.last_components) == (1.0, {"words": 3.0})
    rubric = bridge.QRewardRubric(tree, sample_of)
    with pytest.raises(RewardMissing):
        asyncio.run(rubric("so: refuse", "How much?"))
    assert rubric.last_score is None


@pytest.mark.filterwarnings("ignore")
def test_in_openenv(tree, written, block):
    pytest.importorskip("openenv.core.rubrics")
    from openenv.core.env_server import Action, Environment, Observation, State
    from openenv.core.rubrics import WeightedSum

    class Answer(Action):
        text: str

    class Asking(Environment):
        def reset(self, seed=None, episode_id=None, **kwargs):
            return Observation()

        def step(self, action, timeout_s=None, **kwargs):
            return asyncio.run(self.step_async(action))

        async def step_async(self, action, timeout_s=None, **kwargs):
            seen = Observation(done=True, metadata={"question": "How much?"})
            seen.reward = await self._apply_rubric_async(action, seen)
            return seen

        @property
        def state(self):
            return State()

    written(tree)
    page = {}
    exec(block("OpenEnv", "py"), page)
    quality = page["rubric"]
    environment = Asking(rubric=WeightedSum([quality], weights=[1.0]))
    assert environment.step(Answer(text="so: 0.25")).reward == quality.last_score == 0.25
    with pytest.raises(RewardMissing):
        environment.step(Answer(text="so: refuse"))


# ms-swift: the ORM gets completions first, columns as lists, and None becomes NaN


PROMPT = [{"role": "user", "content": "How much?"}]


def as_swift(reward, rows, completions):
    """`compute_rewards_per_func` of ms-swift for one reward."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    return reward(completions, **columns, trainer_state=SimpleNamespace(global_step=4))


def rows_of(texts):
    return [
        {"messages": [*PROMPT, {"role": "assistant", "content": text}], "solution": str(n), "level": n}
        for n, text in enumerate(texts)
    ]


@pytest.fixture
def configured(written, monkeypatch):
    return lambda tree: monkeypatch.setenv("QREWARD_CONFIG", str(written(tree)))


def test_a_sample_without_a_reward_gets_none(tree, configured):
    configured(tree)
    texts = ["so: 0.25", "so: refuse", "so: 1", "so: 1"]
    rows = [*rows_of(texts[:3]), {"messages": ["no message"], "solution": "1", "level": 3}]
    assert as_swift(SwiftReward(args=SimpleNamespace()), rows, texts) == [0.25, None, 1.0, None]


def test_what_a_sample_is_made_of(seen, configured):
    tree, samples = seen
    configured(tree)
    assert as_swift(SwiftReward(), rows_of(["one", "two"]), ["one", "two"]) == [1.0, 1.0]
    first, second = sorted(samples(), key=lambda sample: sample.ground_truth)
    assert (list(first.messages), first.response, first.ground_truth, first.step) == (PROMPT, "one", "0", 4)
    assert (dict(second.extras), first.group_id != second.group_id) == ({"level": 1}, True)


def test_without_a_configuration_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    with pytest.raises(ConfigurationError, match="QREWARD_CONFIG: the environment variable is not set"):
        SwiftReward()
