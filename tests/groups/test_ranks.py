"""The kind `rank` in each framework: a group is one call, and its places become the advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qreward_plugins.testing import JudgeServer

from ..kit import FRAMEWORKS, by_word, make_config, play


def tree_of(server: Any) -> dict[str, Any]:
    judges = {"quality": {"kind": "llm"}, "reward": {"kind": "rank", "judge": "quality"}}
    return {**make_config({"a": server}, engine={"deadline_s": 30}), "judges": judges, "routes": {"*": "reward"}}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_places_in_a_group_become_advantages(framework: str) -> None:
    with JudgeServer(by_word) as server:
        step = play(framework, ["worth 1", "worth 9", "worth 3", "worth 3"], tree_of(server))
        assert server.report().requests == 1
    rewards = np.array([0.0, 1.0, 0.5, 0.5])
    assert step.rewards == pytest.approx(rewards)
    assert step.advantages == pytest.approx((rewards - 0.5) / (rewards.std(ddof=1) + 1e-6), abs=1e-5)
    assert not step.poisoned
