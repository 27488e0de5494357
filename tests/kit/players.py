"""One step of each framework's fake trainer with our adapter in it: one group, judged by one judge server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qreward_plugins.testing import FakeRollTrainer, FakeSlimeTrainer, FakeVerlTrainer, roll_stand_in, slime_stand_in

PROMPT, ANSWER = "What is 17 plus 25?", "42"

FRAMEWORKS = ("verl", "slime", "roll")


@dataclass(frozen=True)
class Step:
    """What the framework holds of each response, in order: its reward, and its advantage (None: it is not trained)."""

    rewards: list[float]
    advantages: list[float | None]
    metrics: dict[str, Any]
    poisoned: bool = False


def play(framework: str, responses: Sequence[str], tree: dict[str, Any]) -> Step:
    """Train one step on a group of these responses with the configuration `tree`."""
    return _PLAYERS[framework](list(responses), tree)


def _verl(responses: list[str], tree: dict[str, Any]) -> Step:
    overrides: dict[str, Any] = {
        "reward": {"reward_manager": {"name": "qreward"}, "num_workers": 1},
        "algorithm": {"adv_estimator": "grpo"},
        "data": {"train_batch_size": 1},
        "actor_rollout_ref": {"rollout": {"n": len(responses), "agent": {"num_workers": 1}}},
        "qreward": tree,
    }
    row = {"prompt": PROMPT, "ground_truth": ANSWER, "data_source": "test/add"}
    with FakeVerlTrainer(overrides, rows=[row], respond=lambda draft, rng: responses[draft.number]) as trainer:
        step = trainer.step()
    order = sorted(range(len(step.sessions)), key=step.sessions.__getitem__)
    return Step(
        [step.scores[at] for at in order], [step.advantages[at] for at in order], dict(step.metrics), step.poisoned
    )


def _slime(responses: list[str], tree: dict[str, Any]) -> Step:
    import slime_adapter

    try:
        with (
            slime_stand_in(),
            FakeSlimeTrainer(
                prompts=[{"prompt": PROMPT, "label": ANSWER}],
                respond=lambda sample, rng: responses[sample.index or 0],
                qreward=tree,
                rollout_batch_size=1,
                n_samples_per_prompt=len(responses),
                group_rm="rank" in {judge["kind"] for judge in tree.get("judges", {}).values()},
                custom_rm_path="slime_adapter.reward",
                data_source_path="slime_adapter.DataSource",
                custom_reward_post_process_path="slime_adapter.post_process",
                custom_rollout_log_function_path="slime_adapter.log_rollout",
            ) as trainer,
        ):
            step = trainer.rollout()
    finally:
        slime_adapter.close()
    advantages = [
        advantage if any(mask) else None for advantage, mask in zip(step.advantages, step.loss_masks, strict=True)
    ]
    return Step([float(reward) for reward in step.raw_rewards], advantages, dict(step.metrics))


def _roll(responses: list[str], tree: dict[str, Any]) -> Step:
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree]}
    with (
        roll_stand_in(over_installed=True),
        FakeRollTrainer(
            {"judged": worker},
            respond=lambda draft, rng: responses[draft.number],
            adv_estimator="grpo",
            rollout_batch_size=1,
            num_return_sequences_in_group=len(responses),
            user_defined_rollout_loop_cls="roll_adapter.QRewardRolloutLoop",
            timeout_s=30.0,
        ) as trainer,
    ):
        step = trainer.step()
    return Step(step.raw_rewards, step.advantages, dict(step.metrics), step.poisoned)


_PLAYERS = {"verl": _verl, "slime": _slime, "roll": _roll}
