"""The kind `rank` in each framework: a group is one call, and its places become the advantages."""

from __future__ import annotations

import numpy as np
import pytest

from qreward_plugins.testing import JudgeServer

from ..kit import FRAMEWORKS, play


def tree_of(server: JudgeServer) -> dict:
    return {
        "sources": {"a": {"kind": "openai", "base_url": server.base_url, "model": "judge"}},
        "judges": {"quality": {"kind": "llm"}, "reward": {"kind": "rank", "judge": "quality"}},
        "routes": {"*": "reward"},
        "engine": {"seed": 1, "deadline_s": 30},
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_places_in_a_group_become_advantages(framework: str) -> None:
    with JudgeServer(lambda call: float(call.blocks["response"].split()[-1])) as server:
        step = play(framework, ["worth 1", "worth 9", "worth 3", "worth 3"], tree_of(server))
        assert server.report().requests == 1
    rewards = np.array([0.0, 1.0, 0.5, 0.5])
    assert step.rewards == pytest.approx(rewards)
    assert step.advantages == pytest.approx((rewards - 0.5) / (rewards.std(ddof=1) + 1e-6), abs=1e-5)
    assert not step.poisoned
