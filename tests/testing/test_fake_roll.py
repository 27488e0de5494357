"""The fake ROLL trainer: who is called with what, where scores go, what failures do, what training gets."""

from __future__ import annotations

import asyncio
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
from qreward_plugins.testing.roll.protocol import torch
from qreward_plugins.testing.roll.rollout_loop import UserDefinedRolloutLoop
from qreward_plugins.testing.roll.workers import Dispatch, Worker, register
from tests.kit import each_of


def rewards_of(data, numbers, **more):
    told = torch.tensor(numbers, dtype=torch.float32)
    tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
    tensors = {"token_level_rewards": tokens, "response_level_rewards": told, "scores": told, **more}
    return RollDataProto.from_dict(tensors, meta_info={"metrics": {}})


class Recorder(Worker):
    """Gives the number that the response is."""

    def __init__(self, worker_config):
        super().__init__(worker_config=worker_config)
        self.keys = [os.environ.get("QREWARD_TEST_KEY")]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config):
        super().initialize(pipeline_config)
        self.keys.append(os.environ.get("QREWARD_TEST_KEY"))
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


@each_of(("estimator", "expected"), [("gae", [0.95, 1.0]), ("reinforce", [1.0, 1.0])])
def test_other_estimators_discount_the_reward_from_its_last_token(estimator, expected):
    with train(answering(lambda data, texts: [1.0] * len(data)), adv_estimator=estimator) as trainer:
        step = trainer.step()
    mask = step.batch.batch["final_response_mask"][0]
    assert step.batch.batch["advantages"][0][mask.bool()].tolist() == pytest.approx(expected)


def test_sync_workers_are_called_one_after_the_other():
    with train(Sync, **SINGLE) as trainer:
        assert trainer.step().metrics["critic/score/mean"] == 1.0
    assert len(Sync.threads) == 1


def adding(name):
    """A worker with a tensor more."""

    class Adding(Recorder):
        async def answer(self, data, texts):
            return rewards_of(data, [1.0] * len(data), **{name: torch.zeros(len(data), 192)})

    return Adding


@each_of(
    ("worker", "flags", "error", "message"),
    [
        (answering(raising), {}, ZeroDivisionError, "judge is gone"),
        (SyncBroken, BATCH, ZeroDivisionError, "judge is gone"),
        (answering(lambda data, texts: [1.0]), {}, AssertionError, "token_level_rewards|has 1 rows|rows"),
        (adding("response_mask"), {}, AssertionError, "response_mask"),
        (None, {"rewards": {"a": {"worker_cls": Recorder}, "b": {"worker_cls": adding("x")}}}, KeyError, "x"),
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
    assert {int(identity) % 2 for identity in step.column("id")} == {0}
    assert {(int(prompt.id) % 2, prompt.domain) for prompt in step.dropped} == {(1, "math")}
    with train(reward=reward, respond=respond, **BATCH) as trainer:
        # ROLL hands the filter a whole group as one, and of one it keeps everything.
        assert {int(identity) % 2 for identity in trainer.step().column("id")} == {0, 1}


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


@each_of(
    ("flags", "error", "message"),
    [
        ({"num_return_sequences": 1}, TypeError, "did you mean 'num_return_sequences_in"),
        ({"async_generation_ratio": 1}, TypeError, "has no 'async_generation_ratio'.*does not play all"),
        ({"reward": {"reward_manager": []}}, TypeError, r"rewards.math has no .*'reward_manager_config'.*ROLL itself"),
        ({"reward": {"query_filter_config": {"kind": "x"}}}, TypeError, "query_filter_config has no 'kind'"),
        ({"val_generating_args": {"temprature": 0}}, TypeError, "did you mean 'temperature'"),
        ({"worker": object}, TypeError, "object is not made on the Worker of roll_stand_in"),
        ({"rewards": {"d": {}}}, ValueError, r"rewards.d.worker_cls is missing"),
        ({"reward": {"reward_manager_config": {"a": 1}}}, ValueError, "must be a list"),
        ({"rollout_batch_size": 0}, ValueError, "1 or more"),
        ({"rollout_batch_size": 16}, ValueError, "has 16 rows: ROLL needs more"),
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

    class Wrong(Recorder):
        def initialize(self, pipeline_config):
            raise LookupError("misconfigured")

    trainer = train(rewards={"d": {"worker_cls": Failing, "world_size": 2}, "e": {"worker_cls": Sync}})
    with pytest.raises(LookupError, match="not closed"):
        trainer.close()
    trainer.close()
    assert (closed, threads()) == ([0, 1], [])
    with pytest.raises(LookupError, match="misconfigured"):
        train(Wrong)
    assert threads() == []


def test_data_has_the_rules_of_rolls():
    def make(**meta):
        tensors = {"n": torch.arange(4), "m": torch.zeros(4, 2)}
        return RollDataProto.from_dict(tensors, {"name": ["a", "b", "a", "c"]}, {"k": 1, **meta})

    data = make()
    assert data[1:3].meta_info is data[[0]].meta_info is data.meta_info
    assert data[[True, False, False, True]].non_tensor_batch["name"].tolist() == ["a", "c"]
    assert {name: part.batch["n"].tolist() for name, part in data.group_by("name").items()}["a"] == [0, 2]
    assert data.repeat(2).batch["n"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for odd, message in (({"n": torch.ones(4)}, "n in"), ({"x": torch.ones(4)}, "k in")):
        with pytest.raises(AssertionError, match=message):
            make().union(RollDataProto.from_dict(odd, meta_info={"k": 2}))
    first = make(metrics={"a": 1.0, "b": [1, 2]}, who="first")
    both = RollDataProto.concat([first, make(metrics={"a": 2.0, "c": 5}, who="second")])
    assert both.meta_info == {"k": 1, "who": "first", "metrics": {"a": [1.0, 2.0], "b": [1, 2], "c": [5]}}


def test_prompts_are_rendered_and_the_tokenizer_gives_back_the_very_text():
    text = "<|im_start|>user\n  What is  1 + 2?\n\n<|im_end|>\ttail "
    tokenizer = WordTokenizer()
    ids = torch.tensor(tokenizer.encode(text))
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\n  What is  1 + 2?\n\n\ttail "
    rows = [{"messages": '[{"role": "user", "content": "hi"}]', "extra": 7}] * 5
    seen = []
    with train(rows=rows, respond=lambda draft, rng: seen.append(draft) or "1") as trainer:
        trainer.step()
    assert seen[0].prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (seen[0].columns["messages"], seen[0].columns["extra"]) == (rows[0]["messages"], 7)


class Countdown:
    """Over after so many turns; each gives 0.5."""

    def __init__(self, turns):
        self.left = turns

    def reset(self, seed=None):
        self.seed = seed
        return "begin", {}

    def step(self, action):
        self.left -= 1
        return f"{self.left} left", 0.5, self.left <= 0, False, {"metrics": {"left": self.left}}


def say(messages, rng):
    return f"turn {sum(message['role'] == 'assistant' for message in messages)}"


def test_a_trajectory_is_over_or_cut_short_by_its_last_step_or_by_a_full_context():
    manager = FakeTrajEnvManager(env=Countdown(2), respond=say, env_config={"tag": "count"}, seed=5)
    rollout = manager.play(episode_id=4)
    assert (manager.env.seed, rollout.non_tensor_batch["step_scores"].tolist()) == (9, [[0.5, 0.5]])
    trained = rollout.batch["input_ids"][0][rollout.batch["response_mask"][0]]
    assert manager.tokenizer.decode(trained) == "turn 0<|im_end|>turn 1<|im_end|>"
    assert rollout.meta_info["metrics"] == {"env/count/left": 0.5, "env/count/num_actions": 2}
    for cut in (
        {"respond": say, "env_config": {"max_steps": 1}},
        {"respond": lambda m, _: "x" if m[2:] == [] else None},
    ):
        rollout = FakeTrajEnvManager(env=Countdown(5), **cut).play()
        assert rollout.non_tensor_batch["step_scores"].tolist() == [[0.5]]
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
