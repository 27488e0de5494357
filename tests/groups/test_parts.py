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


def slime() -> None:
    adapter_of(SimpleNamespace(qreward=TREE, group_rm=False))


def roll() -> None:
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [TREE]}
    with roll_stand_in(over_installed=True), FakeRollTrainer({"judged": worker}, timeout_s=30.0):
        pass


def trl() -> None:
    Scorer(TREE, "TRL")


@pytest.mark.parametrize(
    ("start", "why"),
    [
        (slime, "slime's batch has one reward of a sample"),
        (roll, "this pipeline of ROLL trains on one reward of a response"),
        (trl, "TRL takes one reward of a sample"),
    ],
)
def test_parts_are_refused_with_the_reason(start: Any, why: str) -> None:
    with pytest.raises(Exception, match=f"dense: rewards cannot come in parts: {why}") as caught:
        start()
    assert isinstance(caught.value, ConfigurationError) or "ConfigurationError" in type(caught.value).__name__
