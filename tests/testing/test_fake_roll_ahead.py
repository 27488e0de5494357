"""The fake ROLL trainer where prompts are sampled ahead of training, or beyond the batch: who waits, who is cut off."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)

from qreward_plugins.testing import FakeRollTrainer, RollDataProto  # noqa: E402
from qreward_plugins.testing.roll.rollout_loop import UserDefinedRolloutLoop  # noqa: E402
from qreward_plugins.testing.roll.workers import Worker  # noqa: E402


class Ones(Worker):
    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self.seen: list[Any] = []

    async def compute_rewards(self, data: Any) -> Any:
        self.seen.append(data)
        ones = torch.ones(len(data))
        tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
        return RollDataProto.from_dict(
            {"token_level_rewards": tokens, "response_level_rewards": ones, "scores": ones.clone()}
        )

    def load_states(self) -> None:
        self.seen.append("load")

    def offload_states(self) -> None:
        self.seen.append("offload")


def train(worker: type = Ones, **flags: Any) -> FakeRollTrainer:
    defaults: dict[str, Any] = {
        "rollout_batch_size": 2,
        "num_return_sequences_in_group": 2,
        "respond": lambda draft, rng: f"a b {draft.prompt_id} {draft.number}",
    }
    return FakeRollTrainer({"d": {"worker_cls": worker}}, **{**defaults, **flags})


def test_sampling_ahead_makes_the_next_batch_while_this_one_trains() -> None:
    with train(async_generation_ratio=1) as trainer:
        assert trainer.pipeline_config.is_num_return_sequences_expand is True
        steps = [trainer.step() for _ in range(4)]
        seen = trainer.workers("d")[0].seen
    # Twice the prompts in the first step, as many as a batch has in every other.
    assert [step.reward_calls for step in steps] == [8, 4, 4, 4]
    prompts = [[response.split()[2] for response in step.responses] for step in steps]
    assert prompts == [["0", "0", "1", "1"], ["2", "2", "3", "3"], ["4", "4", "5", "5"], ["6", "6", "7", "7"]]
    assert [step.metrics["d/scheduler/off_policy_ratio"] for step in steps] == [0.0, 1.0, 1.0, 1.0]
    assert [step.aborted for step in steps] == [[]] * 4
    assert seen[0] == "load"
    assert seen.count("load") == 1
    assert "offload" not in seen
    assert seen[1].meta_info["collect_unfinished"] is True
    assert seen[1].meta_info["generation_config"]["logprobs"] == 1


def test_a_held_generation_is_aborted_between_steps_and_goes_on_from_there() -> None:
    def hold(draft: Any) -> bool:
        return draft.prompt_id == 2 and draft.number == 0

    with train(async_generation_ratio=1, hold=hold) as trainer:
        first = trainer.step()
        trainer.wait_until_held(1)
        second = trainer.step()
        told = [data for data in trainer.workers("d")[0].seen if data != "load"]
    assert [response.split()[2] for response in first.responses] == ["0", "0", "1", "1"]
    assert second.aborted == []
    assert sorted(second.responses) == ["a b 2 0", "a b 2 1", "a b 3 0", "a b 3 1"]
    resumed = [data for data in told if "pre_output_logprobs" in data.meta_info]
    assert len(resumed) == 1
    assert resumed[0].batch["responses"].shape == (1, 64)
    assert second.trained_tokens == [5] * 4


def test_without_a_try_to_go_on_the_prompt_is_replaced() -> None:
    class GiveUp(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: Any) -> Any:
            context.meta_info["collect_unfinished"] = False
            return await super().process_new_prompt(context)

    with train(
        async_generation_ratio=1, hold=lambda draft: draft.prompt_id == 2, user_defined_rollout_loop_cls=GiveUp
    ) as trainer:
        trainer.step()
        trainer.wait_until_held(2)
        second = trainer.step()
    assert [(prompt.prompt_id, prompt.domain) for prompt in second.dropped] == [(2, "d")]
    assert sorted({response.split()[2] for response in second.responses}) == ["3", "4"]


def test_rewards_go_on_while_the_model_is_updated_and_too_old_ones_are_aborted() -> None:
    ended: list[str] = []

    class Slow(Ones):
        async def compute_rewards(self, data: Any) -> Any:
            if data.meta_info["request_id"].startswith("d_1_"):
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.append("cancelled")
            return await super().compute_rewards(data)

    with train(
        Slow, async_generation_ratio=1, is_use_additional_prompts=True, max_additional_running_prompts=6
    ) as trainer:
        steps = [trainer.step() for _ in range(3)]
        # The prompts of a step wait until they are a step too old. A call of a worker is never taken back: the
        # scheduler only stops waiting for it.
        assert [[prompt.prompt_id for prompt in step.aborted] for step in steps] == [[], [], [1]]
        assert ended == []
    assert ended == ["cancelled", "cancelled"]
    assert all(" 1 " not in response for step in steps for response in step.responses)


def test_additional_prompts_take_the_place_of_slow_ones() -> None:
    with train(
        is_use_additional_prompts=True, max_additional_running_prompts=4, hold=lambda draft: draft.prompt_id == 0
    ) as trainer:
        step = trainer.step()
    assert len(step.responses) == 4
    assert all(" 0 " not in response for response in step.responses)
    assert 0 in [prompt.prompt_id for prompt in step.aborted]


def test_with_additional_prompts_a_group_may_have_any_size() -> None:
    class Three(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: Any) -> Any:
            responses = await super().process_new_prompt(context)
            return [*responses, [responses[0]]]

    with train(is_use_additional_prompts=True, user_defined_rollout_loop_cls=Three) as trainer:
        step = trainer.step()
    assert len(step.responses) == 4
    with (
        train(user_defined_rollout_loop_cls=Three) as trainer,
        pytest.raises(AssertionError, match="3 responses, not 2"),
    ):
        trainer.step()


def test_a_loop_can_abort_its_own_requests() -> None:
    class Impatient(UserDefinedRolloutLoop):
        async def _generate_and_reward(self, context: Any, req: Any, domain: str) -> Any:
            stopping = asyncio.ensure_future(self._stop(context))
            try:
                return await super()._generate_and_reward(context=context, req=req, domain=domain)
            finally:
                await stopping

        async def _stop(self, context: Any) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            await context.abort_running_requests()

    with train(user_defined_rollout_loop_cls=Impatient, hold=lambda draft: draft.prompt_id == 0) as trainer:
        step = trainer.step()
    assert [prompt.prompt_id for prompt in step.dropped] == [0]
