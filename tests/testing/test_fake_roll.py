"""The fake ROLL trainer: who is called with what, where scores go, what failures do, what training gets."""

from __future__ import annotations

import asyncio
import importlib
import math
import subprocess
import sys
import threading
from types import ModuleType

import pytest

from qreward_plugins.testing import FakeRollTrainer, RollDataProto, roll_stand_in
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.scheduler import UserDefinedRolloutLoop
from qreward_plugins.testing.roll.workers import Dispatch, Worker, register
from tests.kit import each_of


def rewards_of(data, numbers, **more):
    told = torch.tensor(numbers, dtype=torch.float32)
    tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
    tensors = {"token_level_rewards": tokens, "response_level_rewards": told, "scores": told, **more}
    return RollDataProto.from_dict(tensors, meta_info={"metrics": {}})


class Recorder(Worker):
    """Gives the number that the response is."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.tokenizer = pipeline_config.actor_train.model_args.qreward_tokenizer

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)
    async def compute_rewards(self, data):
        return await self.answer(data, self.tokenizer.batch_decode(data.batch["responses"], skip_special_tokens=True))

    async def answer(self, data, texts):
        return rewards_of(data, [float(text) for text in texts])


def answering(numbers):
    """A worker that gives `numbers(data, texts)`."""

    class Answering(Recorder):
        async def answer(self, data, texts):
            return rewards_of(data, numbers(data, texts))

    return Answering


def raising(data, texts):
    raise ZeroDivisionError("the judge is gone")


class Sync(Worker):
    under_way = most = 0

    def compute_rewards(self, data):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        asyncio.run(asyncio.sleep(0.001))  # no loop runs in a sync worker's thread
        self.under_way -= 1
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


@each_of(("estimator", "expected"), [("gae", [0.95, 1.0]), ("reinforce", [1.0, 1.0])])
def test_other_estimators_discount_the_reward_from_its_last_token(estimator, expected):
    with train(answering(lambda data, texts: [1.0] * len(data)), adv_estimator=estimator) as trainer:
        step = trainer.step()
    mask = step.batch.batch["final_response_mask"][0]
    assert step.batch.batch["advantages"][0][mask.bool()].tolist() == pytest.approx(expected)


def test_sync_workers_are_called_one_after_the_other():
    with train(Sync, **SINGLE) as trainer:
        assert trainer.step().scores == [1.0] * 16
        assert trainer.workers[0].most == 1


class Adding(Recorder):
    """A worker with a tensor more, which the batch has already."""

    async def answer(self, data, texts):
        return rewards_of(data, [1.0] * len(data), response_mask=torch.zeros(len(data), 192))


@each_of(
    ("worker", "flags", "error", "message"),
    [
        (answering(raising), {}, ZeroDivisionError, "judge is gone"),
        (SyncBroken, BATCH, ZeroDivisionError, "judge is gone"),
        (answering(lambda data, texts: [1.0]), {}, AssertionError, "token_level_rewards|has 1 rows|rows"),
        (Adding, {}, AssertionError, "response_mask"),
    ],
)
def test_a_worker_that_raises_or_whose_tensors_do_not_fit_ends_the_step(worker, flags, error, message):
    with train(worker, **flags) as trainer, pytest.raises(error, match=message):
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


def test_groups_that_the_filter_refuses_are_replaced():
    def respond(draft, rng):
        return "1" if int(draft.columns["id"]) % 2 else str(draft.number % 2)

    reward = {"query_filter_config": {"type": "mean_filter", "filter_args": {"threshold_up": 1.0}}}
    with train(reward=reward, respond=respond) as trainer:
        step = trainer.step()
    assert {int(identity) % 2 for identity in step.column("id")} == {0}
    assert {int(prompt.id) % 2 for prompt in step.dropped} == {1}


@each_of(
    ("play", "message"),
    [
        (lambda context: context.get_request_data(context.meta_info), "get_request_data may be called once"),
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


@each_of(
    ("flags", "error", "message"),
    [
        ({"num_return_sequences": 1}, TypeError, "did you mean 'num_return_sequences_in"),
        ({"async_generation_ratio": 1}, TypeError, "has no 'async_generation_ratio'.*does not play all"),
        ({"reward": {"reward_manager": []}}, TypeError, r"rewards.math has no .*'reward_manager_config'.*ROLL itself"),
        ({"reward": {"query_filter_config": {"type": "x"}}}, ValueError, "query_filter_config.type is one of"),
        ({"val_generating_args": {"temprature": 0}}, TypeError, "did you mean 'temperature'"),
        ({"worker": object}, TypeError, "object is not made on the Worker of roll_stand_in"),
        ({"rewards": {"d": {}}}, ValueError, r"rewards.d.worker_cls is missing"),
        ({"rewards": {name: {"worker_cls": Recorder} for name in "de"}}, ValueError, "plays one domain, not 2"),
        ({"reward": {"reward_manager_config": {"a": 1}}}, ValueError, "must be a list"),
        ({"rollout_batch_size": 0}, ValueError, "1 or more"),
        ({"rollout_batch_size": 16}, ValueError, "there are 16 rows: ROLL needs more"),
        ({"rows": [{"question": "a"}] * 5}, ValueError, "needs 'messages' or a 'prompt'"),
        ({"rows": ["a b c d"] * 5, "prompt_length": 3}, ValueError, "longer than prompt_length"),
        ({"sequence_length": 128}, ValueError, "leaves no room"),
        ({"val_rows": [{"prompt": "a", "domain": "x"}]}, ValueError, "for which there is no reward"),
        ({"adv_estimator": "gigpo"}, ValueError, "the estimators gae, grpo, reinforce, not 'gigpo'"),
    ],
)
def test_what_roll_would_not_start_with_and_what_is_not_played_is_refused(flags, error, message):
    with pytest.raises(error, match=message):
        train(**flags)
    assert threads() == []


def test_a_worker_has_copies_of_its_configuration_and_knows_its_place():
    with train(reward={"world_size": 2, "system_envs": {"KEY": "secret"}}) as trainer:
        first, second = trainer.workers
        assert (first.cluster_name, first.rank, second.rank) == ("reward-math", 0, 1)
        assert first.worker_config.system_envs == {"KEY": "secret"}
        assert first.worker_config is not first.pipeline_config.rewards["math"]
        assert first.pipeline_config is not trainer.pipeline_config
        assert first.tokenizer is second.tokenizer


def test_closing_calls_all_workers_and_may_be_repeated():
    closed = []

    class Failing(Recorder):
        async def close(self):
            closed.append(self.rank)
            raise LookupError("not closed")

    trainer = train(Failing, reward={"world_size": 2})
    with pytest.raises(LookupError, match="not closed"):
        trainer.close()
    trainer.close()
    assert (closed, threads()) == ([0, 1], [])


def test_data_has_the_rules_of_rolls():
    def make(**meta):
        return RollDataProto.from_dict({"n": torch.arange(4)}, {"name": ["a", "b", "a", "c"]}, {"k": 1, **meta})

    data = make()
    assert data[1:3].meta_info is data[[0]].meta_info is data.meta_info
    assert {name: part.batch["n"].tolist() for name, part in data.group_by("name").items()}["a"] == [0, 2]
    for odd, message in (({"n": torch.ones(4)}, "n in"), ({"x": torch.ones(4)}, "k in")):
        with pytest.raises(AssertionError, match=message):
            make().union(RollDataProto.from_dict(odd, meta_info={"k": 2}))
    first = make(metrics={"a": 1.0, "b": [1, 2]}, who="first")
    both = RollDataProto.concat([first, make(metrics={"a": 2.0, "c": 5}, who="second")])
    assert both.meta_info == {"k": 1, "who": "first", "metrics": {"a": [1.0, 2.0], "b": [1, 2], "c": [5]}}


def test_prompts_are_rendered_and_rows_keep_their_columns():
    rows = [{"messages": '[{"role": "user", "content": "hi"}]', "extra": 7}] * 5
    seen = []
    with train(rows=rows, respond=lambda draft, rng: seen.append(draft) or "1") as trainer:
        trainer.step()
    assert seen[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (seen[0].columns["messages"], seen[0].columns["extra"]) == (rows[0]["messages"], 7)


def test_the_stand_in_has_a_few_names_and_leaves_an_installed_roll_alone(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "roll", other := ModuleType("roll"))
    with roll_stand_in() as needed:
        assert needed, "another project of that name is no ROLL"
        assert importlib.import_module("roll.distributed.scheduler.protocol").DataProto is RollDataProto
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("roll.distributed.scheduler.router")
    assert sys.modules.pop("roll") is other
    package = tmp_path / "roll" / "distributed" / "executor"
    package.mkdir(parents=True)
    (package / "worker.py").write_text("class Worker: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with roll_stand_in() as needed:
            own = importlib.import_module("roll.distributed.executor.worker")
            assert (needed, own.Worker is Worker) == (False, False)
        with roll_stand_in(over_installed=True):
            assert importlib.import_module("roll.distributed.executor.worker").Worker is Worker
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
