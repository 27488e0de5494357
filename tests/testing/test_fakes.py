"""What the three fake trainers share: seeds, held generations, time limits, and that nothing is left behind."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import CancelledError

import pytest

from qreward_plugins import testing
from qreward_plugins.testing import FakeRollTrainer, FakeSlimeTrainer, FakeVerlTrainer, RollDataProto
from qreward_plugins.testing.roll.generation import torch
from qreward_plugins.testing.roll.workers import Worker

from ..kit import FRAMEWORKS, each_of


class Ones(Worker):
    async def compute_rewards(self, data):
        ones, tokens = torch.ones(len(data)), torch.zeros(len(data), data.batch["responses"].shape[-1])
        tensors = {"token_level_rewards": tokens, "response_level_rewards": ones, "scores": ones}
        return RollDataProto.from_dict(tensors, meta_info={"metrics": {}})


async def one(args, sample):
    return 1.0


def make(framework, **named):
    """A trainer of one group of four responses."""
    if framework == "verl":
        overrides = ["algorithm.adv_estimator=grpo", "data.train_batch_size=1"]
        return FakeVerlTrainer(overrides, reward=lambda **_: 1.0, **named)
    if framework == "slime":
        return FakeSlimeTrainer(custom_rm_path=one, rollout_batch_size=1, **named)
    flags = {"adv_estimator": "grpo", "rollout_batch_size": 1, "is_num_return_sequences_expand": True}
    return FakeRollTrainer({"math": {"worker_cls": Ones}}, **flags, **named)


def step(trainer):
    return trainer.rollout() if isinstance(trainer, FakeSlimeTrainer) else trainer.step()


def start(trainer):
    return trainer.start_rollout() if isinstance(trainer, FakeSlimeTrainer) else trainer.start_step()


def number_of(draft):
    return draft.index if hasattr(draft, "index") else draft.number


def responses_of(made):
    return [sample.response for sample in made.samples] if hasattr(made, "samples") else made.responses


@each_of("framework", FRAMEWORKS)
def test_the_same_seed_gives_the_same_responses_and_another_seed_others(framework):
    def responses(seed):
        with make(framework, seed=seed) as trainer:
            return [responses_of(step(trainer)) for _ in range(2)]

    assert responses(3) == responses(3) != responses(4)


@each_of("framework", FRAMEWORKS)
def test_a_held_generation_waits_for_its_release_and_a_test_may_act_meanwhile(framework):
    with make(framework, hold=lambda draft: True) as trainer:
        running = start(trainer)
        trainer.wait_until_held(4)
        with pytest.raises(TimeoutError, match="4 generations were held"):
            trainer.wait_until_held(5, timeout_s=0.01)
        assert trainer.release(lambda draft: number_of(draft) == 3) == 1
        assert not running.done()
        assert trainer.release() == 3
        assert len(responses_of(running.result(20))) == 4


@each_of("framework", FRAMEWORKS)
def test_a_step_that_takes_longer_than_allowed_says_what_is_missing(framework):
    with (
        make(framework, hold=lambda draft: True, timeout_s=0.1) as trainer,
        pytest.raises(TimeoutError, match=r"after 0.1 s 4 held generations are pending"),
    ):
        step(trainer)


@each_of("framework", FRAMEWORKS)
def test_closing_ends_what_runs_and_leaves_nothing_behind(framework):
    trainer = make(framework, hold=lambda draft: True)
    running = start(trainer)
    trainer.wait_until_held(4)
    trainer.close()
    trainer.close()
    with pytest.raises(CancelledError):
        running.result(20)
    with pytest.raises(RuntimeError, match=r"closed|has ended"):
        step(trainer)
    if framework != "verl":  # whose stand-ins are there until it is closed
        step(make(framework))  # is never closed
    gc.collect()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake-")]


def test_a_missing_package_is_told_with_the_command_that_installs_it(monkeypatch):
    def import_module(name, package):
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")

    monkeypatch.setattr(testing, "import_module", import_module)
    told = r'FakeVerlTrainer needs numpy.*pip install "qreward-plugins\[testing\]"'
    with pytest.raises(ModuleNotFoundError, match=told):
        _ = testing.FakeVerlTrainer
