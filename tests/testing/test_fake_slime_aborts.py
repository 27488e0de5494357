"""When the batch is full: what is held, aborted, awaited, put back and lost. All by events."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from qreward_plugins.testing import DynamicFilterOutput, FakeSlimeTrainer, SlimeSample

Status = SlimeSample.Status


async def one(args: Any, sample: SlimeSample) -> float:
    return 1.0


def slow(sample: SlimeSample) -> bool:
    """The groups beyond the first batch of four, the first time."""
    return sample.group_index in (4, 5) and sample.status is Status.PENDING


def respond(sample: SlimeSample, rng: Any) -> str:
    return "a b c d"


def numbers(groups: list[Any]) -> list[int]:
    return [group[0].group_index for group in groups]


def test_held_generations_are_aborted_when_the_batch_is_full_and_not_rewarded() -> None:
    with FakeSlimeTrainer(custom_rm_path=one, over_sampling_batch_size=6, hold=slow, respond=respond) as trainer:
        step = trainer.rollout()
        assert trainer.data_source.buffer == []
        assert numbers(trainer.rollout().groups) == [6, 7, 8, 9]
    assert numbers(step.groups) == [0, 1, 2, 3]
    assert numbers(step.aborted) == [4, 5]
    assert step.reward_calls == 16
    partial = step.aborted[0][0]
    assert (partial.status, partial.response, partial.response_length, partial.reward) == (
        Status.ABORTED,
        "a b",
        2,
        None,
    )


def test_groups_that_end_together_beyond_the_batch_are_surplus() -> None:
    with FakeSlimeTrainer(custom_rm_path=one, over_sampling_batch_size=6, partial_rollout=True) as trainer:
        step = trainer.rollout()
        assert (numbers(step.surplus), step.aborted, trainer.data_source.buffer) == ([4, 5], [], [])


def test_slime_waits_for_pending_rewards_and_hooks_can_see_the_abort() -> None:
    saw = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        if sample.group_index >= 4:
            assert not args.qreward_aborted()
            await trainer.until_aborted()
            saw.append((sample.index, args.qreward_aborted()))
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, over_sampling_batch_size=5) as trainer:
        step = trainer.rollout()
        assert saw == [(16, True), (17, True), (18, True), (19, True)]
        assert not trainer.args.qreward_aborted()
    assert numbers(step.aborted) == [4]
    assert [sample.reward for sample in step.aborted[0]] == [1.0] * 4


@pytest.mark.parametrize("partial", [False, True])
def test_an_error_after_the_batch_is_full_is_lost_unless_groups_are_collected(partial: bool) -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        if sample.index == 17:
            await trainer.until_aborted()
            raise ConnectionError("late")
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, over_sampling_batch_size=5, partial_rollout=partial) as trainer:
        if partial:
            with pytest.raises(ConnectionError, match="late"):
                trainer.rollout()
        else:
            step = trainer.rollout()
            assert [str(error) for error in step.lost_errors] == ["late"]
            assert step.aborted == []


def test_partial_rollout_puts_groups_back_and_goes_on_with_them() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=one, over_sampling_batch_size=6, partial_rollout=True, hold=slow, respond=respond
    ) as trainer:
        first = trainer.rollout()
        assert numbers(trainer.data_source.buffer) == [4, 5] == numbers(first.aborted)
        assert first.aborted[0][0].metadata == {"start_rollout_id": 0}
        second = trainer.rollout()
    assert numbers(second.groups)[:2] == [4, 5]
    finished = second.samples[0]
    assert (finished.response, finished.status) == ("a b a b c d", Status.COMPLETED)
    assert (finished.response_length, finished.loss_mask) == (7, [1] * 7)
    assert finished.metadata == {"start_rollout_id": 0}


def test_off_policy_tokens_can_be_masked() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=one,
        over_sampling_batch_size=5,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
        hold=slow,
        respond=respond,
    ) as trainer:
        trainer.rollout()
        step = trainer.rollout()
    assert step.loss_masks[0] == [0, 0, 1, 1, 1, 1, 1]
    assert step.rollout_mask_sums[0] == 5


def test_a_group_whose_reward_was_pending_is_put_back_finished_and_not_rewarded_twice() -> None:
    calls: list[int] = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        calls.append(sample.index)
        if sample.group_index == 4:
            await trainer.until_aborted()
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, over_sampling_batch_size=5, partial_rollout=True) as trainer:
        trainer.rollout()
        assert numbers(trainer.rollout().groups)[0] == 4
    assert [calls.count(index) for index in (16, 17, 18, 19)] == [1] * 4


def test_a_finished_sample_without_a_reward_stops_the_next_rollout() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float | None:
        if sample.group_index == 4:
            await trainer.until_aborted()
            return None
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, over_sampling_batch_size=5, partial_rollout=True) as trainer:
        trainer.rollout()
        with pytest.raises(AssertionError, match="has no reward"):
            trainer.rollout()


def test_with_group_rm_an_aborted_group_is_rewarded_when_it_is_whole() -> None:
    calls: list[list[int]] = []

    async def reward(args: Any, samples: list[SlimeSample]) -> list[float]:
        calls.append([sample.index for sample in samples])
        return [1.0] * len(samples)

    def hold(sample: SlimeSample) -> bool:
        return sample.index == 17 and sample.status is Status.PENDING

    with FakeSlimeTrainer(
        custom_rm_path=reward, group_rm=True, over_sampling_batch_size=5, partial_rollout=True, hold=hold
    ) as trainer:
        first = trainer.rollout()
        assert [sample.status for sample in first.aborted[0]][:3] == [
            Status.COMPLETED,
            Status.ABORTED,
            Status.COMPLETED,
        ]
        assert [16, 17, 18, 19] not in calls
        second = trainer.rollout()
    assert calls.count([16, 17, 18, 19]) == 1
    assert [sample.reward for sample in second.groups[0]] == [1.0] * 4


def test_a_generation_aborted_by_the_engine_is_trained_without_a_reward() -> None:
    with (
        FakeSlimeTrainer(
            custom_rm_path=one, respond=lambda sample, rng: None if sample.index == 2 else "x", rollout_batch_size=1
        ) as trainer,
        pytest.raises(TypeError, match="NoneType"),
    ):
        trainer.rollout()


def test_releasing_orders_what_ends_first() -> None:
    order: list[int] = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        order.append(sample.group_index)
        if sample.group_index > 2:
            trainer.release(lambda other: other.group_index == sample.group_index - 1)
        return 1.0

    with FakeSlimeTrainer(
        custom_rm_path=reward, n_samples_per_prompt=1, over_sampling_batch_size=6, hold=lambda s: s.group_index < 5
    ) as trainer:
        step = trainer.rollout()
    assert order == [5, 4, 3, 2]
    assert numbers(step.groups) == [2, 3, 4, 5]
    assert numbers(step.aborted) == [0, 1]


def test_a_test_may_act_while_the_rollout_runs() -> None:
    with FakeSlimeTrainer(custom_rm_path=one, rollout_batch_size=2, hold=lambda sample: True) as trainer:
        running = trainer.start_rollout()
        trainer.wait_until_held(8)
        assert not running.done()
        with pytest.raises(TimeoutError, match="8 generations were held"):
            trainer.wait_until_held(9, timeout_s=0.01)
        assert trainer.release(lambda sample: sample.index < 3) == 3
        trainer.wait_until_held(5)
        assert trainer.release() == 5
        assert running.result(20).raw_rewards == [1.0] * 8


def test_an_async_response_is_cut_off_by_the_abort() -> None:
    ended = []

    async def write(sample: SlimeSample, rng: Any) -> str:
        if sample.group_index >= 4:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                ended.append(sample.index)
                raise
        return "x"

    with FakeSlimeTrainer(custom_rm_path=one, respond=write, over_sampling_batch_size=5) as trainer:
        step = trainer.rollout()
    assert ended == [16, 17, 18, 19]
    assert [sample.status for sample in step.aborted[0]] == [Status.ABORTED] * 4


def test_an_error_of_an_async_response_comes_out() -> None:
    async def write(sample: SlimeSample, rng: Any) -> str:
        raise OSError("engine")

    with FakeSlimeTrainer(custom_rm_path=one, respond=write) as trainer, pytest.raises(OSError, match="engine"):
        trainer.rollout()


def test_generations_still_queued_at_the_abort_are_not_made() -> None:
    written = []

    def write(sample: SlimeSample, rng: Any) -> str:
        written.append(sample.index)
        return "x"

    with FakeSlimeTrainer(
        custom_rm_path=one,
        respond=write,
        n_samples_per_prompt=1,
        rollout_batch_size=1,
        over_sampling_batch_size=3,
        sglang_server_concurrency=2,
        hold=lambda sample: sample.index == 1,
        dynamic_sampling_filter_path=lambda args, group: DynamicFilterOutput(keep=group[0].index != 2),
    ) as trainer:
        step = trainer.rollout()
    assert written[:2] == [0, 1]
    assert numbers(step.groups) == [0]
    assert step.aborted[0][0].status is Status.ABORTED


def test_a_buffer_filter_chooses_what_goes_on() -> None:
    def last_first(args: Any, rollout_id: Any, buffer: list[Any], count: int) -> list[Any]:
        return [buffer.pop() for _ in range(min(count, len(buffer)))]

    with FakeSlimeTrainer(
        custom_rm_path=one,
        over_sampling_batch_size=6,
        rollout_batch_size=4,
        partial_rollout=True,
        hold=slow,
        buffer_filter_path=last_first,
    ) as trainer:
        trainer.rollout()
        groups = trainer.data_source.get_samples(3)
    assert numbers(groups) == [5, 4, 6]


def test_only_whole_groups_can_be_put_back() -> None:
    with FakeSlimeTrainer(custom_rm_path=one) as trainer:
        trainer.data_source.add_samples([])
        with pytest.raises(AssertionError, match="n_samples_per_prompt = 4 samples, not 1"):
            trainer.data_source.add_samples([[SlimeSample()]])
        assert trainer.data_source.get_buffer_length() == 0
        assert len(trainer.data_source) == 16
