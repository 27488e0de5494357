"""`examples/verifiers_rewards`: the rewards of a task of verifiers, where verifiers is installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from qreward_plugins import Failed, RewardEngine, Sample

EXAMPLE = Path(__file__).parents[2] / "examples" / "verifiers_rewards"
TASK = """
import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str
    bonus: float = 0.0


class Task(vf.Task[Data]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if "raise" in trace.last_message.content:
            raise RuntimeError("a bug")
        return float(trace.last_message.content.endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def extra(self, trace: vf.Trace) -> float:
        return self.data.bonus * (self.data.prompt_text == "2 + 2?") * trace.num_turns

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_message.content))
"""


def score(*responses: str) -> list[Any]:
    source = {
        "kind": "function",
        "function": f"{EXAMPLE / 'verifiers_rewards.py'}:rewards",
        "arguments": "sample",
        "kwargs": {"task": "my_verifiers_task:Task"},
    }
    tree = {"sources": {"task": source}, "judges": {"task": {"kind": "function"}}, "engine": {"deadline_s": 60}}
    question = [{"role": "user", "content": "2 + 2?"}]
    with RewardEngine(tree).portal() as portal:
        return portal.score_all([Sample(question, text, "4", extras={"bonus": 0.5, "more": 1}) for text in responses])


@pytest.fixture(autouse=True)
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("verifiers.v1")
    (tmp_path / "my_verifiers_task.py").write_text(TASK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{':'.join(sys.path)}")
    monkeypatch.syspath_prepend(tmp_path)


def test_a_task_of_verifiers_scores_a_response() -> None:
    right, wrong, broken = score("It is 4", "5", "raise")
    assert (right.reward, wrong.reward) == (1.25, 0.25)
    assert right.verdict.components == {"right": 1.0, "extra": 0.25, "length": 7.0}
    assert isinstance(broken, Failed)
