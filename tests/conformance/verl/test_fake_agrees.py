"""`FakeVerlTrainer`'s parts against verl's own functions: the same input, numbers to 1e-6, the same kinds of errors.

Whole trainings are compared elsewhere, with their metrics; these call verl's functions on the CPU.
"""

from __future__ import annotations

import asyncio
import copy
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from qreward_plugins.testing.data_proto import VerlColumns, VerlDataProto
from qreward_plugins.testing.verl import agent_loop, estimates
from qreward_plugins.testing.verl.generation import AgentOutput
from qreward_plugins.testing.verl.trainer import _NOT_CHECKED, compose_config
from tests.kit import later

later("verl")
torch = later("torch")

# verl's own warnings are ignored, those of our packages stay errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    *(
        pytest.mark.filterwarnings(f"error:::{package}")
        for package in ("qreward_plugins", "verl_adapter", "slime_adapter", "roll_adapter", "hydra_plugins")
    ),
]


def both(*plays):
    """What verl and the stand-in return, or the kinds of their errors."""
    results = []
    for play in plays:
        try:
            results.append(play())
        except Exception as error:
            results.append(type(error).__name__)
    return results


def as_real(data):
    """The same rows as verl's `DataProto`."""
    from tensordict import TensorDict
    from verl import DataProto

    tensors = {name: torch.tensor(np.array(values)) for name, values in data.batch.items()}
    return DataProto(
        batch=TensorDict(tensors, batch_size=len(data)), non_tensor_batch=data.non_tensor_batch, meta_info={}
    )


@pytest.mark.parametrize("norm", [True, False], ids=["by std", "not by std"])
@pytest.mark.parametrize("name", sorted(estimates.ESTIMATORS))
def test_advantages(name, norm):
    """Rewards at the last tokens, masks with holes, groups of different sizes."""
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rng = np.random.default_rng(7)
    named = {"adv_estimator": name, "gamma": 0.97, "lam": 0.93, "norm_adv_by_std_in_grpo": norm}
    named["config"] = OmegaConf.create({**named, "use_pf_ppo": False})
    for trial in range(20):
        rows, width, size = (int(rng.integers(2, most)) for most in (24, 30, 13))
        uids = [f"u{row // size}x" if trial % 2 else f"u{rng.integers(0, 4)}x" for row in range(rows)]
        mask, rewards = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.float32)
        for row in range(rows):
            length = int(rng.integers(1, width + 1))
            mask[row, :length] = 1
            if length > 3 and rng.random() < 0.3:
                mask[row, 1:3] = 0
            rewards[row, length - 1] = rng.choice([0.0, 1.0, 0.1, 1 / 3, rng.normal()])
        tensors = {"token_level_rewards": rewards, "response_mask": mask}
        tensors |= {"values": rng.normal(size=mask.shape).astype(np.float32)} if name == "gae" else {}
        played = VerlDataProto(VerlColumns(tensors, rows), {"uid": np.array(uids, dtype=object)})
        data = as_real(played)
        real, fake = both(
            lambda data=data: compute_advantage(data, **named).batch,
            lambda played=played: estimates.compute_advantage(played, **named).batch,
        )
        if isinstance(real, str):
            assert fake == real
            continue
        for column in ("advantages", "returns"):
            trained = 1 if column == "returns" else mask
            pair = np.asarray(real[column]) * trained, fake[column] * trained
            assert np.allclose(*pair, rtol=1e-6, atol=2e-6, equal_nan=True), (trial, column)


COLUMNS = {
    "raw_prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "What?"}],
    "data_source": "test/add",
    "reward_model": {"style": "rule", "ground_truth": "42"},
    "extra_info": {"index": 3, "split": "train"},
    "uid": "u1",
    "global_steps": 5,
    "session_id": 0,
    "ability": None,
}


@pytest.mark.parametrize("count", [1, 2], ids=["one output", "two outputs"])
def test_what_run_single_gets(count):
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput, AgentLoopWorker

    seen = []

    async def remote(data):
        seen.append(copy.deepcopy(data))
        return {"reward_score": 1.0, "reward_extra_info": {}}

    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=remote))
    worker = SimpleNamespace(processor=None, distillation_enabled=False, reward_loop_worker_handles=[handle])
    for name in ("_compute_score", "_compute_multi_modal_inputs", "_compute_position_ids"):
        setattr(worker, name, getattr(AgentLoopWorker, name).__get__(worker))
    worker._get_mm_processor_kwargs = lambda audio: {}
    outputs = [AgentOutput([5], [8, 9, 10, 11], [1, 0, 0, 1], 4), AgentOutput([5, 6, 7], [8], [1], 2)][-count:]
    names = ("prompt_ids", "response_ids", "response_mask", "num_turns", "extra_fields")
    real = [
        AgentLoopOutput(metrics=AgentLoopMetrics(), **{name: copy.deepcopy(getattr(each, name)) for name in names})
        for each in outputs
    ]
    asyncio.run(worker._compute_score(real, COLUMNS))
    fake = agent_loop.reward_input(outputs, COLUMNS)
    (real,) = seen
    assert set(real.batch.keys()) == set(fake.batch)
    for name, values in fake.batch.items():
        assert np.array_equal(np.asarray(real.batch[name]), np.asarray(values), equal_nan=True), name
        assert str(real.batch[name].dtype) == f"torch.{values.dtype}"
    assert list(real.non_tensor_batch) == list(fake.non_tensor_batch)
    for name, values in fake.non_tensor_batch.items():
        other = real.non_tensor_batch[name]
        assert (other.dtype, other.shape, other.tolist()) == (values.dtype, values.shape, values.tolist()), name


SMALLER = {
    *(f"actor_rollout_ref.rollout.{name}" for name in ("n", "prompt_length", "response_length")),
    "reward.num_workers",
    *(f"data.{name}" for name in ("max_prompt_length", "max_response_length", "train_batch_size")),
}


def leaves(node, path=""):
    for key in node:
        where = f"{path}.{key}" if path else str(key)
        if OmegaConf.is_missing(node, key):
            yield where, "???"
        elif OmegaConf.is_dict(node[key]) and len(node[key]):
            yield from leaves(node[key], where)
        else:
            yield where, OmegaConf.to_container(node[key]) if OmegaConf.is_config(node[key]) else node[key]


def test_the_defaults_are_verls_and_no_checked_key_is_missing():
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        real, fake = dict(leaves(compose("ppo_trainer"))), dict(leaves(compose_config([])))
    for path, value in fake.items():
        if path not in SMALLER and value not in ("???", {}):
            assert real[path] == value, path
    nodes = {path.rpartition(".")[0] for path in fake if not _NOT_CHECKED.match(f"{path}=")}
    left_out = {path for path in real.keys() - fake.keys() if path.rpartition(".")[0] in nodes - {""}}
    left_out = {path for path in left_out if "_target_" not in path and not _NOT_CHECKED.match(f"{path}=")}
    assert not left_out, "an override of them would be refused"
