"""The kind `rank` in each framework: a group is one call, and its places become the advantages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import pytest

from qreward_plugins.testing import FakeRollTrainer, JudgeServer, roll_stand_in

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


WORTHS = ("worth 1", "worth 9", "worth 3", "worth 4")


@contextmanager
def roll(**flags: Any) -> Iterator[FakeRollTrainer]:
    """ROLL with one prompt a step, and a judge of the `WORTHS` of its responses."""
    with JudgeServer(by_word) as server:
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree_of(server)]}
        defaults = {
            "respond": lambda draft, rng: WORTHS[draft.number],
            "adv_estimator": "grpo",
            "rollout_batch_size": 1,
            "user_defined_rollout_loop_cls": "roll_adapter.QRewardRolloutLoop",
            "timeout_s": 30.0,
        }
        with FakeRollTrainer({"judged": worker}, **{**defaults, **flags}) as trainer:
            yield trainer


def test_a_response_that_roll_abandons_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = count(1)
    with roll_stand_in(over_installed=True):
        from roll_adapter import QRewardRolloutLoop

        complete = QRewardRolloutLoop._generate_and_reward

        async def abandon_the_last_of_the_first_prompt(*args: Any, **request: Any) -> Any:
            return await complete(*args, **request) if next(begun) != len(WORTHS) else None

        monkeypatch.setattr(QRewardRolloutLoop, "_generate_and_reward", abandon_the_last_of_the_first_prompt)
        with roll(is_num_return_sequences_expand=True) as trainer:
            step = trainer.step()
    assert len(step.dropped) == 1
    assert sorted(step.raw_rewards) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert step.metrics["judged/qreward/samples_sum"] == pytest.approx(4)
    assert step.metrics["judged/qreward/score/siblings_mean"] == pytest.approx(4)
    assert not step.poisoned
