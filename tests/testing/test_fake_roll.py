"""The fake ROLL trainer: who is called with what, where scores go, what failures do, what training gets."""

from __future__ import annotations

import asyncio
import gc
import importlib
import math
import os
import subprocess
import sys
import threading
from types import ModuleType

import pytest

from qreward_plugins.testing import FakeRollTrainer, FakeTrajEnvManager, RollDataProto, roll_stand_in
from qreward_plugins.testing.generation import WordTokenizer
from qreward_plugins.testing.roll.estimates import reduce_metrics
from qreward_plugins.testing.roll.generation import shuffled
from qreward_plugins.testing.roll.protocol import torch
from qreward_plugins.testing.roll.rollout_loop import UserDefinedRolloutLoop
from qreward_plugins.testing.roll.workers import Dispatch, Worker, register
from tests.kit import each_of


def rewards_of(data, numbers, **more):
    told = torch.tensor(numbers, dtype=torch.float32)
    tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
    tensors = {"token_level_rewards": tokens, "response_level_rewards": told, "scores": told, **more}
    return RollDataProto.from_dict(tensors, meta_info={"metrics": {"calls_sum": 1.0, "rows@max": float(len(data))}})


class Recorder(Worker):
    """Gives the number that the response is, and remembers what it was called with."""

    def __init__(self, worker_config):
        super().__init__(worker_config=worker_config)
        self.seen, self.states, self.keys = [], [], [os.environ.get("QREWARD_TEST_KEY")]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.keys.append(os.environ.get("QREWARD_TEST_KEY"))
        self.tokenizer = pipeline_config.actor_train.model_args.qreward_tokenizer

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    async def compute_rewards(self, data):
        self.seen.append(data)
        return await self.answer(data, self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True))

    async def answer(self, data, texts):
        return rewards_of(data, [float(text) for text in texts])

    def load_states(self):
        self.states.append("load")

    def offload_states(self):
        self.states.append("offload")


def answering(numbers):
    """A worker that gives `numbers(data, texts)`."""

    class Answering(Recorder):
        async def answer(self, data, texts):
            return rewards_of(data, numbers(data, texts))

    return Answering


def raising(data, texts):
    raise ZeroDivisionError("the judge is gone")


class Sync(Worker):
    threads: set[str] = set()  # noqa: RUF012

    def compute_rewards(self, data):
        self.threads.add(threading.current_thread().name)
        asyncio.run(asyncio.sleep(0))  # no loop runs in a sync worker's thread
        return rewards_of(data, [1.0] * len(data))


class SyncBroken(Worker):
    def compute_rewards(self, data):
        raising(data, [])


def train(worker=Recorder, **flags):
    rewards = flags.pop("rewards", None) or {"math": {"worker_cls": worker, **flags.pop("reward", {})}}
    defaults = {"respond": lambda draft, rng: str(draft.number), "adv_estimator": "grpo"}
    return FakeRollTrainer(rewards, **{**defaults, **flags})


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fake-roll")]


SINGLE, GROUP, BATCH = {"is_num_return_sequences_expand": True}, {}, {"generate_opt_level": 0}


@each_of("mode", [SINGLE, GROUP, BATCH])
def test_a_batch_has_the_groups_of_its_prompts_and_grpo_normalises_them(mode):
    with train(**mode) as trainer:
        step, again = trainer.step(), trainer.step()
    assert step.responses == ["0", "1", "2", "3"] * 4
    assert step.raw_rewards == step.scores == [0.0, 1.0, 2.0, 3.0] * 4
    ids = step.column("id")
    assert [len(set(ids[start : start + 4])) for start in range(0, 16, 4)] == [1] * 4
    assert len({*ids, *again.column("id")}) == 8
    assert step.trained_tokens == [2] * 16
    assert step.rewards[:4] == pytest.approx([-1.161894, -0.387298, 0.387298, 1.161894], abs=1e-5)
    assert step.advantages == pytest.approx(step.rewards)
    assert (step.poisoned, step.dropped) == (False, [])
    assert (step.global_step, again.global_step) == (0, 1)
    assert step.metrics["critic/score/mean"] == step.metrics["math/critic/score/mean"] == 1.5


@each_of(("estimator", "expected"), [("gae", [0.95, 1.0]), ("reinforce", [1.0, 1.0])])
def test_other_estimators_discount_the_reward_from_its_last_token(estimator, expected):
    with train(answering(lambda data, texts: [1.0] * len(data)), adv_estimator=estimator) as trainer:
        step = trainer.step()
    mask = step.batch.batch["final_response_mask"][0]
    assert step.batch.batch["advantages"][0][mask.bool()].tolist() == pytest.approx(expected)


@each_of(("mode", "calls", "rows"), [(SINGLE, 16, 1), (GROUP, 4, 4), (BATCH, 2, 8)])
def test_what_a_worker_is_called_with(mode, calls, rows):
    with train(reward={"world_size": 2, "tag_included": ["gsm"]}, **mode) as trainer:
        step = trainer.step()
        first, second = trainer.workers("math")
    assert step.reward_calls == calls
    assert [len(data) for data in first.seen] == [len(data) for data in second.seen] == [rows] * (calls // 2)
    data = first.seen[0]
    assert data.batch.keys() >= {"attention_mask", "position_ids", "response_mask", "prompt_mask"}
    assert data.batch["prompts"].shape == (rows, 128)
    assert data.batch["responses"].shape == (rows, 64)
    assert data.batch["input_ids"].shape == (rows, 192)
    asked = first.tokenizer.decode(data.batch["input_ids"][0][data.batch["prompt_mask"][0]])
    assert asked == f"What is {int(data.non_tensor_batch['id'][0]) + 1} + {int(data.non_tensor_batch['id'][0]) + 2}?"
    columns = {name: values[0] for name, values in data.non_tensor_batch.items()}
    assert (columns["domain"], columns["tag"], columns["ground_truth"].isdigit()) == ("math", "gsm", True)
    assert data.meta_info["global_step"] == 0
    assert "collect_unfinished" in data.meta_info
    assert ("rollout_id" in columns, "origin_prompt_id" in data.batch) == (mode is not BATCH, mode is BATCH)
    if mode is not BATCH:
        seen = [*first.seen, *second.seen]
        assert len({name for each in seen for name in each.non_tensor_batch["rollout_id"]}) == 16
    assert data.meta_info["generation_config"]["num_return_sequences"] == (1 if mode is SINGLE else 4)
    assert (first.rank, second.rank, first.world_size) == (0, 1, 2)
    assert (first.cluster_name, second.worker_name) == ("reward-math", "reward-math-1")
    assert first.states == ["load", "offload"]


def test_metrics_are_reduced_by_their_names_and_copied_where_a_group_is_one_call():
    metrics = []
    for mode in (SINGLE, GROUP, BATCH):
        with train(**mode) as trainer:
            metrics.append(trainer.step().metrics)
    single, group, batch = metrics
    assert (single["math/calls_sum"], single["math/rows@max"]) == (16.0, 1.0)
    # Four calls, but every sample of a group carries the metrics of its call.
    assert (group["math/calls_sum"], group["math/rows@max"]) == (16.0, 4.0)
    assert "math/calls_sum" not in batch
    told = {"c": [1, 2], "d": 3, "e_std": [1.0, 3.0], "f@p50": (1, 2, 9), "g": []}
    assert reduce_metrics(told) == {"c": 1.5, "d": 3, "e_std": 1.0, "f@p50": 2.0, "g": []}
    with pytest.raises(ValueError, match="Unknown reducer tag 'most'"):
        reduce_metrics({"a@most": [1]})


def test_async_workers_are_called_at_the_same_time_and_sync_ones_one_after_the_other():
    class Together(Recorder):
        async def answer(self, data, texts):
            self.waiting = getattr(self, "waiting", 0) + 1
            self.all_here = getattr(self, "all_here", None) or asyncio.Event()
            if self.waiting == 16:
                self.all_here.set()
            await self.all_here.wait()
            return await super().answer(data, texts)

    with train(Together, **SINGLE) as trainer:
        assert trainer.step().reward_calls == 16
    with train(Sync, **SINGLE) as trainer:
        assert trainer.step().metrics["critic/score/mean"] == 1.0
    assert len(Sync.threads) == 1


def test_the_same_seed_gives_the_same_batch_and_another_seed_another():
    def batches(seed):
        worker = answering(lambda data, texts: list(map(len, texts)))
        with FakeRollTrainer({"m": {"worker_cls": worker}}, seed=seed) as trainer:
            return [(step.responses, step.column("id"), step.raw_rewards) for step in (trainer.step(), trainer.step())]

    assert batches(3) == batches(3) != batches(4)
    # What `random.seed(seed + epoch); random.shuffle(indices)` gives, epoch after epoch on the same list.
    rows = shuffled([{"n": number} for number in range(5)], 42)
    assert [next(rows)["n"] for _ in range(10)] == [3, 1, 2, 4, 0, 1, 0, 4, 2, 3]


@each_of(
    ("worker", "flags", "error", "message"),
    [
        (answering(raising), {}, ZeroDivisionError, "judge is gone"),
        (SyncBroken, BATCH, ZeroDivisionError, "judge is gone"),
        (answering(lambda data, texts: [1.0]), {}, AssertionError, "token_level_rewards|has 1 rows|rows"),
    ],
)
def test_an_exception_of_a_worker_ends_the_step(worker, flags, error, message):
    with train(worker, **flags) as trainer, pytest.raises(error, match=message):
        trainer.step()


def test_a_tensor_that_is_not_the_batchs_or_that_only_one_domain_has_ends_the_step():
    def more(name):
        class More(Recorder):
            async def answer(self, data, texts):
                return rewards_of(data, [1.0] * len(data), **{name: torch.zeros(len(data), 192)})

        return More

    with train(more("response_mask")) as trainer, pytest.raises(AssertionError, match="response_mask"):
        trainer.step()
    rewards = {"a": {"worker_cls": Recorder}, "b": {"worker_cls": more("bonus")}}
    with train(rewards=rewards) as trainer, pytest.raises(KeyError, match="bonus"):
        trainer.step()


@each_of("mode", [GROUP, BATCH])
def test_a_nan_passes_the_filter_without_a_word_and_poisons_its_group(mode):
    def spoilt(data, texts):
        rows = zip(data.non_tensor_batch["id"], texts, strict=True)
        return [math.nan if row == ("10", "1") else float(row[1]) for row in rows]

    reward = {"query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_up": 9.0}}}
    with train(answering(spoilt), reward=reward, **mode) as trainer:
        step = trainer.step()
    assert (step.dropped, step.poisoned) == ([], True)
    assert [math.isnan(reward) for reward in step.rewards] == [identity == "10" for identity in step.column("id")]
    assert "10" in step.column("id")


@each_of(
    ("filtered", "arguments"),
    [("std_filter", {"std_threshold": 0.0}), ("mean_filter", {"threshold_up": 1.0, "threshold_down": 0.0})],
)
def test_groups_that_the_filter_refuses_are_replaced(filtered, arguments):
    def respond(draft, rng):
        return "1" if int(draft.columns["id"]) % 2 else str(draft.number % 2)

    reward = {"query_filter_config": {"type": filtered, "filter_args": arguments}}
    with train(reward=reward, respond=respond) as trainer:
        step = trainer.step()
    assert len({identity for identity in step.column("id") if int(identity) % 2 == 0}) == 4
    assert step.dropped
    assert all(int(prompt.id) % 2 == 1 and prompt.domain == "math" for prompt in step.dropped)
    with train(reward=reward, respond=respond, **BATCH) as trainer:
        # ROLL hands the filter a whole group as one, and of one it keeps everything.
        assert {int(identity) % 2 for identity in trainer.step().column("id")} == {0, 1}


class Picky(UserDefinedRolloutLoop):
    """Drops rows whose id is odd, and masks the second response of a group."""

    async def process_new_prompt(self, context):
        assert context.sequence_length > context.prompt_length
        responses = await super().process_new_prompt(context)
        if responses is None or int(responses[0].non_tensor_batch["id"][0]) % 2:
            return None
        responses[1].batch["response_mask"] = torch.zeros_like(responses[1].batch["response_mask"])
        return responses


def test_a_loop_of_ones_own_drops_and_masks_and_the_batch_path_knows_none():
    with train(user_defined_rollout_loop_cls=Picky) as trainer:
        step = trainer.step()
        assert trainer.pipeline_config.user_defined_rollout_loop_cls == f"{__name__}.Picky"
    assert all(int(identity) % 2 == 0 for identity in step.column("id"))
    assert step.trained_tokens == [2, 0, 2, 2] * 4
    assert step.advantages[1] is None
    assert step.rewards[1] == pytest.approx(-0.387298, abs=1e-5)
    assert step.dropped
    with train(user_defined_rollout_loop_cls=Picky, **BATCH) as trainer:
        assert trainer.step().trained_tokens == [2] * 16


@each_of(
    ("play", "message"),
    [
        (lambda context: context.get_request_data(context.meta_info), "get_request_data may be called once"),
        (lambda context: context.generate(None, "math"), "must generate in do_generate_and_reward"),
        (lambda context: context.compute_rewards(None, "math"), "ask for rewards in do_generate_and_reward"),
        (lambda context: [], "returned 0 responses, not 4"),
    ],
)
def test_a_loop_that_breaks_the_contract_ends_the_step(play, message):
    class Wrong(UserDefinedRolloutLoop):
        async def process_new_prompt(self, context):
            context.get_request_data(context.meta_info)
            told = play(context)
            return await told if asyncio.iscoroutine(told) else told

    errors = (RuntimeError, AssertionError)
    with train(user_defined_rollout_loop_cls=Wrong) as trainer, pytest.raises(errors, match=message):
        trainer.step()


def test_domains_have_workers_rows_and_parts_of_the_batch_of_their_own():
    half = answering(lambda data, texts: [0.5 * float(text) for text in texts])
    rewards = {"a": {"worker_cls": Recorder}, "b": {"worker_cls": half, "world_size": 2}}
    rows = {"a": [f"a {number}" for number in range(5)], "b": [f"b {number}" for number in range(5)]}
    with train(rewards=rewards, rows=rows) as trainer:
        step = trainer.step()
    assert step.column("domain") == ["a"] * 8 + ["b"] * 8
    assert step.raw_rewards == [0.0, 1.0, 2.0, 3.0] * 2 + [0.0, 0.5, 1.0, 1.5] * 2
    assert step.rewards[8:] == pytest.approx(step.rewards[:8], abs=1e-5)
    assert (step.metrics["a/critic/score/mean"], step.metrics["b/critic/score/mean"]) == (1.5, 0.75)


@each_of("mode", [SINGLE, GROUP, BATCH])
def test_validation_counts_scores_that_are_exactly_one_and_filters_nothing(mode):
    rows = [{"prompt": "p", "tag": "x", "ground_truth": "1"}, {"prompt": "q", "tag": "y", "ground_truth": "0.9999"}]
    refusing = {"type": "mean_filter", "filter_args": {"threshold_down": 5.0}}
    with train(
        reward={"tag_included": ["x", "y"], "query_filter_config": refusing},
        val_rows=rows,
        val_generating_args={"num_return_sequences": 2, "temperature": 0.0},
        respond=lambda draft, rng: str(draft.ground_truth),
        **mode,
    ) as trainer:
        validation = trainer.validate()
        data = trainer.workers("math")[0].seen[0]
    assert validation.val_correct == {"all": 0.5, "x": 1.0, "y": 0.0}
    assert validation.metrics["val_correct/y/mean"] == 0.0
    assert sorted(validation.column("tag")) == ["x", "x", "y", "y"]
    assert sorted(validation.scores) == sorted(validation.rewards) == pytest.approx([0.9999, 0.9999, 1.0, 1.0])
    assert validation.responses.count("1") == 2
    assert data.meta_info["is_offload_states"] is False
    assert "collect_unfinished" not in data.meta_info
    assert data.meta_info["generation_config"]["temperature"] == 0.0


def test_a_held_generation_waits_for_its_release():
    with train(hold=lambda draft: draft.number == 3, **SINGLE) as trainer:
        running = trainer.start_step()
        trainer.wait_until_held(4)
        assert not running.done()
        assert trainer.release(lambda draft: draft.prompt_id == 0) == 1
        assert trainer.release() == 3
        assert running.result(20).raw_rewards[:4] == [0.0, 1.0, 2.0, 3.0]


@each_of("limit", ["rpc_timeout", "timeout_s"])
def test_a_step_that_takes_longer_than_allowed_says_what_is_missing(limit):
    class Stuck(Recorder):
        async def answer(self, data, texts):
            await asyncio.Event().wait()

    with train(Stuck, **{limit: 0.05}) as trainer, pytest.raises(TimeoutError, match=r"0.05 s .* calls are pending"):
        trainer.step()


@each_of(
    ("flags", "error", "message"),
    [
        (
            {"num_return_sequences": 1},
            TypeError,
            "has no 'num_return_sequences': did you mean 'num_return_sequences_in",
        ),
        ({"reward": {"reward_manager": []}}, TypeError, r"rewards.math has no .*'reward_manager_config'.*ROLL itself"),
        ({"reward": {"query_filter_config": {"kind": "x"}}}, TypeError, "query_filter_config has no 'kind'"),
        ({"rows": {"x": ["a"]}}, TypeError, "has no 'x'"),
        ({"generating_args": {"temprature": 0}}, TypeError, "did you mean 'temperature'"),
        ({"rewards": {"d": {}}}, ValueError, r"rewards.d.worker_cls is missing"),
        ({"reward": {"world_size": 0}}, ValueError, "world_size must be 1 or more"),
        ({"reward": {"reward_manager_config": {"a": 1}}}, ValueError, "must be a list"),
        ({"reward": {"system_envs": {"A": 1}}}, ValueError, "system_envs must be texts"),
        ({"reward": {"query_filter_config": {"type": "x"}}}, ValueError, "query_filter_config.type"),
        ({"rollout_batch_size": 0}, ValueError, "1 or more"),
        ({"rollout_batch_size": 16}, ValueError, "has 16 rows: ROLL needs more"),
        ({"rows": {"math": ["a"]}}, ValueError, "has 1 rows"),
        ({"rows": [{"question": "a"}] * 5}, ValueError, "needs 'messages' or a 'prompt'"),
        ({"rows": ["a b c d"] * 5, "prompt_length": 3}, ValueError, "longer than prompt_length"),
        ({"sequence_length": 128}, ValueError, "leaves no room"),
        ({"val_rows": [{"prompt": "a", "domain": "x"}]}, ValueError, "for which there is no reward"),
        (
            {"rewards": {"d": {"worker_cls": Recorder}, "e": {"worker_cls": Recorder}}, "rollout_batch_size": 1},
            ValueError,
            "leaves no prompt for some domains",
        ),
        ({"async_generation_ratio": 1}, TypeError, "has no 'async_generation_ratio'.*does not play all"),
        ({"adv_estimator": "gigpo"}, ValueError, "the estimators gae, grpo, reinforce, not 'gigpo'"),
        ({"worker": object}, TypeError, "object is not made on the Worker of roll_stand_in"),
    ],
)
def test_what_roll_would_not_start_with_and_what_is_not_played_is_refused(flags, error, message):
    with pytest.raises(error, match=message):
        train(**flags)
    assert threads() == []


def test_a_worker_has_copies_of_its_configuration_and_its_environment(monkeypatch):
    monkeypatch.delenv("QREWARD_TEST_KEY", raising=False)
    kept = {"worker_cls": Recorder, "system_envs": {"QREWARD_TEST_KEY": "secret"}}
    with train(rewards={"d": kept, "e": {"worker_cls": Recorder}}) as trainer:
        (first,), (second,) = trainer.workers("d"), trainer.workers("e")
        assert (first.keys, second.keys) == (["secret", "secret"], [None, None])
        assert first.worker_config == trainer.pipeline_config.rewards["d"]
        assert first.worker_config is not first.pipeline_config.rewards["d"]
        assert first.pipeline_config is not trainer.pipeline_config
        assert first.tokenizer is second.tokenizer
    assert "QREWARD_TEST_KEY" not in os.environ
    assert "CLUSTER_NAME" not in os.environ


def test_closing_ends_everything_and_may_be_repeated():
    closed = []

    class Failing(Recorder):
        async def close(self):
            closed.append(self.rank)
            if self.rank == 0:
                raise LookupError("not closed")

    trainer = train(rewards={"d": {"worker_cls": Failing, "world_size": 2}, "e": {"worker_cls": Sync}})
    assert threads()
    with pytest.raises(LookupError, match="not closed"):
        trainer.close()
    trainer.close()
    assert (closed, threads()) == ([0, 1], [])
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step()

    class Wrong(Recorder):
        def initialize(self, pipeline_config):
            raise LookupError("misconfigured")

    with pytest.raises(LookupError, match="misconfigured"):
        train(Wrong)
    dropped = train()
    dropped.step()
    del dropped
    gc.collect()
    assert threads() == []


def test_data_has_the_rules_of_rolls():
    def make(**meta):
        tensors = {"n": torch.arange(4), "m": torch.zeros(4, 2)}
        return RollDataProto.from_dict(tensors, {"name": ["a", "b", "a", "c"]}, {"k": 1, **meta})

    data = make()
    assert (len(data), data["n"].tolist(), data["name"].tolist()) == (4, [0, 1, 2, 3], ["a", "b", "a", "c"])
    assert data[1:3].meta_info is data[[0]].meta_info is data.meta_info
    assert data[[True, False, False, True]].non_tensor_batch["name"].tolist() == ["a", "c"]
    assert {name: part.batch["n"].tolist() for name, part in data.group_by("name").items()}["a"] == [0, 2]
    assert data.repeat(2).batch["n"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert data.repeat(2, interleave=False).batch["n"].tolist() == [0, 1, 2, 3] * 2
    nan = torch.tensor([math.nan] * 4)
    other = RollDataProto.from_dict({"n": torch.arange(4), "x": nan}, {"more": [1, 2, 3, 4]}, {"k": 1, "l": 2})
    assert make().union(other).meta_info == {"k": 1, "l": 2}
    for odd, message in (({"n": torch.ones(4)}, "n in"), ({"x": torch.ones(4)}, "k in")):
        with pytest.raises(AssertionError, match=message):
            make().union(RollDataProto.from_dict(odd, meta_info={"k": 2}))
    with pytest.raises(AssertionError, match="x in"):
        other.union(other)
    for wrong in (torch.zeros(3), [0] * 4):
        with pytest.raises(AssertionError):
            data.batch["x"] = wrong
    first = make(metrics={"a": 1.0, "b": [1, 2]}, who="first")
    both = RollDataProto.concat([first, make(metrics={"a": 2.0, "c": 5}, who="second")])
    assert both.meta_info == {"k": 1, "who": "first", "metrics": {"a": [1.0, 2.0], "b": [1, 2], "c": [5]}}


def test_prompts_are_rendered_and_the_tokenizer_gives_back_the_very_text():
    tokenizer = WordTokenizer()
    text = "<|im_start|>user\n  What is  1 + 2?\n\n<|im_end|>\ttail "
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(torch.tensor(ids), skip_special_tokens=True) == "user\n  What is  1 + 2?\n\n\ttail "
    rows = [{"messages": '[{"role": "user", "content": "hi"}]', "extra": 7}] * 5
    seen = []
    with train(rows=rows, respond=lambda draft, rng: seen.append(draft) or "1") as trainer:
        trainer.step()
    assert seen[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (seen[0].columns["messages"], seen[0].columns["extra"]) == (rows[0]["messages"], 7)


class Countdown:
    """Over after so many turns; each gives 0.5."""

    def __init__(self, turns):
        self.turns, self.actions, self.seed = turns, [], None

    def reset(self, seed=None):
        self.seed = seed
        return f"{self.turns} left", {}

    def step(self, action):
        self.actions.append(action)
        left = self.turns - len(self.actions)
        return f"{left} left", 0.5, left <= 0, False, {"metrics": {"left": left}}


def say(messages, rng):
    return f"turn {sum(message['role'] == 'assistant' for message in messages)}"


class Watched(FakeTrajEnvManager):
    """Adds a reward to the last turn, as a judge would."""

    def formulate_rollouts(self, rollout_cache):
        self.histories = [dict(turn) for turn in rollout_cache.history]
        [turn for turn in rollout_cache.history if "llm_response" in turn][-1]["reward"] += 2.0
        return super().formulate_rollouts(rollout_cache)


def test_a_trajectory_ends_with_a_turn_that_was_only_opened():
    env = Countdown(2)
    manager = Watched(env=env, respond=say, env_config={"tag": "count"}, sequence_length=64, seed=5)
    rollout = manager.play(episode_id=4)
    assert env.seed == 9
    assert env.actions == ["turn 0<|im_end|>", "turn 1<|im_end|>"]
    first, second, opened = manager.histories
    assert [message["role"] for message in first["messages"]] == ["system", "user", "assistant"]
    assert second["messages"][-1] == {"role": "assistant", "content": "turn 1"}
    assert (second["reward"], second["llm_response"]) == (0.5, "turn 1<|im_end|>")
    assert opened == {"observation": "0 left", "messages": None}
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [3.0]
    assert rollout.non_tensor_batch["step_scores"].tolist() == [[0.5, 2.5]]
    count = int(rollout.batch["attention_mask"].sum())
    assert (rollout.batch["scores"][0, count - 1], rollout.batch["scores"].sum()) == (3.0, 3.0)
    trained = rollout.batch["input_ids"][0][rollout.batch["response_mask"][0]]
    assert manager.tokenizer.decode(trained) == "turn 0<|im_end|>turn 1<|im_end|>"
    assert rollout.meta_info["metrics"] == {"env/count/left": 0.5, "env/count/num_actions": 2}


def test_a_trajectory_is_cut_short_by_its_last_step_and_by_a_full_context():
    manager = Watched(env=Countdown(5), respond=say, env_config={"max_steps": 3})
    assert manager.play().non_tensor_batch["step_scores"].tolist() == [[0.5, 0.5, 2.5]]
    assert (manager.rollout_cache.terminated, manager.rollout_cache.truncated) == (True, True)
    manager = Watched(env=Countdown(5), respond=lambda messages, rng: say(messages, rng) if len(messages) < 4 else None)
    assert manager.play().non_tensor_batch["step_scores"].tolist() == [[2.5]]
    for short in ({"respond": lambda messages, rng: None}, {"respond": say, "sequence_length": 4}):
        with pytest.raises(IndexError):
            FakeTrajEnvManager(env=Countdown(5), **short).play()


def test_the_stand_in_has_a_few_names_and_leaves_an_installed_roll_alone(tmp_path, monkeypatch):
    other = ModuleType("roll")
    monkeypatch.setitem(sys.modules, "roll", other)
    with roll_stand_in() as needed:
        assert needed, "another project of that name is no ROLL"
        protocol = importlib.import_module("roll.distributed.scheduler.protocol")
        envs = importlib.import_module("roll.pipeline.agentic.env_manager.traj_env_manager")
        assert (protocol.DataProto, envs.TrajEnvManager) == (RollDataProto, FakeTrajEnvManager)
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("roll.distributed.scheduler.router")
    assert sys.modules.pop("roll") is other
    package = tmp_path / "roll" / "distributed" / "executor"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "worker.py").write_text("class Worker: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with roll_stand_in() as needed:
            own = importlib.import_module("roll.distributed.executor.worker")
            assert (needed, own.Worker is Worker) == (False, False)
        with roll_stand_in(over_installed=True) as needed:
            assert importlib.import_module("roll.distributed.executor.worker").Worker is Worker
        assert sys.modules["roll.distributed.executor.worker"] is own
        with pytest.raises(TypeError, match="over_installed=True"):
            train(own.Worker)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "roll"]:
            del sys.modules[name]


def test_a_training_with_the_adapter_needs_no_torch():
    code = """
import sys
sys.modules["torch"] = None  # as if it were not installed
import qreward_plugins.testing as t
assert "numpy" not in sys.modules
with t.roll_stand_in(), t.JudgeServer(lambda call: float(call.blocks["response"])) as judge:
    source = {"kind": "openai", "base_url": judge.base_url, "model": "judge"}
    tree = {"sources": {"judge": source}, "judges": {"quality": {"kind": "llm"}}}
    worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [tree]}
    loop = "roll_adapter.QRewardRolloutLoop"
    flags = {"adv_estimator": "grpo", "user_defined_rollout_loop_cls": loop, "respond": lambda d, _: str(d.number)}
    with t.FakeRollTrainer({"d": worker}, **flags) as trainer:
        step = trainer.step()
assert [round(reward, 6) for reward in step.raw_rewards] == [0.0, 0.1, 0.2, 0.3] * 4, step.raw_rewards
assert sys.modules["torch"] is None and "roll" not in sys.modules and "ray" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
