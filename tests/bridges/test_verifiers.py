"""The reward function for verifiers: as `Task.score` calls it, and in verifiers itself where it is installed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.bridges.verifiers import reward


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


def test_a_rollout_is_scored(seen):
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
