"""The fake ROLL trainer as a whole: flags, workers, stand-ins, and that it leaves nothing behind."""

from __future__ import annotations

import gc
import importlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import qreward_plugins.testing
from qreward_plugins.testing import FakeRollTrainer, FakeTrajEnvManager, RollDataProto, roll_stand_in
from qreward_plugins.testing.roll.protocol import torch
from qreward_plugins.testing.roll.workers import Worker, register
from tests.kit import each_of


class Ones(Worker):
    """Every response is right."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self.environments = [os.environ.get("QREWARD_TEST_KEY")]

    @register()
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)
        self.environments.append(os.environ.get("QREWARD_TEST_KEY"))

    async def compute_rewards(self, data: Any) -> Any:
        ones = torch.ones(len(data))
        tokens = torch.zeros(len(data), data.batch["responses"].shape[-1])
        return RollDataProto.from_dict({"token_level_rewards": tokens, "response_level_rewards": ones, "scores": ones})


class Sync(Worker):
    def compute_rewards(self, data: Any) -> Any:
        raise AssertionError("never called")


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fake-roll")]


@each_of(
    ("flag", "nearest"),
    [
        ("num_return_sequences", "num_return_sequences_in_group"),
        ("user_defined_rollout_loop", "user_defined_rollout_loop_cls"),
        ("adv_estimater", "adv_estimator"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"FakeRollTrainer has no {flag!r}: did you mean {nearest!r}"):
        FakeRollTrainer({"d": {"worker_cls": Ones}}, **{flag: 1})


@each_of(
    ("reward", "message"),
    [
        (
            {"reward_manager": []},
            r"rewards.d has no 'reward_manager': did you mean 'reward_manager_config'.*ROLL itself ignores",
        ),
        ({"query_filter_config": {"kind": "x"}}, "query_filter_config has no 'kind'"),
    ],
)
def test_an_unknown_key_of_a_reward_names_the_nearest(reward: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FakeRollTrainer({"d": {"worker_cls": Ones, **reward}})


@each_of(
    ("flags", "message"),
    [
        ({"rewards": {}}, "rewards is empty"),
        ({"rewards": {"d": {}}}, r"rewards.d.worker_cls is missing"),
        ({"rewards": {"d": {"worker_cls": Ones, "world_size": 0}}}, "world_size must be 1 or more"),
        ({"rewards": {"d": {"worker_cls": Ones, "reward_manager_config": {"a": 1}}}}, "must be a list"),
        ({"rewards": {"d": {"worker_cls": Ones, "system_envs": {"A": 1}}}}, "Ray takes no int"),
        ({"rewards": {"d": {"worker_cls": Ones, "query_filter_config": {"type": "x"}}}}, "query_filter_config.type"),
        ({"rewards": {"d": {"worker_cls": Sync, "max_concurrency": 4}}}, "without async methods has max_concurrency 1"),
        ({"rollout_batch_size": 0}, "1 or more"),
        ({"rollout_batch_size": 16}, "has 16 rows: ROLL needs more"),
        ({"rows": {"d": ["a"]}}, "has 1 rows"),
        ({"sequence_length": 128}, "leaves no room"),
        ({"val_prompt_length": 8}, "must be set simultaneously"),
        ({"val_rows": [{"prompt": "a", "domain": "x"}]}, "for which there is no reward"),
        (
            {"rewards": {"d": {"worker_cls": Ones}, "e": {"worker_cls": Ones}}, "rollout_batch_size": 1},
            "leaves no prompt for d",
        ),
    ],
)
def test_what_roll_would_not_start_with_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FakeRollTrainer(**{"rewards": {"d": {"worker_cls": Ones}}, **flags})
    assert threads() == []


@each_of(
    ("flags", "message"),
    [
        ({"rows": {"x": ["a"]}}, "has no 'x'"),
        ({"domain_interleave_probs": {"x": 1.0}}, "has no 'x'"),
        ({"generating_args": {"temprature": 0}}, "did you mean 'temperature'"),
    ],
)
def test_names_that_nothing_has_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        FakeRollTrainer({"d": {"worker_cls": Ones}}, **flags)


@each_of(
    ("flag", "value"),
    [
        ("async_generation_ratio", 1),
        ("is_use_additional_prompts", True),
        ("reward_clip", 1.0),
        ("whiten_advantages", True),
        ("adv_estimator", "gigpo"),
        ("norm_mean_type", "running"),
    ],
)
def test_what_is_not_played_is_refused_by_its_name(flag: str, value: Any) -> None:
    with pytest.raises(NotImplementedError, match=f"{flag}={value} is not played by FakeRollTrainer"):
        FakeRollTrainer({"d": {"worker_cls": Ones}}, **{flag: value})


def test_the_configuration_has_rolls_defaults_and_what_roll_derives() -> None:
    reward = {"worker_cls": Ones, "tag_included": ["a", "b"], "reward_manager_config": [{"k": 1}]}
    with FakeRollTrainer({"d": reward}, response_length=10, generating_args={"temperature": 0.5}) as trainer:
        config = trainer.pipeline_config
    assert (config.rpc_timeout, config.adv_estimator, config.lambd, config.generate_opt_level) == (3600, "gae", 0.95, 1)
    assert (config.sequence_length, config.val_sequence_length, config.async_pipeline) == (138, 138, False)
    sampling = config.actor_infer.generating_args
    assert (sampling.num_return_sequences, sampling.max_new_tokens, sampling.temperature) == (4, 10, 0.5)
    assert config.validation.generating_args.num_return_sequences == 1
    assert config.tag_2_domain == {"a": "d", "b": "d"}
    node = config.rewards["d"]
    # ROLL gives its clusters a name, and leaves that of the configuration alone.
    assert (node.name, node.worker_cls, node.world_size) == (None, f"{__name__}.Ones", 1)
    assert (node.reward_manager_config, node.query_filter_config.type) == ([{"k": 1}], "no_filter")


def test_a_worker_has_copies_of_its_configuration_and_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QREWARD_TEST_KEY", raising=False)
    rewards = {
        "d": {"worker_cls": Ones, "system_envs": {"QREWARD_TEST_KEY": "secret"}},
        "e": {"worker_cls": Ones},
    }
    with FakeRollTrainer(rewards) as trainer:
        (first,), (second,) = trainer.workers("d"), trainer.workers("e")
        assert (first.environments, second.environments) == (["secret", "secret"], [None, None])
        assert first.worker_config == trainer.pipeline_config.rewards["d"]
        assert first.worker_config is not first.pipeline_config.rewards["d"]
        assert first.pipeline_config is not trainer.pipeline_config
        tokenizers = {id(worker.pipeline_config.actor_train.model_args.qreward_tokenizer) for worker in (first, second)}
        assert len(tokenizers) == 1
    assert "QREWARD_TEST_KEY" not in os.environ
    assert "CLUSTER_NAME" not in os.environ


def test_an_error_of_initialize_ends_the_start() -> None:
    class Wrong(Ones):
        def initialize(self, pipeline_config: Any) -> None:
            raise LookupError("misconfigured")

    with pytest.raises(LookupError, match="misconfigured"):
        FakeRollTrainer({"d": {"worker_cls": Wrong}})
    assert threads() == []


def test_only_workers_on_the_stand_in_are_taken() -> None:
    class Foreign:
        pass

    with pytest.raises(TypeError, match="Foreign is not made on the Worker of roll_stand_in"):
        FakeRollTrainer({"d": {"worker_cls": Foreign}})


def test_closing_ends_everything_and_may_be_repeated() -> None:
    class Closing(Ones):
        closed = 0

        async def close(self) -> None:
            Closing.closed += 1

    trainer = FakeRollTrainer({"d": {"worker_cls": Closing, "world_size": 2}, "e": {"worker_cls": Sync}})
    assert threads()
    trainer.close()
    trainer.close()
    assert threads() == []
    assert Closing.closed == 2
    with pytest.raises(RuntimeError, match="closed"):
        trainer.step()


def test_an_error_of_a_close_comes_out_when_everything_is_closed() -> None:
    closed: list[int] = []

    class Failing(Ones):
        def close(self) -> None:
            closed.append(self.rank)
            if self.rank == 0:
                raise LookupError("not closed")

    trainer = FakeRollTrainer({"d": {"worker_cls": Failing, "world_size": 2}})
    with pytest.raises(LookupError, match="not closed"):
        trainer.close()
    assert closed == [0, 1]
    assert threads() == []


def test_a_trainer_that_is_dropped_stops_its_threads() -> None:
    trainer = FakeRollTrainer({"d": {"worker_cls": Ones}})
    trainer.step()
    del trainer
    gc.collect()
    assert threads() == []


def test_validation_needs_rows() -> None:
    with FakeRollTrainer({"d": {"worker_cls": Ones}}) as trainer, pytest.raises(ValueError, match="set val_rows"):
        trainer.validate()


def test_the_stand_in_has_a_few_names_and_no_more() -> None:
    with roll_stand_in(over_installed=True) as needed:
        assert needed is True
        protocol = importlib.import_module("roll.distributed.scheduler.protocol")
        loops = importlib.import_module("roll.distributed.scheduler.user_defined_rollout_loop")
        envs = importlib.import_module("roll.pipeline.agentic.env_manager.traj_env_manager")
        assert protocol.DataProto is RollDataProto
        assert envs.TrajEnvManager is FakeTrajEnvManager
        assert loops.expand_requests
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("roll.distributed.scheduler.router")
    assert "roll.distributed.scheduler.protocol" not in sys.modules


def test_an_installed_roll_is_left_alone_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "roll" / "distributed" / "executor"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "worker.py").write_text("class Worker: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with roll_stand_in() as needed:
            assert needed is False
            own = importlib.import_module("roll.distributed.executor.worker")
            assert own.Worker is not Worker
        with roll_stand_in(over_installed=True) as needed:
            assert needed is True
            assert importlib.import_module("roll.distributed.executor.worker").Worker is Worker
        assert sys.modules["roll.distributed.executor.worker"] is own
        with pytest.raises(TypeError, match="over_installed=True"):
            FakeRollTrainer({"d": {"worker_cls": own.Worker}})
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "roll"]:
            del sys.modules[name]


def test_another_project_of_that_name_is_no_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    other = ModuleType("roll")
    monkeypatch.setitem(sys.modules, "roll", other)
    with roll_stand_in() as needed:
        assert needed is True
    assert sys.modules["roll"] is other


def test_a_class_is_found_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_rewards.py").write_text(
        "from qreward_plugins.testing.roll.protocol import torch\n"
        "from roll.distributed.executor.worker import Worker\n"
        "from roll.distributed.scheduler.protocol import DataProto\n"
        "from roll.distributed.scheduler.user_defined_rollout_loop import UserDefinedRolloutLoop\n"
        "class Loop(UserDefinedRolloutLoop): pass\n"
        "class Mine(Worker):\n"
        "    async def compute_rewards(self, data):\n"
        "        told = torch.ones(len(data))\n"
        "        tokens = torch.zeros(len(data), data.batch['responses'].shape[-1])\n"
        "        tensors = {'token_level_rewards': tokens, 'response_level_rewards': told, 'scores': told.clone()}\n"
        "        return DataProto.from_dict(tensors=tensors, meta_info={'metrics': {}})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_rewards", raising=False)
    with (
        roll_stand_in(over_installed=True),
        FakeRollTrainer(
            {"d": {"worker_cls": "my_rewards.Mine"}}, user_defined_rollout_loop_cls="my_rewards.Loop"
        ) as trainer,
    ):
        assert trainer.step().scores == [1.0] * 16
        assert trainer.pipeline_config.rewards["d"].worker_cls == "my_rewards.Mine"
    with pytest.raises(ModuleNotFoundError):
        FakeRollTrainer({"d": {"worker_cls": "no_such_rewards.Mine"}})


def test_a_training_with_the_adapter_needs_no_torch() -> None:
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


def test_the_names_are_exported() -> None:
    names = "FakeRollTrainer FakeTrajEnvManager RollDataProto RollDraft RollStep RollValidation roll_stand_in"
    for name in names.split():
        assert name in qreward_plugins.testing.__all__
        assert getattr(qreward_plugins.testing, name).__module__.startswith("qreward_plugins.testing.roll.")
