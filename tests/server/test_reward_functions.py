"""The reward functions for TRL and ms-swift, called as those trainers call them.

Their loops are written down here as far as reward functions can tell them apart: what they pass, how they find async
functions, and that None becomes NaN.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from functools import partial
from types import SimpleNamespace

import pytest
from anyio.from_thread import start_blocking_portal

from qreward_plugins import InputError, RewardServerError
from qreward_plugins.client.reward_functions import SwiftReward, trl_reward

from ..kit import each_of

PROMPTS = [[{"role": "user", "content": "How much?"}]] * 3


def as_trl(function, inputs, completions):
    """`GRPOTrainer._calculate_rewards` for one function: columns as lists, and what TRL adds to them."""
    keys = [key for key in inputs[0] if key not in ("prompt", "completion", "completion_ids")]
    logged = {}
    columns = {key: [row[key] for row in inputs] for key in keys}
    columns |= {
        "trainer_state": SimpleNamespace(global_step=4),
        "log_extra": lambda column, values: None,
        "log_metric": logged.__setitem__,
    }
    given = {
        "prompts": [row["prompt"] for row in inputs],
        "completions": completions,
        "completion_ids": [[1]] * len(inputs),
        **columns,
    }
    # TRL has an event loop in a thread of its own.
    assert inspect.iscoroutinefunction(function)
    with start_blocking_portal() as portal:
        output = portal.call(partial(function, **given))
    return [math.nan if reward is None else reward for reward in output], logged


def as_swift(reward, rows, completions):
    """`compute_rewards_per_func` of ms-swift for one reward: completions first, columns as lists."""
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    columns["trainer_state"] = SimpleNamespace(global_step=4)
    output = reward(completions, **columns)
    return [math.nan if reward is None else reward for reward in output]


@pytest.mark.parametrize("conversational", [False, True])
def test_trl(serving, conversational):
    texts = ["so: 0.25", "so: break", "so: 1"]
    completions = [[{"role": "assistant", "content": text}] for text in texts] if conversational else texts
    prompts = PROMPTS if conversational else ["How much?"] * 3
    inputs = [{"prompt": prompt, "answer": str(n), "level": n} for n, prompt in enumerate(prompts)]
    with serving() as there:
        function = trl_reward(there.url, ground_truth="answer", extras=["level"])
        rewards, logged = as_trl(function, inputs, completions)
        samples = sorted(there.source.samples, key=lambda sample: sample.id)
    assert function.__name__ == "qreward"
    assert rewards[0::2] == [0.25, 1.0]
    assert math.isnan(rewards[1])
    assert logged == {"qreward/failed_rate": 1 / 3}
    assert [sample.ground_truth for sample in samples] == ["0", "1", "2"]
    assert [dict(sample.extras) for sample in samples] == [{"level": 0}, {"level": 1}, {"level": 2}]
    assert [sample.response for sample in samples] == texts
    assert list(samples[0].messages) == PROMPTS[0]
    assert (len({sample.group_id for sample in samples}), samples[0].step) == (1, 4)


WRONG_COLUMNS = [
    ({"answer": ["4"], "prompts": ["a", "b"], "completions": ["c"]}, "there are 2 prompts and 1 completions"),
    ({"truth": ["4"], "prompts": ["a"], "completions": ["c"]}, "the data set has no column 'answer'; it has truth"),
    ({"answer": ["4"], "prompts": "a", "completions": ["c"]}, "prompts must be a list, not str"),
    ({"answer": ["4"], "prompts": ["a"], "completions": None}, "completions must be a list, not NoneType"),
    ({"answer": ["4"], "prompts": ["a"], "completions": [4]}, r"completions\[0\] must be a text or a list of messages"),
    ({"answer": ["4"], "prompts": ["a"], "completions": [["c"]]}, r"completions\[0\] must be a text or a list"),
]


@each_of(("columns", "text"), WRONG_COLUMNS)
def test_wrong_columns(columns, text):
    with pytest.raises(InputError, match=text):
        asyncio.run(trl_reward("http://127.0.0.1:9", ground_truth="answer")(**columns))


def test_wrong_settings(monkeypatch):
    monkeypatch.delenv("NO_SUCH_TOKEN", raising=False)
    with pytest.raises(InputError, match="must start with http://"):
        trl_reward("127.0.0.1:9")
    with pytest.raises(InputError, match="NO_SUCH_TOKEN is not set"):
        asyncio.run(trl_reward("http://127.0.0.1:9", token_env="NO_SUCH_TOKEN")(prompts=["a"], completions=["b"]))


def test_ms_swift(serving, monkeypatch):
    texts = ["so: 0.25", "so: break", "so: 1"]
    rows = [
        {"messages": [*PROMPTS[0], {"role": "assistant", "content": text}], "solution": str(n)}
        for n, text in enumerate(texts)
    ]
    with serving(token="right") as there:
        monkeypatch.setenv("QREWARD_SERVER", there.url)
        monkeypatch.setenv("QREWARD_SERVER_TOKEN", "right")
        rewards = as_swift(SwiftReward(args=SimpleNamespace()), rows, texts)
        samples = sorted(there.source.samples, key=lambda sample: sample.id)
    assert rewards[0::2] == [0.25, 1.0]
    assert math.isnan(rewards[1])
    assert [sample.ground_truth for sample in samples] == ["0", "1", "2"]
    assert list(samples[0].messages) == PROMPTS[0]


def test_no_server(monkeypatch):
    monkeypatch.delenv("QREWARD_SERVER", raising=False)
    for make in (trl_reward, SwiftReward):
        with pytest.raises(InputError, match="QREWARD_SERVER"):
            make()
    monkeypatch.setattr("qreward_plugins.client.connection._FIRST_PAUSE_S", 70.0)
    with pytest.raises(RewardServerError, match="cannot be reached"):
        as_trl(trl_reward("http://127.0.0.1:9"), [{"prompt": "?"}], ["so: 1"])
