"""Trainers refuse what they cannot do before they train: rewards in parts, judges of turns, and judges of groups."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.bridges.scorer import Scorer
from qreward_plugins.testing import FakeRollTrainer, roll_stand_in
from slime_adapter.settings import adapter_of

MODEL = {"kind": "openai", "base_url": "http://127.0.0.1:1/v1", "model": "judge"}
PRM = {"kind": "reward_model", "base_url": MODEL["base_url"], "model": "m", "protocol": "vllm_steps"}
PRM |= {"chat_template": "/nowhere", "step_separator": "."}
STEPS = {"sources": {"m": PRM}, "judges": {"steps": {"kind": "reward_model", "reduce": "min"}}, "dense": True}


def over_llm(kind: str) -> Any:
    return {"sources": {"m": MODEL}, "judges": {"each": {"kind": "llm"}, "whole": {"kind": kind, "judge": "each"}}}


def slime(tree: Any) -> None:
    adapter_of(SimpleNamespace(qreward=tree, group_rm=False))


def roll(tree: Any) -> None:
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree]}
    flags = {"adv_estimator": "grpo", "rollout_batch_size": 1, "is_num_return_sequences_expand": True}
    with roll_stand_in(over_installed=True), FakeRollTrainer({"judged": worker}, timeout_s=30.0, **flags) as trainer:
        trainer.step()


def openenv(tree: Any) -> None:
    Scorer(tree, "OpenEnv")


TURNS, DENSE = "the turns of a response are not known: ", "dense: rewards cannot come in parts: "


@pytest.mark.parametrize(
    ("start", "tree", "said"),
    [
        (slime, over_llm("turns"), f"{TURNS}slime has one text of a response"),
        (roll, STEPS, f"{DENSE}this pipeline of ROLL trains on one reward of a response"),
        (slime, over_llm("rank"), r"siblings cannot be compared: slime asks .* Set --group-rm"),
        (roll, over_llm("rank"), r"one by one, so siblings cannot be compared\. Set it to false"),
    ],
)
def test_what_a_trainer_cannot_do_is_refused_with_the_reason(start: Any, tree: Any, said: str) -> None:
    with pytest.raises(Exception, match=said) as caught:
        start(tree)
    assert isinstance(caught.value, ConfigurationError) or "ConfigurationError" in str(caught.value)
