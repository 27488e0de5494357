"""Trainers that take one reward of a response refuse rewards in parts before they train."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.bridges.scorer import Scorer
from qreward_plugins.testing import FakeRollTrainer, roll_stand_in
from slime_adapter.settings import adapter_of

TREE: dict[str, Any] = {
    "sources": {"model": {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "judge"}},
    "judges": {"useful": {"kind": "llm"}, "whole": {"kind": "turns", "judge": "useful"}},
    "dense": True,
}


def slime(tree: Any) -> None:
    adapter_of(SimpleNamespace(qreward=tree, group_rm=False))


def roll(tree: Any) -> None:
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree]}
    with roll_stand_in(over_installed=True), FakeRollTrainer({"judged": worker}, timeout_s=30.0):
        pass


def openenv(tree: Any) -> None:
    Scorer(tree, "OpenEnv")


@pytest.mark.parametrize(
    ("start", "why", "turns"),
    [
        (slime, "slime's batch has one reward of a sample", "slime has one text of a response"),
        (
            roll,
            "this pipeline of ROLL trains on one reward of a response",
            "a response of this pipeline of ROLL is one turn",
        ),
        (openenv, "OpenEnv takes one reward of a sample", "OpenEnv hands over one text of a response"),
    ],
)
def test_parts_and_turns_are_refused_with_the_reason(start: Any, why: str, turns: str) -> None:
    with pytest.raises(Exception, match=f"the turns of a response are not known: {turns}"):
        start({**TREE, "dense": False})
    prm = {"kind": "reward_model", "base_url": "http://127.0.0.1:1/v1", "model": "m", "protocol": "vllm_steps"}
    prm |= {"chat_template": "/nowhere", "step_separator": "."}
    tree = {"sources": {"m": prm}, "judges": {"steps": {"kind": "reward_model", "reduce": "min"}}, "dense": True}
    with pytest.raises(Exception, match=f"dense: rewards cannot come in parts: {why}") as caught:
        start(tree)
    assert isinstance(caught.value, ConfigurationError) or "ConfigurationError" in type(caught.value).__name__
