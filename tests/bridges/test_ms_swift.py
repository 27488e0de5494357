"""The ORM, called as ms-swift calls it: completions first, columns as lists, and None becomes NaN."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.bridges.ms_swift import SwiftReward

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
