"""The rollout of the fake ROLL trainer: who is called, when, with what, and what a failure does."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qreward_plugins.testing import FakeRollTrainer, RollDataProto
from qreward_plugins.testing.roll.protocol import torch
from qreward_plugins.testing.roll.rollout_loop import UserDefinedRolloutLoop
from qreward_plugins.testing.roll.workers import Dispatch, Worker, register


def rewards_of(data: Any, numbers: list[float], **more: Any) -> RollDataProto:
    told = torch.tensor(numbers, dtype=torch.float32)
    tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
    tensors = {"token_level_rewards": tokens, "response_level_rewards": told, "scores": told, **more}
    return RollDataProto.from_dict(tensors, meta_info={"metrics": {"calls_sum": 1.0, "rows@max": float(len(data))}})


class Recorder(Worker):
    """Gives the number that the response is, and remembers what it was called with."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self.seen: list[Any] = []
        self.states: list[str] = []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.tokenizer = pipeline_config.actor_train.model_args.qreward_tokenizer

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    async def compute_rewards(self, data: Any) -> Any:
        self.seen.append(data)
        return await self.answer(data, self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True))

    async def answer(self, data: Any, texts: list[str]) -> Any:
        return rewards_of(data, [float(text) for text in texts])

    def load_states(self) -> None:
        self.states.append("load")

    def offload_states(self) -> None:
        self.states.append("offload")


def number(draft: Any, rng: Any) -> str:
    return str(draft.number)


def train(worker: type, **flags: Any) -> FakeRollTrainer:
    reward = {"worker_cls": worker, **flags.pop("reward", {})}
    return FakeRollTrainer({"math": reward}, **{"respond": number, "adv_estimator": "grpo", **flags})


MODES = [
    pytest.param({"is_num_return_sequences_expand": True}, id="single"),
    pytest.param({}, id="group"),
    pytest.param({"generate_opt_level": 0}, id="batch"),
]


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_has_the_groups_of_its_prompts(mode: dict[str, Any]) -> None:
    with train(Recorder, **mode) as trainer:
        step, again = trainer.step(), trainer.step()
    assert step.responses == ["0", "1", "2", "3"] * 4
    assert step.raw_rewards == step.scores == [0.0, 1.0, 2.0, 3.0] * 4
    ids = step.column("id")
    assert [len(set(ids[start : start + 4])) for start in range(0, 16, 4)] == [1] * 4
    assert len(set(ids)) == 4
    assert not set(ids) & set(again.column("id"))
    assert step.trained_tokens == [2] * 16
    assert step.rewards[:4] == pytest.approx([-1.161894, -0.387298, 0.387298, 1.161894], abs=1e-5)
    assert step.advantages == pytest.approx(step.rewards)
    assert not step.poisoned
    assert (step.global_step, again.global_step) == (0, 1)
    assert (step.dropped, step.skipped) == ([], False)


@pytest.mark.parametrize(
    ("mode", "calls", "rows"), [(MODES[0].values[0], 16, 1), (MODES[1].values[0], 4, 4), (MODES[2].values[0], 2, 8)]
)
def test_what_a_worker_is_called_with(mode: dict[str, Any], calls: int, rows: int) -> None:
    with train(Recorder, reward={"world_size": 2, "tag_included": ["gsm"]}, **mode) as trainer:
        step = trainer.step()
        first, second = trainer.workers("math")
    assert step.reward_calls == calls
    assert [len(data) for data in first.seen] == [len(data) for data in second.seen] == [rows] * (calls // 2)
    data = first.seen[0]
    assert data.batch.keys() >= {
        *("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "prompt_mask"),
    }
    assert data.batch["prompts"].shape == (rows, 128)
    assert data.batch["responses"].shape == (rows, 64)
    assert data.batch["input_ids"].shape == (rows, 192)
    asked = first.tokenizer.decode(data.batch["input_ids"][0][data.batch["prompt_mask"][0]])
    assert asked == f"What is {int(data.non_tensor_batch['id'][0]) + 1} + {int(data.non_tensor_batch['id'][0]) + 2}?"
    assert data.non_tensor_batch["domain"][0] == "math"
    assert data.non_tensor_batch["tag"][0] == "gsm"
    assert data.non_tensor_batch["ground_truth"][0].isdigit()
    assert data.meta_info["global_step"] == 0
    assert "collect_unfinished" in data.meta_info
    streamed = "generate_opt_level" not in mode
    assert ("rollout_id" in data.non_tensor_batch) == streamed
    assert ("origin_prompt_id" in data.batch) == (not streamed)
    count = 1 if "is_num_return_sequences_expand" in mode else 4
    assert data.meta_info["generation_config"]["num_return_sequences"] == count
    if streamed:
        names = [
            name for worker in (first, second) for seen in worker.seen for name in seen.non_tensor_batch["rollout_id"]
        ]
        assert len(set(names)) == 16
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    assert (first.cluster_name, second.worker_name) == ("reward-math", "reward-math-1")
    assert first.states == ["load", "offload"]


def test_metrics_are_reduced_by_their_names_and_copied_where_a_group_is_one_call() -> None:
    metrics = []
    for mode in ({"is_num_return_sequences_expand": True}, {}, {"generate_opt_level": 0}):
        with train(Recorder, **mode) as trainer:
            metrics.append(trainer.step().metrics)
    single, group, batch = metrics
    assert (single["math/calls_sum"], single["math/rows@max"]) == (16.0, 1.0)
    # Four calls, but every sample of a group carries the metrics of its call.
    assert (group["math/calls_sum"], group["math/rows@max"]) == (16.0, 4.0)
    assert "math/calls_sum" not in batch
    assert group["math/critic/score/mean"] == group["critic/score/mean"] == 1.5
    assert group["critic/correct/mean"] == group["math/critic/correct/mean"] == 0.25


def test_async_workers_are_called_at_the_same_time_and_sync_ones_one_after_the_other() -> None:
    class Together(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            self.waiting = getattr(self, "waiting", 0) + 1
            self.all_here = getattr(self, "all_here", None) or asyncio.Event()
            if self.waiting == 16:
                self.all_here.set()
            await self.all_here.wait()
            return await super().answer(data, texts)

    class Alone(Worker):
        inside = 0
        threads: set[str] = set()  # noqa: RUF012

        def compute_rewards(self, data: Any) -> Any:
            assert self.inside == 0
            self.inside += 1
            self.threads.add(threading.current_thread().name)
            asyncio.run(asyncio.sleep(0))  # no loop runs in a sync worker's thread
            self.inside -= 1
            return rewards_of(data, [1.0] * len(data))

    with train(Together, is_num_return_sequences_expand=True) as trainer:
        assert trainer.step().rewards_pending_max == 16
    with train(Alone, is_num_return_sequences_expand=True) as trainer:
        step = trainer.step()
    assert step.rewards_pending_max > 1
    assert len(Alone.threads) == 1
    assert step.metrics["critic/score/mean"] == 1.0


def test_the_same_seed_gives_the_same_batch_and_another_seed_another() -> None:
    def batches(seed: int) -> list[Any]:
        class ByLength(Recorder):
            async def answer(self, data: Any, texts: list[str]) -> Any:
                return rewards_of(data, [float(len(text)) for text in texts])

        with FakeRollTrainer({"m": {"worker_cls": ByLength}}, seed=seed) as trainer:
            steps = [trainer.step() for _ in range(2)]
            names = [str(name) for data in trainer.workers("m")[0].seen for name in data.non_tensor_batch["rollout_id"]]
        return [(step.responses, step.column("id"), step.raw_rewards) for step in steps] + names

    assert batches(3) == batches(3)
    assert batches(3) != batches(4)


def test_a_response_of_full_length_has_no_end_token() -> None:
    with train(Recorder, response_length=1, max_len_mask=True) as trainer:
        step = trainer.step()
    assert step.trained_tokens == [0] * 16
    assert step.skipped
    assert step.advantages == [None] * 16


@pytest.mark.parametrize(("mode", "is_async"), [({}, True), ({"generate_opt_level": 0}, False)])
def test_an_exception_of_a_worker_ends_the_training(mode: dict[str, Any], is_async: bool) -> None:
    class Broken(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            raise ZeroDivisionError("the judge is gone")

    class BrokenSync(Worker):
        def compute_rewards(self, data: Any) -> Any:
            raise ZeroDivisionError("the judge is gone")

    with train(Broken if is_async else BrokenSync, **mode) as trainer:
        with pytest.raises(ZeroDivisionError, match="the judge is gone"):
            trainer.step()
        with pytest.raises(RuntimeError, match="the training has ended: ZeroDivisionError"):
            trainer.step()


@pytest.mark.parametrize("mode", MODES[1:])
def test_a_nan_passes_the_filter_without_a_word_and_poisons_its_group(mode: dict[str, Any]) -> None:
    class Nan(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            ids = data.non_tensor_batch["id"]
            return rewards_of(
                data,
                [math.nan if (row, text) == ("10", "1") else float(text) for row, text in zip(ids, texts, strict=True)],
            )

    reward = {"query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_up": 9.0}}}
    with train(Nan, reward=reward, **mode) as trainer:
        step = trainer.step()
    assert step.dropped == []
    assert step.poisoned
    spoilt = [math.isnan(reward) for reward in step.rewards]
    assert spoilt == [identity == "10" for identity in step.column("id")]
    assert sum(spoilt) == 4


def test_a_reward_that_is_no_column_of_the_batch_ends_the_training() -> None:
    class TooMany(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            return rewards_of(data, [1.0] * len(data), response_mask=data.batch["response_mask"] * 0)

    with train(TooMany) as trainer, pytest.raises(AssertionError, match="response_mask"):
        trainer.step()


def test_a_tensor_that_only_one_domain_has_breaks_the_batch() -> None:
    class More(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            return rewards_of(data, [1.0] * len(data), bonus=torch.zeros(len(data)))

    rewards = {"a": {"worker_cls": Recorder}, "b": {"worker_cls": More}}
    with FakeRollTrainer(rewards, respond=number) as trainer, pytest.raises(KeyError, match="bonus"):
        trainer.step()


def test_groups_that_the_filter_refuses_are_replaced() -> None:
    def respond(draft: Any, rng: Any) -> str:
        return "1" if int(draft.columns["id"]) % 2 else str(draft.number % 2)

    reward = {"query_filter_config": {"type": "std_filter", "filter_args": {"std_threshold": 0.0}}}
    with train(Recorder, reward=reward, respond=respond) as trainer:
        step = trainer.step()
    assert all(int(identity) % 2 == 0 for identity in step.column("id"))
    assert len(set(step.column("id"))) == 4
    assert step.dropped
    assert all(int(prompt.id) % 2 == 1 and prompt.domain == "math" for prompt in step.dropped)
    with train(Recorder, reward=reward, respond=respond, generate_opt_level=0) as trainer:
        step = trainer.step()
    # ROLL hands the filter a whole group as one, and of one it keeps everything.
    assert {int(identity) % 2 for identity in step.column("id")} == {0, 1}


class Picky(UserDefinedRolloutLoop):
    """Drops rows whose id is odd before anything is generated, and masks the second response of a group."""

    async def process_new_prompt(self, context: Any) -> Any:
        assert context.sequence_length > context.prompt_length
        responses = await super().process_new_prompt(context)
        if responses is None or int(responses[0].non_tensor_batch["id"][0]) % 2:
            return None
        responses[1].batch["response_mask"] = torch.zeros_like(responses[1].batch["response_mask"])
        return responses


def test_a_loop_of_ones_own_drops_and_masks() -> None:
    with train(Recorder, user_defined_rollout_loop_cls=Picky) as trainer:
        step = trainer.step()
        assert trainer.pipeline_config.user_defined_rollout_loop_cls == f"{__name__}.Picky"
    assert all(int(identity) % 2 == 0 for identity in step.column("id"))
    assert step.trained_tokens == [2, 0, 2, 2] * 4
    assert step.advantages[1] is None
    assert step.rewards[1] == pytest.approx(-0.387298, abs=1e-5)
    assert len(step.dropped) >= 1


def test_the_batch_path_knows_no_loop() -> None:
    with train(Recorder, user_defined_rollout_loop_cls=Picky, generate_opt_level=0) as trainer:
        step = trainer.step()
    assert step.trained_tokens == [2] * 16


def test_an_exception_of_a_loop_ends_the_training() -> None:
    class Angry(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: Any) -> Any:
            await super().process_new_prompt(context)
            raise LookupError("no")

    with train(Recorder, user_defined_rollout_loop_cls=Angry) as trainer, pytest.raises(LookupError, match="no"):
        trainer.step()


@pytest.mark.parametrize(
    ("play", "message"),
    [
        (lambda context: context.get_request_data(context.meta_info), "get_request_data may be called once"),
        (lambda context: context.generate(None, "math"), "must generate in do_generate_and_reward"),
        (lambda context: context.compute_rewards(None, "math"), "ask for rewards in do_generate_and_reward"),
        (lambda context: [], "returned 0 responses, not 4"),
    ],
)
def test_a_loop_that_breaks_the_contract_ends_the_training(play: Callable[[Any], Any], message: str) -> None:
    class Wrong(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: Any) -> Any:
            context.get_request_data(context.meta_info)
            told = play(context)
            return await told if asyncio.iscoroutine(told) else told

    with (
        train(Recorder, user_defined_rollout_loop_cls=Wrong) as trainer,
        pytest.raises((RuntimeError, AssertionError), match=message),
    ):
        trainer.step()


def test_domains_have_workers_and_parts_of_the_batch_of_their_own() -> None:
    class Half(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            return rewards_of(data, [0.5 * float(text) for text in texts])

    rewards = {"a": {"worker_cls": Recorder}, "b": {"worker_cls": Half, "world_size": 2}}
    rows = {"a": [f"a {number}" for number in range(5)], "b": [f"b {number}" for number in range(5)]}
    shares = {"a": 0.75, "b": 0.25}
    with FakeRollTrainer(
        rewards, rows=rows, domain_interleave_probs=shares, respond=number, adv_estimator="grpo"
    ) as trainer:
        step = trainer.step()
    assert step.column("domain") == ["a"] * 12 + ["b"] * 4
    assert step.raw_rewards == [0.0, 1.0, 2.0, 3.0] * 3 + [0.0, 0.5, 1.0, 1.5]
    assert step.rewards[12:] == pytest.approx(step.rewards[:4], abs=1e-5)
    assert (step.metrics["a/critic/score/mean"], step.metrics["b/critic/score/mean"]) == (1.5, 0.75)


@pytest.mark.parametrize("mode", MODES)
def test_validation_counts_scores_that_are_exactly_one(mode: dict[str, Any]) -> None:
    seen = []

    class Loop(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context: Any) -> Any:
            seen.append(context.is_val)
            return await super().process_new_prompt(context)

    rows = [{"prompt": "p", "tag": "x", "ground_truth": "1"}, {"prompt": "q", "tag": "y", "ground_truth": "0.9999"}]
    reward = {
        "tag_included": ["x", "y"],
        "query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_down": 5.0}},
    }
    with train(
        Recorder,
        reward=reward,
        val_rows=rows,
        val_generating_args={"num_return_sequences": 2, "temperature": 0.0},
        respond=lambda draft, rng: str(draft.ground_truth),
        user_defined_rollout_loop_cls=Loop,
        **mode,
    ) as trainer:
        validation = trainer.validate()
        again = trainer.validate()
        data = trainer.workers("math")[0].seen[0]
    assert validation.val_correct == again.val_correct == {"all": 0.5, "x": 1.0, "y": 0.0}
    assert validation.metrics["val_correct/y/mean"] == 0.0
    assert sorted(validation.column("tag")) == ["x", "x", "y", "y"]
    assert sorted(validation.scores) == sorted(validation.rewards) == pytest.approx([0.9999, 0.9999, 1.0, 1.0])
    assert validation.responses.count("1") == 2
    assert set(seen) == (set() if "generate_opt_level" in mode else {True})
    assert data.meta_info["is_offload_states"] is False
    assert "collect_unfinished" not in data.meta_info
    assert data.meta_info["generation_config"]["temperature"] == 0.0


@pytest.fixture
def holding() -> Iterator[Callable[..., FakeRollTrainer]]:
    made: list[FakeRollTrainer] = []

    def make(worker: type, **flags: Any) -> FakeRollTrainer:
        made.append(train(worker, **flags))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


def test_a_held_generation_waits_for_its_release(holding: Callable[..., FakeRollTrainer]) -> None:
    trainer = holding(Recorder, is_num_return_sequences_expand=True, hold=lambda draft: draft.number == 3)
    running = trainer.start_step()
    trainer.wait_until_held(4)
    assert not running.done()
    assert trainer.release(lambda draft: draft.prompt_id == 0) == 1
    assert trainer.release() == 3
    step = running.result(20)
    assert step.raw_rewards[:4] == [0.0, 1.0, 2.0, 3.0]


def test_a_call_that_takes_longer_than_rpc_timeout_ends_the_training() -> None:
    class Stuck(Recorder):
        async def answer(self, data: Any, texts: list[str]) -> Any:
            await asyncio.Event().wait()

    with (
        train(Stuck, rpc_timeout=0.05) as trainer,
        pytest.raises(TimeoutError, match=r"rpc_timeout.*reward calls are pending"),
    ):
        trainer.step()
    with train(Stuck, timeout_s=0.05) as trainer, pytest.raises(TimeoutError, match="ROLL would wait"):
        trainer.step()
