"""Samples and arguments as slime has them, without slime; a judge server on loopback."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins.testing import JudgeServer, SlimeSample
from tests.kit import make_config


@pytest.fixture
def make_group():
    def make(*responses, group=0, **fields):
        given = {"prompt": "17 + 25?", "label": "42", "response_length": 3, **fields}
        given.setdefault("status", SlimeSample.Status.COMPLETED)
        return [SlimeSample(response=text, group_index=group, index=n, **given) for n, text in enumerate(responses)]

    return make


@pytest.fixture
def judge():
    """Gives the number in the response out of 10, and of "5/2" the 2 for its tone; "break" is an HTTP 500."""

    def score(call):
        response = call.blocks["response"]
        if "break" in response:
            raise RuntimeError("the test asked for it")
        total, _, tone = response.partition("/")
        return {"score": float(total), "components": {"tone": float(tone)}} if tone else float(total.split()[0])

    with JudgeServer(score) as server:
        yield server


@pytest.fixture
def make_args(judge):
    """slime's arguments, with a configuration that points to the judge and gives up at the first failure."""

    def make(*, tree=None, **arguments):
        qreward = {**make_config({"judge": judge}, engine={"max_attempts": 1, "seed": 1}), **(tree or {})}
        defaults = {
            "advantage_estimator": "grpo",
            "custom_reward_post_process_path": "slime_adapter.post_process",
            "group_rm": False,
            "grpo_std_normalization": True,
            "n_samples_per_prompt": 4,
            "partial_rollout": False,
            "rewards_normalization": True,
            "rollout_batch_size": 1,
        }
        return SimpleNamespace(qreward=qreward, **{**defaults, **arguments})

    return make


@pytest.fixture(autouse=True)
def closed():
    """What a test opened is closed after it: no engine, thread or connection lives on."""
    yield
    slime_adapter.close()
