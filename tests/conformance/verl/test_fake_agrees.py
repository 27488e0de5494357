"""`FakeVerlTrainer`'s parts against verl's own functions: the same input, numbers to 1e-6, the same kinds of errors.

Whole trainings are compared elsewhere; these call verl's functions on the CPU.
"""

from __future__ import annotations

import asyncio
import copy
import math
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
torch = pytest.importorskip("torch")

from qreward_plugins.testing.verl import advantages, agent_loop, metrics  # noqa: E402
from qreward_plugins.testing.verl.configuration import _NOT_CHECKED, compose_config  # noqa: E402
from qreward_plugins.testing.verl.engine import AgentOutput  # noqa: E402
from qreward_plugins.testing.verl.protocol import TensorColumns, VerlDataProto  # noqa: E402
from qreward_plugins.testing.verl.replay_buffer import ReplayBuffer, TransferQueue  # noqa: E402

from .agreement import VERLS_WARNINGS, as_real, both, of_worker, real_output, same  # noqa: E402

pytestmark = VERLS_WARNINGS


def close(real, fake):
    return np.allclose(np.asarray(real), np.asarray(fake), rtol=1e-6, atol=2e-6, equal_nan=True)


def kind(text):
    return text.split(":")[0]


def a_batch(rng, *, groups):
    """Rewards at the last tokens, masks with holes, groups of different sizes."""
    rows, width = int(rng.integers(2, 24)), int(rng.integers(2, 30))
    size = int(rng.integers(2, 13))
    uids = [f"u{row // size}x" for row in range(rows)] if groups else [f"u{each}x" for each in rng.integers(0, 4, rows)]
    mask, rewards = np.zeros((rows, width), np.int64), np.zeros((rows, width), np.float32)
    for row in range(rows):
        length = int(rng.integers(1, width + 1))
        mask[row, :length] = 1
        if length > 3 and rng.random() < 0.3:
            mask[row, 1:3] = 0
        rewards[row, length - 1] = rng.choice([0.0, 1.0, 0.1, 1 / 3, rng.normal()])
    return rewards, mask, np.array(uids, dtype=object)


@pytest.mark.parametrize("norm", [True, False], ids=["by std", "not by std"])
@pytest.mark.parametrize("name", sorted(advantages.ESTIMATORS))
def test_advantages(name, norm):
    from verl.trainer.ppo.ray_trainer import compute_advantage

    rng = np.random.default_rng(7)
    named = {"adv_estimator": name, "gamma": 0.97, "lam": 0.93, "norm_adv_by_std_in_grpo": norm}
    gdpo = {"gdpo_reward_keys": ["style", "truth"], "gdpo_reward_weights": [0.5, 2.0]}
    named["config"] = OmegaConf.create({**named, **gdpo, "use_pf_ppo": False})
    for trial in range(20):
        rewards, mask, uids = a_batch(rng, groups=trial % 2)
        tensors = {
            "token_level_rewards": rewards,
            "response_mask": mask,
            "prompts": mask,
            "attention_mask": np.hstack([mask, mask]),
        }
        tensors |= {"values": rng.normal(size=mask.shape).astype(np.float32)} if name == "gae" else {}
        tensors |= {"reward_baselines": rng.normal(size=len(mask)).astype(np.float32)} if name == "remax" else {}
        parts = {key: rng.normal(size=len(mask)).astype(np.float32) for key in gdpo["gdpo_reward_keys"]}
        played = VerlDataProto(TensorColumns(tensors, len(mask)), {"uid": uids, **parts})
        data = as_real(played)
        real, fake = both(
            lambda data=data: compute_advantage(data, **named).batch,
            lambda played=played: advantages.compute_advantage(played, **named).batch,
        )
        if isinstance(real, str):
            assert kind(fake) == kind(real)
        else:
            for column in ("advantages", "returns"):
                trained = 1 if column == "returns" else mask
                assert close(np.asarray(real[column]) * trained, fake[column] * trained), (trial, column)


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_plus_plus"])
def test_advantages_of_several_outputs(name):
    from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

    rng = np.random.default_rng(5)
    config = OmegaConf.create({"gamma": 1.0, "lam": 1.0})
    for _ in range(20):
        rewards, mask, uids = a_batch(rng, groups=True)
        keys, counts = [], {}
        for uid in uids:
            counts[uid] = counts.get(uid, -1) + 1
            keys.append(f"{uid}_{counts[uid] // 2}_{counts[uid] % 2}")
        named = {"batch_keys": keys, "adv_estimator": name, "config": config}
        played = VerlDataProto(
            TensorColumns({"token_level_rewards": rewards, "response_mask": mask}, len(mask)), {"uid": uids}
        )
        real = compute_advantage_for_multi_trajectories(as_real(played), **named)
        fake = advantages.compute_advantage_for_multi_trajectories(played, **named)
        assert close(real.batch["advantages"], fake.batch["advantages"])
        assert close(real.batch["returns"], fake.batch["returns"])


def test_validation_metrics():
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    rng = np.random.default_rng(11)
    for trial in range(6):
        sizes = [int(rng.integers(1, 7)) for _ in range(4)]
        uids = [f"u{place}" for place, size in enumerate(sizes) for _ in range(size)]
        sources = [f"s{int(uid[1:]) % 2}" for uid in uids]
        count = len(uids)
        infos = {
            "reward": [float(each) for each in rng.choice([0.0, 1.0, 0.25], count)],
            "acc": [None if rng.random() < 0.2 else bool(each) for each in rng.integers(0, 2, count)],
            "why": ["because"] * count,
            "strange": [math.nan if rng.random() < 0.2 else 1 for _ in range(count)],
        }
        expected = {(f"s{place % 2}", f"u{place}"): size + place % 2 for place, size in enumerate(sizes)}
        named = {"expected_acc_counts": expected if trial % 2 else None}
        real = process_validation_metrics(sources, uids, copy.deepcopy(infos), **named)
        fake = metrics.validation_metrics(sources, uids, infos, **named)
        assert {name: set(each) for name, each in fake.items()} == {name: set(each) for name, each in real.items()}
        for source, by_name in fake.items():
            for name, by_metric in by_name.items():
                theirs = {metric: each for metric, each in real[source][name].items() if metric[:3] in ("mea", "std")}
                assert by_metric == pytest.approx(theirs, rel=1e-6, nan_ok=True), (source, name)


def test_metrics_of_a_step():
    from verl.trainer.ppo.metric_utils import compute_data_metrics

    rng = np.random.default_rng(13)
    for trial in range(20):
        rewards, mask, _ = a_batch(rng, groups=True)
        if trial % 4 == 0:
            mask[0] = 0
        prompts = np.ones((len(mask), 5), np.int64)
        tensors = {
            "token_level_scores": rewards,
            "token_level_rewards": rewards * np.float32(0.5),
            "prompts": prompts,
            "responses": mask,
            "response_mask": mask,
            "attention_mask": np.concatenate([prompts, mask], axis=1),
            **{name: rng.normal(size=mask.shape).astype(np.float32) for name in ("advantages", "returns", "values")},
        }
        turns = rng.integers(1, 5, len(mask)).astype(np.int32)
        batch = VerlDataProto(TensorColumns(tensors, len(mask)), {"__num_turns__": turns})
        real = compute_data_metrics(as_real(batch), use_critic=True)
        fake = metrics.data_metrics(tensors)
        assert set(fake) <= set(real)
        assert fake == pytest.approx({name: real[name] for name in fake}, rel=1e-5, abs=1e-6, nan_ok=True)


OUTPUTS = [
    [AgentOutput([5, 6, 7], [8, 9], [1, 1], 2)],
    [AgentOutput([5], [8, 9, 10, 11], [1, 0, 0, 1], 4), AgentOutput([5, 6, 7], [8], [1], 2)],
]
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


@pytest.mark.parametrize("outputs", OUTPUTS, ids=["one output", "two outputs"])
def test_what_run_single_gets(outputs):
    seen = []

    async def remote(data):
        seen.append(copy.deepcopy(data))
        return {"reward_score": 1.0, "reward_extra_info": {}}

    handle = SimpleNamespace(compute_score=SimpleNamespace(remote=remote))
    worker = of_worker(
        "_compute_score", "_compute_multi_modal_inputs", "_compute_position_ids", reward_loop_worker_handles=[handle]
    )
    worker._get_mm_processor_kwargs = lambda audio: {}
    asyncio.run(worker._compute_score([real_output(each) for each in outputs], COLUMNS))
    fake = agent_loop.reward_input(outputs, COLUMNS)
    (real,) = seen
    assert set(real.batch.keys()) == set(fake.batch)
    for name, values in fake.batch.items():
        assert same(real.batch[name], values), name
        assert str(real.batch[name].dtype) == f"torch.{values.dtype}"
    assert list(real.non_tensor_batch) == list(fake.non_tensor_batch)
    for name, values in fake.non_tensor_batch.items():
        other = real.non_tensor_batch[name]
        assert (other.dtype, other.shape) == (values.dtype, values.shape), name
        assert other.tolist() == values.tolist(), name


@pytest.mark.parametrize("metric", ["reward", "acc", "absent"])
def test_the_group_filter(monkeypatch, metric):
    """Groups of one value are found; verl starts replacements for them, and the stand-in does when it samples."""
    from verl.trainer.ppo.v1 import replay_buffer

    rng = np.random.default_rng(17)
    queue = TransferQueue()
    for number in range(12):
        queue.status["train"][f"p{number}"] = "failure" if number % 5 == 4 else "finished"
        for session in range(4 - (number % 5 == 4)):
            score = float(rng.choice([0.0, 1.0])) if number % 2 else 0.5
            queue.rows["train"][f"p{number}_{session}_0"] = {
                "rm_scores": np.array([0.0, score], np.float32),
                "extra_fields": {"reward_extra_info": {"acc": score}},
            }
    rows = queue.rows["train"]

    def get(keys, partition_id, select_fields):
        (field,) = select_fields
        found = [rows[key][field] for key in keys]
        return {field: [torch.tensor(each) for each in found] if field == "rm_scores" else found}

    monkeypatch.setattr(replay_buffer.tq, "kv_batch_get", get)
    real_buffer = replay_buffer.ReplayBuffer("sync", {}, 8, "drop", {}, 0.0, print, metric, 4, 1, 1, False)
    real_buffer.partitions = {"train": rows}
    real_buffer.finished_keys = {"train": {uid for uid, each in queue.status["train"].items() if each == "finished"}}
    fake_buffer = ReplayBuffer(queue, metric=metric, refill=print)
    one, other = both(
        lambda: real_buffer._dapo_filtered_keys("train"), lambda: fake_buffer._dapo_filtered_keys("train")
    )
    assert other == one if metric != "absent" else kind(other) == kind(one) == "RuntimeError"


def composed(overrides):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


SMALLER = {
    "actor_rollout_ref.actor.ppo_mini_batch_size",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.rollout.prompt_length",
    "actor_rollout_ref.rollout.response_length",
    "critic.ppo_mini_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "trainer.logger",
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
    real, fake = dict(leaves(composed([]))), dict(leaves(compose_config([])))
    for path, value in fake.items():
        if path not in SMALLER and value not in ("???", {}):
            assert real[path] == value, path
    nodes = {path.rpartition(".")[0] for path in fake if not _NOT_CHECKED.match(path)}
    left_out = {path for path in real.keys() - fake.keys() if path.rpartition(".")[0] in nodes - {""}}
    left_out = {path for path in left_out if "_target_" not in path and not _NOT_CHECKED.match(path)}
    assert not left_out, "an override of them would be refused"
