"""What training gets from scored samples: normalised rewards, masks, advantages, and the numbers in the log."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.testing import FakeSlimeTrainer, SlimeSample, SlimeStep
from qreward_plugins.testing.slime.floats import round32, sum32
from qreward_plugins.testing.slime.metrics import pass_rates


def rewards_in_turn(*rewards: Any) -> Callable[..., Any]:
    async def reward(args: Any, sample: SlimeSample) -> Any:
        return rewards[sample.index % len(rewards)]

    return reward


def step_with(*rewards: Any, **flags: Any) -> SlimeStep:
    sizes = {"rollout_batch_size": 2, "n_samples_per_prompt": 3, "respond": lambda sample, rng: "x y"}
    with FakeSlimeTrainer(custom_rm_path=rewards_in_turn(*rewards), **{**sizes, **flags}) as trainer:
        return trainer.rollout()


REWARDS = (0.0, 1.0, 5.0, 2.0, 2.0, 2.0)


@pytest.mark.parametrize("estimator", ["grpo", "gspo", "cispo"])
def test_group_estimators_divide_by_the_deviation_of_the_group(estimator: str) -> None:
    step = step_with(*REWARDS, advantage_estimator=estimator)
    deviation = math.sqrt((4 + 1 + 9) / 2) + 1e-6
    assert step.rewards == pytest.approx([-2 / deviation, -1 / deviation, 3 / deviation, 0, 0, 0])
    assert step.raw_rewards == list(REWARDS)
    assert step.advantages == pytest.approx(step.rewards)
    assert step.token_advantages[2] == [step.rewards[2]] * 3


def test_without_division_the_mean_is_taken_off() -> None:
    expected = [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]
    assert step_with(*REWARDS, grpo_std_normalization=False).rewards == expected
    step = step_with(*REWARDS, advantage_estimator="reinforce_plus_plus_baseline", normalize_advantages=True)
    assert step.rewards == expected


@pytest.mark.parametrize(
    "flags",
    [
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
        {"advantage_estimator": "grpo", "rewards_normalization": False},
    ],
)
def test_other_estimators_take_the_rewards_as_they_are(flags: dict[str, Any]) -> None:
    assert step_with(*REWARDS, **flags).rewards == list(REWARDS)


def test_equal_rewards_that_are_no_floats_leave_the_rounding_that_slime_divides_by() -> None:
    """The mean of seven 0.7 is one unit in the last place below 0.7, and slime divides that 2**-24 by about 1e-6."""
    step = step_with(0.7, n_samples_per_prompt=7, rollout_batch_size=1)
    assert step.rewards == [0.059604644775390625] * 7
    assert step_with(0.5, n_samples_per_prompt=7, rollout_batch_size=1).rewards == [0.0] * 7


def test_sums_are_rounded_in_torchs_order() -> None:
    big = 2.0**24  # from here on 32 bits cannot hold odd numbers
    assert sum32([big, 1.0, 1.0]) == big
    assert sum32([1.0, 1.0, big]) == big + 2
    assert sum32([big, 0, 0, 0, 1.0, 1.0, 0, 0, -big]) == 2.0  # from left to right it would be 0
    assert round32(0.1) == 0.10000000149011612


def test_with_another_count_the_whole_batch_is_one_group() -> None:
    def cut(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
        output = args.qreward_generate_rollout(args, rollout_id, data_source, evaluation)
        output.samples[-1].pop()
        return output

    step = step_with(0.0, 1.0, 5.0, 2.0, 2.0, 2.0, grpo_std_normalization=False, rollout_function_path=cut)
    assert step.rewards == [-2.0, -1.0, 3.0, 0.0, 0.0]
    assert step_with(0, 0, 3, 6, 6, grpo_std_normalization=False, rollout_function_path=cut).rewards == [
        -3.0,
        -3.0,
        0.0,
        3.0,
        3.0,
    ]


def test_one_sample_a_prompt_is_normalised_to_nothing() -> None:
    assert step_with(1.0, 2.0, n_samples_per_prompt=1).rewards == [0.0, 0.0]


def test_none_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="must be real number, not NoneType"):
        step_with(1.0, None, 1.0)
    with pytest.raises(TypeError, match="NoneType"):  # a whole group of them fails in the metrics
        step_with(None)


def test_nan_poisons_its_group_and_removing_it_does_not_help() -> None:
    def remove(args: Any, groups: list[list[SlimeSample]]) -> None:
        for group in groups:
            for sample in group:
                sample.remove_sample = sample.reward != sample.reward

    step = step_with(0.0, math.nan, 1.0, 0.0, 1.0, 2.0, rollout_sample_filter_path=remove)
    assert [math.isnan(reward) for reward in step.rewards] == [True, True, True, False, False, False]
    assert step.loss_masks[1] == [0, 0, 0]
    assert step.advantages[1] is None
    assert math.isnan(step.advantages[0] or 0.0)


def test_a_removed_sample_has_no_loss_but_stays_in_the_mean_of_its_group() -> None:
    def remove(args: Any, groups: list[list[SlimeSample]]) -> None:
        groups[0][2].remove_sample = True

    step = step_with(*REWARDS, rollout_sample_filter_path=remove, grpo_std_normalization=False)
    assert step.rewards == [-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]
    assert step.loss_masks[2] == [0, 0, 0]
    assert step.rollout_mask_sums == [3, 3, 0, 3, 3, 3]
    assert step.advantages == [-2.0, -1.0, None, 0.0, 0.0, 0.0]


def test_a_mask_of_another_length_is_refused() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        sample.loss_mask = [1]
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward) as trainer, pytest.raises(AssertionError, match="length 1 !="):
        trainer.rollout()


def test_a_dict_needs_the_reward_key() -> None:
    reward = {"score": 1.0, "style": 2.0}
    step = step_with(reward, {"score": 3.0, "style": 0.0}, reward_key="score", n_samples_per_prompt=2)
    assert step.raw_rewards == [1.0, 3.0] * 2
    with pytest.raises(TypeError, match="not dict"):
        step_with(reward, {"score": 3.0})
    with pytest.raises(KeyError, match="scoer"):
        step_with(reward, reward_key="scoer")
    with pytest.raises(TypeError):
        step_with(1.0, reward_key="score")


def test_a_post_process_hook_replaces_that_of_slime() -> None:
    seen = []

    def post_process(args: Any, samples: list[SlimeSample]) -> tuple[list[float], list[float]]:
        seen.append([sample.index for sample in samples])
        return [10.0] * len(samples), [float(sample.index) for sample in samples]

    step = step_with(*REWARDS, custom_reward_post_process_path=post_process)
    assert seen == [[0, 1, 2, 3, 4, 5]]
    assert (step.raw_rewards, step.rewards) == ([10.0] * 6, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    with pytest.raises(AssertionError, match="1 rewards for 6 samples"):
        step_with(*REWARDS, custom_reward_post_process_path=lambda args, samples: ([1.0] * 6, [1.0]))


def test_one_raw_reward_in_the_metadata_changes_what_is_logged_for_all() -> None:
    async def reward(args: Any, sample: SlimeSample) -> dict[str, float]:
        if sample.index == 1:
            sample.metadata["raw_reward"] = 0.25
        return {"score": 1.0}

    with FakeSlimeTrainer(
        custom_rm_path=reward, reward_key="score", rollout_batch_size=1, n_samples_per_prompt=2
    ) as trainer:
        assert trainer.rollout().raw_rewards == [{"score": 1.0}, 0.25]


def test_the_batch_for_the_trainer_has_what_samples_carry() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        sample.metadata |= {"round_number": sample.index, "source_name": "math"}
        sample.train_metadata = {"loss": sample.index}
        sample.teacher_log_probs = [0.5] * sample.response_length
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, rollout_batch_size=1, n_samples_per_prompt=2) as trainer:
        data = trainer.rollout().train_data
    assert data["round_number"] == data["sample_indices"] == data["rollout_ids"] == [0, 1]
    assert data["source_names"] == ["math"] * 2
    assert data["metadata"] == [{"loss": 0}, {"loss": 1}]
    assert [len(row) for row in data["teacher_log_probs"]] == data["response_lengths"]
    assert [len(row) for row in data["rollout_log_probs"]] == data["response_lengths"]


def test_a_custom_conversion_replaces_all_of_it() -> None:
    step = step_with(*REWARDS, custom_convert_samples_to_train_data_path=lambda args, samples: {"mine": len(samples)})
    assert (step.train_data, step.advantages, step.token_advantages) == ({"mine": 6}, [], [])


def test_ppo_gives_the_reward_to_the_last_token() -> None:
    step = step_with(*REWARDS, advantage_estimator="ppo", gamma=0.5, lambd=0.5)
    assert step.token_advantages[2] == [5 / 16, 5 / 4, 5.0]
    with pytest.raises(IndexError, match="empty response"):
        step_with(
            *REWARDS,
            advantage_estimator="ppo",
            custom_generate_function_path=_nothing,
        )


async def _nothing(args: Any, sample: SlimeSample, sampling_params: Any) -> SlimeSample:
    sample.status = SlimeSample.Status.COMPLETED
    return sample


def test_reinforce_plus_plus_discounts_and_whitens() -> None:
    step = step_with(0.0, 1.0, 5.0, advantage_estimator="reinforce_plus_plus", normalize_advantages=True, gamma=0.5)
    tokens = [reward * discount for reward in (0, 1, 5) for discount in (0.25, 0.5, 1.0)] * 2
    mean = sum(tokens) / 18
    deviation = math.sqrt(sum((token - mean) ** 2 for token in tokens) / 17)
    flat = [value for row in step.token_advantages for value in row]
    assert flat == pytest.approx([(token - mean) / deviation for token in tokens], abs=1e-5)


def test_reinforce_plus_plus_cannot_train_a_removed_sample() -> None:
    def remove(args: Any, groups: list[list[SlimeSample]]) -> None:
        groups[0][1].remove_sample = True

    flags = {"rollout_sample_filter_path": remove, "normalize_advantages": True}
    with pytest.raises(AssertionError, match="index 1 is fully masked"):
        step_with(*REWARDS, advantage_estimator="reinforce_plus_plus", **flags)
    assert step_with(*REWARDS, advantage_estimator="reinforce_plus_plus_baseline", **flags).advantages[1] is None


def test_nothing_to_whiten_is_an_error() -> None:
    def remove(args: Any, groups: list[list[SlimeSample]]) -> None:
        for group in groups:
            for sample in group:
                sample.remove_sample = True

    with pytest.raises(ValueError, match="no token"):
        step_with(*REWARDS, normalize_advantages=True, rollout_sample_filter_path=remove)
    assert step_with(*REWARDS, rollout_sample_filter_path=remove).advantages == [None] * 6


def test_nan_spoils_a_whitened_batch_even_where_it_is_not_trained() -> None:
    def remove(args: Any, groups: list[list[SlimeSample]]) -> None:
        groups[0][0].remove_sample = True

    step = step_with(
        math.nan, 1.0, 2.0, advantage_estimator="ppo", normalize_advantages=True, rollout_sample_filter_path=remove
    )
    assert all(math.isnan(value or 0.0) for value in step.advantages[1:])


def test_the_log_has_what_slime_logs() -> None:
    step = step_with(1.0, 1.0, 1.0, 0.0, 1.0, 0.0, rollout_num_gpus=2)
    metrics = step.metrics
    assert metrics["rollout/zero_std/count_1.0"] == 1
    assert {
        name: metrics[f"rollout/response_len/{name}"] for name in ("mean", "median", "max", "min")
    } == dict.fromkeys(("mean", "median", "max", "min"), 3)
    assert metrics["rollout/step"] == 0
    assert metrics["rollout/truncated_ratio"] == metrics["rollout/repetition_frac"] == 0.0
    assert metrics["perf/rollout_time"] > 0
    assert metrics["perf/tokens_per_gpu_per_sec"] == pytest.approx(9 / metrics["perf/rollout_time"])
    assert "perf/non_generation_time/mean" not in metrics
    assert not any("zero_std" in name for name in step_with(1.0, advantage_estimator="ppo").metrics)


def test_waiting_for_rewards_is_in_the_log() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        sample.non_generation_time += sample.index
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, rollout_batch_size=1, respond=lambda sample, rng: "x") as trainer:
        metrics = trainer.rollout().metrics
    assert metrics["perf/non_generation_time/max"] == 3.0
    assert metrics["perf/longest_sample_non_generation_time"] == 1.5


def test_categories_and_repetition_are_counted() -> None:
    async def reward(args: Any, sample: SlimeSample) -> dict[str, Any]:
        return {"score": 1.0, "kind": "format" if sample.index == 0 else "right"}

    with FakeSlimeTrainer(
        custom_rm_path=reward,
        reward_key="score",
        log_reward_category="kind",
        rollout_batch_size=1,
        respond=lambda sample, rng: "again " * (2000 if sample.index == 0 else 1),
    ) as trainer:
        metrics = trainer.rollout().metrics
    assert (metrics["rollout/error_cat/format"], metrics["rollout/error_cat/right"]) == (0.25, 0.75)
    assert metrics["rollout/repetition_frac"] == 0.25


def test_the_log_hook_adds_numbers_or_takes_over() -> None:
    calls = []

    def log(rollout_id: int, args: Any, samples: list[Any], extra_metrics: dict[str, Any], rollout_time: float) -> bool:
        calls.append((rollout_id, len(samples), all(sample.loss_mask is not None for sample in samples)))
        extra_metrics["rollout/qreward/failed"] = 0
        args.qreward_log(args, {"rollout/direct": 1}, step_key="rollout/step")
        return rollout_id == 1

    with FakeSlimeTrainer(custom_rm_path=rewards_in_turn(1.0), custom_rollout_log_function_path=log) as trainer:
        first, second = trainer.rollout(), trainer.rollout()
    assert first.metrics["rollout/qreward/failed"] == 0
    assert first.metrics["rollout/step"] == 0
    assert second.metrics == {"rollout/direct": 1}
    assert [call[:2] for call in calls] == [(0, 16), (1, 16)]


def test_the_step_in_the_log_can_be_that_of_training() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=rewards_in_turn(1.0), num_steps_per_rollout=4, wandb_always_use_train_step=True
    ) as trainer:
        assert trainer.rollout(3).metrics["rollout/step"] == 12


def test_pass_rates() -> None:
    assert pass_rates([1, 0, 0, 0, 1, 1, 0, 0], 4) == pytest.approx(
        {"pass@1": 0.375, "pass@2": (0.5 + 5 / 6) / 2, "pass@4": 1.0}
    )
    assert pass_rates([1, 0], 1) == {}
    with pytest.raises(AssertionError, match="no whole groups"):
        pass_rates([1, 0, 1], 2)
