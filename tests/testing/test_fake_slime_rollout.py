"""The rollout of the fake slime trainer: which hooks are called, when, with what, and what a failure does."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from qreward_plugins.testing import DynamicFilterOutput, FakeSlimeTrainer, SlimeSample

Status = SlimeSample.Status


async def parity(args: Any, sample: SlimeSample) -> float:
    return float(sample.index % 2)


def say(text: str) -> Callable[..., str]:
    return lambda sample, rng: text


def indices(groups: list[Any]) -> list[list[int]]:
    return [[sample.index for sample in group] for group in groups]


def group_numbers(groups: list[Any]) -> list[int]:
    return [group[0].group_index for group in groups]


def test_a_batch_has_the_groups_of_the_first_prompts_in_order() -> None:
    prompts = [{"prompt": "a", "label": "1", "metadata": {"k": 1}}, "b", [{"role": "user", "content": "c"}]]
    with FakeSlimeTrainer(
        custom_rm_path=parity, prompts=prompts, rollout_batch_size=3, n_samples_per_prompt=2, respond=say("x y")
    ) as trainer:
        step = trainer.rollout()
        again = trainer.rollout()
    assert indices(step.groups) == [[0, 1], [2, 3], [4, 5]]
    assert [sample.index for sample in step.samples] == [0, 1, 2, 3, 4, 5]
    first = step.samples[0]
    assert (first.prompt, first.label, first.metadata) == ("a", "1", {"k": 1})
    assert step.samples[4].prompt == [{"role": "user", "content": "c"}]
    assert (first.response, first.response_length, first.status) == ("x y", 3, Status.COMPLETED)
    assert len(first.tokens) == 1 + 3
    assert first.session_id != step.samples[1].session_id
    assert step.raw_rewards == [0.0, 1.0] * 3
    assert (step.rollout_id, again.rollout_id) == (0, 1)
    assert indices(again.groups) == [[6, 7], [8, 9], [10, 11]]
    assert first.metadata is not step.samples[1].metadata


def test_the_same_seed_gives_the_same_responses_and_another_seed_others() -> None:
    def responses(seed: int) -> list[str]:
        with FakeSlimeTrainer(custom_rm_path=parity, seed=seed) as trainer:
            return [sample.response for _ in range(2) for sample in trainer.rollout().samples]

    assert responses(3) == responses(3)
    assert responses(3) != responses(4)
    assert len(set(responses(3))) > 8


def test_the_end_of_an_epoch_goes_on_with_the_next() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=parity, prompts=["a", "b", "c"], rollout_batch_size=2, n_samples_per_prompt=1
    ) as trainer:
        seen = [[sample.prompt for sample in trainer.rollout().samples] for _ in range(3)]
    assert seen == [["a", "b"], ["c", "a"], ["b", "c"]]


def test_shuffling_is_by_seed_and_epoch() -> None:
    prompts = [f"p{number}" for number in range(6)]

    def epochs(rollout_seed: int) -> list[list[Any]]:
        flags: dict[str, Any] = {"rollout_batch_size": 6, "n_samples_per_prompt": 1, "rollout_shuffle": True}
        with FakeSlimeTrainer(custom_rm_path=parity, prompts=prompts, rollout_seed=rollout_seed, **flags) as trainer:
            return [[sample.prompt for sample in trainer.rollout().samples] for _ in range(2)]

    first, second = epochs(1)
    assert sorted(first) == sorted(second) == prompts
    assert first != second
    assert epochs(1) == [first, second] != epochs(2)


def test_a_hook_may_be_named_by_its_path_and_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("slime_hooks_of_this_test")
    module.rate = parity  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with FakeSlimeTrainer(custom_rm_path="slime_hooks_of_this_test.rate") as trainer:
        assert trainer.rollout().raw_rewards == [0.0, 1.0] * 8
        module.rate = None  # type: ignore[attr-defined]
        assert trainer.rollout().raw_rewards == [0.0, 1.0] * 8


@pytest.mark.parametrize(
    ("path", "error"),
    [("no_such_module.reward", ModuleNotFoundError), ("json.no_such", AttributeError), ("json:dumps", ValueError)],
)
def test_a_wrong_path_fails_as_in_slime(path: str, error: type[Exception]) -> None:
    with FakeSlimeTrainer(custom_rm_path=path) as trainer, pytest.raises(error):
        trainer.rollout()
    with pytest.raises(error):
        FakeSlimeTrainer(custom_rm_path=parity, custom_reward_post_process_path=path)


def test_without_a_reward_slime_does_not_train() -> None:
    with FakeSlimeTrainer() as trainer, pytest.raises(NotImplementedError, match="custom_rm_path"):
        trainer.rollout()
    with FakeSlimeTrainer(rm_type="math") as trainer, pytest.raises(NotImplementedError, match="'math'"):
        trainer.rollout()


def test_what_a_reward_raises_comes_out_and_the_rest_is_cancelled() -> None:
    cancelled = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        if sample.index == 5:
            raise ConnectionError("the judge is down")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(sample.index)
            raise
        return 0.0

    with FakeSlimeTrainer(custom_rm_path=reward, rollout_batch_size=2) as trainer:
        with pytest.raises(ConnectionError, match="judge is down"):
            trainer.rollout()
        assert sorted(cancelled) == [0, 1, 2, 3, 4, 6, 7]


def test_the_trainer_can_be_used_again_after_an_error() -> None:
    down = [True]

    async def reward(args: Any, sample: SlimeSample) -> float:
        if down[0]:
            raise ConnectionError
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward) as trainer:
        with pytest.raises(ConnectionError):
            trainer.rollout()
        down[0] = False
        assert trainer.rollout().raw_rewards == [1.0] * 16


def test_a_sync_reward_function_is_no_reward_function() -> None:
    with FakeSlimeTrainer(custom_rm_path=lambda args, sample: 1.0) as trainer, pytest.raises(TypeError, match="await"):
        trainer.rollout()


def test_reward_calls_are_not_limited_by_the_concurrency_of_generation() -> None:
    everyone = asyncio.Event()
    waiting = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        waiting.append(sample.index)
        if len(waiting) == 32:
            everyone.set()
        await everyone.wait()
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, rollout_batch_size=8, sglang_server_concurrency=1) as trainer:
        step = trainer.rollout()
    assert (step.reward_calls, step.rewards_pending_max) == (32, 32)


def test_generation_is_limited_by_its_concurrency() -> None:
    running, most = [0], [0]

    async def respond(sample: SlimeSample, rng: Any) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        for _ in range(3):
            await asyncio.sleep(0)
        running[0] -= 1
        return "x"

    with FakeSlimeTrainer(custom_rm_path=parity, respond=respond, sglang_server_concurrency=3) as trainer:
        trainer.rollout()
    assert most == [3]


def test_all_rewards_are_awaited_on_one_background_loop() -> None:
    seen = set()

    async def reward(args: Any, sample: SlimeSample) -> float:
        seen.add((id(asyncio.get_running_loop()), threading.current_thread()))
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, eval_datasets={"e": ["p"]}) as trainer:
        trainer.rollout()
        trainer.evaluate()
        trainer.rollout()
    assert len(seen) == 1
    assert next(iter(seen))[1] is not threading.current_thread()


def test_a_reward_that_never_comes_is_an_error_with_what_is_missing() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        await asyncio.Event().wait()
        return 0.0

    with (
        FakeSlimeTrainer(
            custom_rm_path=reward, hold=lambda sample: sample.index == 0, timeout_s=0.2, rollout_batch_size=1
        ) as trainer,
        pytest.raises(TimeoutError, match="3 reward calls are pending and 1 generations are held"),
    ):
        trainer.rollout()


def test_a_timeout_of_the_reward_itself_stays_its_own() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        raise TimeoutError("mine")

    with FakeSlimeTrainer(custom_rm_path=reward) as trainer, pytest.raises(TimeoutError, match=r"^mine$"):
        trainer.rollout()


def test_the_group_reward_is_called_once_a_group() -> None:
    calls = []

    async def reward(args: Any, samples: list[SlimeSample]) -> list[float]:
        calls.append([sample.index for sample in samples])
        return [float(position) for position in range(len(samples))]

    with FakeSlimeTrainer(custom_rm_path=reward, group_rm=True, rollout_batch_size=2) as trainer:
        step = trainer.rollout()
    assert calls == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert step.raw_rewards == [0.0, 1.0, 2.0, 3.0] * 2
    assert step.reward_calls == 2


def test_a_group_list_that_is_too_short_leaves_none_in_the_tail() -> None:
    async def reward(args: Any, samples: list[SlimeSample]) -> list[float]:
        return [1.0] * (len(samples) - 1)

    seen: list[Any] = []

    def look(rollout_id: int, args: Any, samples: list[SlimeSample], extra: dict[str, Any], took_s: float) -> bool:
        seen.extend(sample.reward for sample in samples)
        return True

    with (
        FakeSlimeTrainer(
            custom_rm_path=reward, group_rm=True, rollout_batch_size=1, custom_rollout_log_function_path=look
        ) as trainer,
        pytest.raises(TypeError, match="not NoneType"),
    ):
        trainer.rollout()
    assert seen == [1.0, 1.0, 1.0, None]


def fan_out(count: int, *, with_id: bool = True) -> Callable[..., Any]:
    async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> list[SlimeSample]:
        parts = []
        for number in range(count):
            part = SlimeSample(group_index=sample.group_index, index=sample.index, prompt=sample.prompt)
            part.rollout_id = sample.index if with_id else None
            part.append_response_tokens(args, tokens=[1] * (number + 1), log_probs=[0.0] * (number + 1), text="x")
            part.status = Status.COMPLETED
            parts.append(part)
        return parts

    return generate


def test_a_generation_that_fans_out_is_rewarded_with_a_list() -> None:
    calls = []

    async def reward(args: Any, samples: list[SlimeSample]) -> list[float]:
        calls.append(len(samples))
        return [1.0] * len(samples)

    with FakeSlimeTrainer(
        custom_rm_path=reward,
        custom_generate_function_path=fan_out(3),
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        eval_datasets={"e": ["p"]},
    ) as trainer:
        step = trainer.rollout()
        assert [[len(parts) for parts in group] for group in step.groups] == [[3, 3], [3, 3]]
        assert len(step.samples) == 12
        assert calls == [3] * 4
        assert step.train_data["rollout_ids"] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
        assert step.rollout_mask_sums == [6] * 12
        assert trainer.evaluate().rewards == {"e": [1.0] * 3}


def test_samples_of_one_generation_must_share_a_rollout_id() -> None:
    async def reward(args: Any, samples: list[SlimeSample]) -> list[float]:
        return [1.0] * len(samples)

    generate = fan_out(2, with_id=False)
    with (
        FakeSlimeTrainer(custom_rm_path=reward, custom_generate_function_path=generate) as trainer,
        pytest.raises(AssertionError, match="rollout_id"),
    ):
        trainer.rollout()


def test_a_custom_generate_may_fill_the_reward_and_ask_for_evaluation() -> None:
    asked = []

    async def generate(args: Any, sample: SlimeSample, sampling_params: Any, evaluation: bool = False) -> SlimeSample:
        asked.append(evaluation)
        made = await trainer.generate(args, sample, sampling_params)
        if sample.index == 0:
            made.reward = 9.0
        return made

    with FakeSlimeTrainer(
        custom_rm_path=parity, custom_generate_function_path=generate, rollout_batch_size=1, eval_datasets={"e": ["p"]}
    ) as trainer:
        step = trainer.rollout()
        trainer.evaluate()
    assert step.raw_rewards == [9.0, 1.0, 0.0, 1.0]
    assert step.reward_calls == 3
    assert asked == [False] * 4 + [True]


def test_the_dynamic_filter_drops_groups_and_others_are_generated() -> None:
    def no_odd_groups(args: Any, group: list[SlimeSample]) -> DynamicFilterOutput:
        assert all(sample.reward is not None for sample in group)
        return DynamicFilterOutput(keep=group[0].group_index % 2 == 0, reason="odd")

    with FakeSlimeTrainer(custom_rm_path=parity, dynamic_sampling_filter_path=no_odd_groups) as trainer:
        step = trainer.rollout()
    assert group_numbers(step.groups) == [0, 2, 4, 6]
    assert [(dropped.group[0].group_index, dropped.reason) for dropped in step.dropped] == [
        (1, "odd"),
        (3, "odd"),
        (5, "odd"),
        (7, "odd"),
    ]
    assert step.metrics["rollout/dynamic_filter/drop_odd"] == 4


def test_a_filter_may_keep_what_it_would_drop_when_there_is_too_little() -> None:
    def none_is_good(args: Any, group: list[SlimeSample]) -> DynamicFilterOutput:
        return DynamicFilterOutput(keep=False, reason="bad", keep_when_insufficient=True)

    with FakeSlimeTrainer(
        custom_rm_path=parity, dynamic_sampling_filter_path=none_is_good, over_sampling_batch_size=6
    ) as trainer:
        step = trainer.rollout()
    assert group_numbers([dropped.group for dropped in step.dropped]) == [0, 1]
    assert group_numbers(step.groups) == [2, 3, 4, 5]


def test_an_answer_that_is_no_filter_output_counts_by_its_truth() -> None:
    class LookAlike:
        keep = False
        reason = "never seen"

    for answer, kept in ((LookAlike(), [0]), (False, [1])):
        answers = iter([answer, True])
        with FakeSlimeTrainer(
            custom_rm_path=parity,
            rollout_batch_size=1,
            dynamic_sampling_filter_path=lambda args, group, answers=answers: next(answers),
        ) as trainer:
            step = trainer.rollout()
        assert group_numbers(step.groups) == kept
        assert not any("dynamic_filter" in name for name in step.metrics)


def test_the_filter_output_of_an_adapter_counts() -> None:
    @dataclass
    class FilterOutput:
        keep: bool
        reason: str | None = None
        keep_when_insufficient: bool = False

    answers = iter([FilterOutput(keep=False, reason="failed"), FilterOutput(keep=True)])
    with FakeSlimeTrainer(
        custom_rm_path=parity, rollout_batch_size=1, dynamic_sampling_filter_path=lambda args, group: next(answers)
    ) as trainer:
        assert [dropped.reason for dropped in trainer.rollout().dropped] == ["failed"]


def test_a_sample_hook_sees_every_response_before_its_reward() -> None:
    def mark(args: Any, sample: SlimeSample, rollout_id: int, evaluation: bool) -> None:
        assert sample.reward is None
        sample.metadata["seen"] = (rollout_id, evaluation)

    async def replace(args: Any, sample: SlimeSample) -> SlimeSample:
        sample.response = sample.response.upper()
        return sample

    with FakeSlimeTrainer(
        custom_rm_path=parity, rollout_sample_hook_path=[mark, replace], respond=say("x"), eval_datasets={"e": ["p"]}
    ) as trainer:
        step = trainer.rollout(7)
        (sample,) = trainer.evaluate(8).samples["e"]
    assert {part.response for part in step.samples} == {"X"}
    assert {part.metadata["seen"] for part in step.samples} == {(7, False)}
    assert sample.metadata["seen"] == (8, True)


def test_a_sample_hook_that_returns_something_else_is_an_error() -> None:
    with (
        FakeSlimeTrainer(
            custom_rm_path=parity, rollout_sample_hook_path=lambda args, sample: 3, rollout_batch_size=1
        ) as trainer,
        pytest.raises(TypeError, match="returned int"),
    ):
        trainer.rollout()


def test_the_hooks_on_the_whole_batch_see_groups() -> None:
    seen: dict[str, Any] = {}

    def narrow(args: Any, groups: list[list[SlimeSample]]) -> None:
        seen["filter"] = indices(groups)
        groups[0][0].remove_sample = True

    def process(args: Any, groups: list[list[SlimeSample]], get_samples: Any) -> None:
        seen["all"] = (group_numbers(groups), get_samples.__name__)

    with FakeSlimeTrainer(
        custom_rm_path=parity,
        rollout_batch_size=2,
        n_samples_per_prompt=2,
        over_sampling_batch_size=3,
        rollout_sample_filter_path=narrow,
        rollout_all_samples_process_path=process,
    ) as trainer:
        step = trainer.rollout()
    assert seen == {"filter": [[0, 1], [2, 3]], "all": ([0, 1, 2], "get_samples")}
    assert [any(mask) for mask in step.loss_masks] == [False, True, True, True]


def test_a_response_longer_than_allowed_is_truncated() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=parity,
        respond=lambda sample, rng: " ".join(["w"] * (1 + sample.index % 4)),
        rollout_max_response_len=3,
        rollout_batch_size=1,
    ) as trainer:
        step = trainer.rollout()
    assert [sample.status for sample in step.samples] == [Status.COMPLETED, Status.COMPLETED] + [Status.TRUNCATED] * 2
    assert [sample.response_length for sample in step.samples] == [2, 3, 3, 3]
    assert step.samples[3].response == "w w w"
    assert step.train_data["truncated"] == [0, 0, 1, 1]
    assert step.metrics["rollout/truncated_ratio"] == 0.5


def test_a_custom_rollout_function_may_wrap_that_of_slime_or_return_plain_lists() -> None:
    def wrapped(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        output = args.qreward_generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
        output.metrics["rollout/mine"] = rollout_id
        return output

    def plain(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
        groups = data_source.get_samples(2)
        for group in groups:
            for sample in group:
                sample.reward = 1.0
                sample.status = Status.COMPLETED
                sample.append_response_tokens(args, tokens=[1], log_probs=[0.0], text="x")
        return groups

    with FakeSlimeTrainer(custom_rm_path=parity, rollout_function_path=wrapped) as trainer:
        assert trainer.rollout(5).metrics["rollout/mine"] == 5
    with FakeSlimeTrainer(rollout_function_path=plain) as trainer:
        assert trainer.rollout().raw_rewards == [1.0] * 8


def test_an_error_of_many_groups_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(args: Any, sample: SlimeSample) -> float:
        raise ValueError("no key")

    prompts = ["a", "b", "c", "d"]
    with FakeSlimeTrainer(custom_rm_path=broken, prompts=prompts, rollout_batch_size=4) as trainer:
        with pytest.raises(ValueError, match="no key"):
            trainer.rollout()
        gc.collect()
    assert "never retrieved" not in caplog.text
