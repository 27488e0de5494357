"""The kind `rank` in each framework: a group is one call, and its places become the advantages."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeRollTrainer, JudgeServer, roll_stand_in
from slime_adapter.settings import adapter_of

from ..kit import FRAMEWORKS, play


def tree_of(server: JudgeServer) -> dict:
    return tree_of_address(server.base_url)


def tree_of_address(url: str) -> dict:
    return {
        "sources": {"a": {"kind": "openai", "base_url": url, "model": "judge"}},
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


WORTHS = ("worth 1", "worth 9", "worth 3", "worth 4")


@contextmanager
def roll_one_by_one(*, prompts: int) -> Iterator[tuple[FakeRollTrainer, JudgeServer]]:
    """ROLL, which asks the reward worker about each response of a prompt alone, and a judge of their `WORTHS`."""
    with JudgeServer(lambda call: float(call.blocks["response"].split()[-1])) as server:
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree_of(server)]}
        with FakeRollTrainer(
            {"judged": worker},
            respond=lambda draft, rng: WORTHS[draft.number],
            adv_estimator="grpo",
            rollout_batch_size=prompts,
            num_return_sequences_in_group=len(WORTHS),
            is_num_return_sequences_expand=True,
            user_defined_rollout_loop_cls="roll_adapter.QRewardRolloutLoop",
            timeout_s=30.0,
        ) as trainer:
            yield trainer, server


def test_roll_asks_for_a_group_one_by_one() -> None:
    with roll_stand_in(over_installed=True), roll_one_by_one(prompts=2) as (trainer, server):
        step = trainer.step()
        assert server.report().requests == 2
    assert sorted(step.raw_rewards) == pytest.approx([0, 0, 1 / 3, 1 / 3, 2 / 3, 2 / 3, 1, 1])
    assert step.metrics["judged/qreward/samples_sum"] == pytest.approx(8)
    assert step.metrics["judged/qreward/score/siblings_mean"] == pytest.approx(4)
    assert not step.poisoned


@pytest.mark.parametrize("siblings_wait", [False, True])
def test_a_response_that_roll_abandons_is_not_waited_for(siblings_wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = count(1)
    with roll_stand_in(over_installed=True):
        from roll_adapter import QRewardRolloutLoop

        complete = QRewardRolloutLoop._generate_and_reward

        async def abandon_the_last_of_the_first_prompt(loop: Any, context: Any, req: Any, domain: str) -> Any:
            if next(begun) != len(WORTHS):
                return await complete(loop, context=context, req=req, domain=domain)
            while siblings_wait and len(context._waiting) < len(WORTHS) - 1:  # noqa: ASYNC110 - nothing signals it
                await asyncio.sleep(0)
            return None  # as ROLL's own for a response that is not finished

        monkeypatch.setattr(QRewardRolloutLoop, "_generate_and_reward", abandon_the_last_of_the_first_prompt)
        with roll_one_by_one(prompts=1) as (trainer, _):
            step = trainer.step()
    assert len(step.dropped) == 1
    assert sorted(step.raw_rewards) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert not step.poisoned


def test_roll_refuses_to_compare_in_its_own_loop() -> None:
    with JudgeServer() as server, roll_stand_in(over_installed=True):
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree_of(server)]}
        with (
            pytest.raises(Exception, match=r"siblings cannot be compared\. Set it to roll_adapter.QRewardRolloutLoop"),
            FakeRollTrainer({"judged": worker}, adv_estimator="grpo", timeout_s=30.0) as trainer,
        ):
            trainer.step()


def test_a_group_of_one_is_scored_by_itself_in_roll() -> None:
    with JudgeServer(lambda call: 9.0) as server:
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree_of(server)]}
        with (
            roll_stand_in(over_installed=True),
            FakeRollTrainer(
                {"judged": worker},
                adv_estimator="reinforce",
                rollout_batch_size=2,
                num_return_sequences_in_group=1,
                user_defined_rollout_loop_cls="roll_adapter.QRewardRolloutLoop",
                timeout_s=30.0,
            ) as trainer,
        ):
            step = trainer.step()
        assert server.report().requests == 2
    assert step.raw_rewards == pytest.approx([0.9, 0.9])


def test_slime_needs_a_group_at_once() -> None:
    arguments = SimpleNamespace(qreward=tree_of_address("http://127.0.0.1:1/v1"), group_rm=False)
    with pytest.raises(ConfigurationError, match=r"siblings cannot be compared: slime asks .* Set --group-rm"):
        adapter_of(arguments)
