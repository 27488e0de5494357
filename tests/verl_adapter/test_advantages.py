"""verl's own functions compute advantages of batches with failed rows, and of the same batches without these."""

from __future__ import annotations

import importlib
import inspect
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl import DataProto

from qreward_plugins import InputError, JudgeUnavailable, load_config
from qreward_plugins.adapters import Constant
from verl_adapter import queue
from verl_adapter.advantages import NOT_GROUPED, Advantages
from verl_adapter.metrics import RewardLog

ESTIMATORS = (
    *("grpo", "dr_grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gpg"),
    *("reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "gae", "gdpo", "optimal_token_baseline"),
)
V1_ESTIMATORS = tuple(name for name in ESTIMATORS if name not in ("remax", "gdpo", "optimal_token_baseline"))
WIDTH = 5
GROUPS = {"a": "ss.s", "b": "s.ss", "c": "..s.", "d": "....", "e": "ss", "f": "ssssssss", "g": "s", "h": ".s"}
"""A sample that failed is a point. The groups are of different sizes (`__rollout_n__`), and the rows are mixed."""
NUMBERS = ("floor", "attempts", "latency_s", "tokens", "cost_usd", "cached", "cut")


@pytest.fixture(scope="module")
def verl():
    """verl's functions, which nobody has wrapped."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # verl tells of every engine that is not installed
        legacy = importlib.import_module("verl.trainer.ppo.ray_trainer").compute_advantage
        v1 = importlib.import_module("verl.trainer.ppo.v1.utils").compute_advantage_for_multi_trajectories
    return SimpleNamespace(legacy=inspect.unwrap(legacy), v1=inspect.unwrap(v1))


def batch_of(groups, outputs=1, seed=3):
    """A batch with all that any estimator reads, the keys of its rows, and which of them failed."""
    rows = [(uid, session, mark == ".") for uid, marks in groups.items() for session, mark in enumerate(marks)]
    rows = [(*row, index) for row in rows for index in range(outputs)]
    rng = torch.Generator().manual_seed(seed)
    rows = [rows[place] for place in torch.randperm(len(rows), generator=rng)]
    count, draw = len(rows), lambda *shape: torch.rand(*shape, generator=rng)
    lengths = torch.randint(1, WIDTH + 1, (count,), generator=rng)
    there = (torch.arange(WIDTH) < lengths[:, None]).long()
    scores = {(uid, session): draw(1).item() for uid, session, _, _ in rows}
    rewards = torch.zeros(count, WIDTH)
    values = [(0.0 if failed else scores[uid, session]) for uid, session, failed, _ in rows]
    rewards[torch.arange(count), lengths - 1] = torch.tensor(values)
    tensors = {
        "token_level_rewards": rewards,
        "response_mask": there,
        "values": draw(count, WIDTH),
        "sum_pi_squared": draw(count, WIDTH),
        "old_log_probs": -draw(count, WIDTH),
        "prompts": torch.ones(count, 2, dtype=torch.long),
        "attention_mask": torch.cat([torch.ones(count, 2, dtype=torch.long), there], dim=1),
    }
    failed = [row[2] for row in rows]
    columns = {
        **{f"qreward/{name}": np.zeros(count) for name in NUMBERS},
        "qreward/source": np.array(["judge"] * count),
        "qreward/data_source": np.array(["sums"] * count),
        "qreward/reward": np.array([np.nan if each else number for each, number in zip(failed, values, strict=True)]),
        "uid": np.array([row[0] for row in rows], dtype=object),
        "qreward/missing": np.array(failed, dtype=float),
        "qreward/failed": np.array(failed, dtype=float),
        "qreward/cause": np.array(["infra/deadline" if each else "" for each in failed], dtype=object),
        "raw_prompt": np.array([[{"role": "user"}]] * count, dtype=object),
        "part": np.array([np.nan if each else number for each, number in zip(failed, values, strict=True)]),
    }
    data = DataProto(TensorDict(tensors, batch_size=count), columns)
    return data, [f"{uid}_{session}_{index}" for uid, session, _, index in rows], np.array(failed)


def with_baselines(data, estimator):
    """The batch as verl has it for this estimator: only `remax` is given the rewards of greedy responses."""
    if estimator == "remax":
        data.batch["reward_baselines"] = torch.tensor([ord(uid) / 200 for uid in data.non_tensor_batch["uid"]])
    return data


def settings(estimator):
    by_std = estimator != "dr_grpo"
    config = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": by_std, "gdpo_reward_keys": ["part"]}
    name = {"dr_grpo": "grpo"}.get(estimator, estimator)
    return {
        "adv_estimator": name,
        "gamma": 0.9,
        "lam": 0.8,
        "norm_adv_by_std_in_grpo": by_std,
        "config": OmegaConf.create(config),
    }


def hooked(**changes):
    """Our wrappers, and what they log."""
    tree = {"sources": {"f": {"kind": "function", "function": "math:fsum"}}, "judges": {"j": {"kind": "function"}}}
    log = RewardLog()
    settings = load_config({**tree, "groups": {"give_up_after": 3}}).model_copy(update=changes)
    return Advantages(settings, log), log


def rows_of(data, rows):
    return data.select_idxs(np.array(rows))


def expected_rows(keys, failed, estimator):
    """The rows that are computed: not the failed ones, nor who is left alone of a group that lost others."""
    left, lost = {}, set()
    for key, is_failed in zip(keys, failed, strict=True):
        uid, session, _ = key.split("_")
        lost |= {uid} if is_failed else set()
        left.setdefault(uid, set()).update(() if is_failed else (session,))
    lone = {uid for uid in lost if len(left[uid]) < 2} if estimator not in NOT_GROUPED else set()
    return [row for row, key in enumerate(keys) if not failed[row] and key.split("_")[0] not in lone]


def check(data, computed, rows, estimator):
    others = [row for row in range(len(data)) if row not in rows]
    assert others
    for name in ("advantages", "returns"):
        assert torch.allclose(data.batch[name][rows], computed.batch[name], atol=1e-6), name
    assert (data.batch["advantages"][others] == 0).all()
    others_return = data.batch["values"][others] if estimator == "gae" else torch.zeros(len(others), WIDTH)
    assert torch.equal(data.batch["returns"][others], others_return)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_of_a_batch_the_failed_rows_are_as_if_they_had_never_been_sampled(verl, estimator):
    groups = {uid: marks for uid, marks in GROUPS.items() if estimator != "grpo_passk" or len(marks) > 1}
    data, keys, failed = batch_of(groups)
    data = with_baselines(data, estimator)
    rows = expected_rows(keys, failed, estimator)
    computed = verl.legacy(rows_of(data, rows), **settings(estimator))
    advantages, log = hooked()
    check(advantages.by_columns(verl.legacy)(data, **settings(estimator)), computed, rows, estimator)
    assert data.batch["advantages"].abs().sum() > 0
    metrics = log.since_last()
    assert metrics["qreward/failed_rate"] == metrics["qreward/data/sums/failed_rate"] == failed.mean()
    scored = data.non_tensor_batch["qreward/reward"][~failed]
    assert metrics["qreward/reward/mean"] == pytest.approx(scored.mean())
    assert metrics["qreward/flat_rate"] == 0.0


@pytest.mark.parametrize("outputs", [1, 3])
@pytest.mark.parametrize("estimator", V1_ESTIMATORS)
def test_of_a_batch_of_v1_whole_sessions_are(verl, monkeypatch, estimator, outputs):
    groups = {uid: marks for uid, marks in GROUPS.items() if estimator != "grpo_passk" or len(marks) > 1}
    data, keys, failed = batch_of(groups, outputs)
    columns = dict(data.non_tensor_batch)
    data.non_tensor_batch = {"uid": columns["uid"]}  # V1 reads no other column
    infos = [{name: columns[name][row] for name in columns if "/" in name} for row in range(len(data))]
    monkeypatch.setattr(queue, "_queue", lambda: SimpleNamespace(kv_batch_get=get))
    asked = []

    def get(keys, partition_id, select_fields):
        asked.append((keys, partition_id))
        # An agent loop that rewards its samples itself asks no manager: its rows have no extra info.
        return {"extra_fields": [{"reward_extra_info": info} if info["qreward/missing"] else {} for info in infos]}

    rows = expected_rows(keys, failed, estimator)
    computed = verl.v1(rows_of(data, rows), [keys[row] for row in rows], **settings(estimator))
    advantages, log = hooked()
    check(advantages.by_keys(verl.v1)(data, keys, **settings(estimator)), computed, rows, estimator)
    assert asked == [(keys, "train")]
    assert log.since_last()["qreward/samples"] == failed.sum() / outputs


def in_parts(data, keys):
    """The reward of each session in two parts, as a reward worker tells it: half of it at the first token."""
    rewards = data.batch["token_level_rewards"]
    told = []
    for row, key in enumerate(keys):
        last, reward = int(data.batch["response_mask"][row].sum()) - 1, float(rewards[row].sum())
        told.append(json.dumps([[0, reward / 2], [last, -reward / 2]]) if key.endswith("_0") and reward else "")
    expected = rewards.clone()
    for row, written in enumerate(told):
        for token, added in json.loads(written or "[]"):
            expected[row, token] += added
    return told, expected


@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus", "grpo", "rloo"])
def test_parts_of_rewards_are_at_their_tokens_before_verl_computes(verl, monkeypatch, estimator):
    (data, keys, failed), (again, _, _) = batch_of(GROUPS), batch_of(GROUPS)
    for batch in (data, again):
        batch.batch["token_level_scores"] = batch.batch["token_level_rewards"]
    told, expected = in_parts(data, keys)
    again.batch["token_level_rewards"] = expected
    rows = expected_rows(keys, failed, estimator)
    columns = {**data.non_tensor_batch, "qreward/dense": np.array(told)}
    data.non_tensor_batch = columns
    computed = verl.legacy(rows_of(again, rows), **settings(estimator))
    check(hooked()[0].by_columns(verl.legacy)(data, **settings(estimator)), computed, rows, estimator)
    assert torch.equal(data.batch["token_level_rewards"], expected)
    assert torch.equal(data.batch["token_level_scores"], expected)

    # In V1 the last row of a session was judged, and verl has put the reward at the end of all of its rows.
    data, keys, failed = batch_of(GROUPS, 2)
    data.batch["token_level_scores"] = before = data.batch["token_level_rewards"]
    last = {key.rsplit("_", 1)[0] + "_1" for key in keys}
    told, _ = in_parts(data, [key.replace("_1", "_0") if key in last else f"{key}x" for key in keys])
    infos = [{name: columns[name][0] for name in columns if "/" in name} for _ in keys]
    for info, written, is_failed in zip(infos, told, failed, strict=True):
        info |= {"qreward/dense": written, "qreward/missing": float(is_failed)}
    monkeypatch.setattr(queue, "_extra_fields", lambda *_: [{"reward_extra_info": info} for info in infos])
    data.non_tensor_batch = {"uid": data.non_tensor_batch["uid"]}
    data = hooked()[0].by_keys(verl.v1)(data, keys, **settings(estimator))
    moved = {keys[row] for row in (data.batch["token_level_rewards"] != before).any(dim=1).nonzero().flatten()}
    assert moved
    assert moved <= last
    assert torch.allclose(data.batch["token_level_rewards"].sum(1), before.sum(1))


def test_gdpo_of_v1_adds_up_the_single_rewards(verl, monkeypatch):
    """As the legacy trainer does, which passes them as columns."""
    (data, keys, failed), (again, _, _) = batch_of(GROUPS), batch_of(GROUPS)
    columns = again.non_tensor_batch
    infos = [
        {name: columns[name][row] for name in columns if "/" in name or name == "part"} for row in range(len(keys))
    ]
    monkeypatch.setattr(queue, "_extra_fields", lambda *_: [{"reward_extra_info": info} for info in infos])
    data.non_tensor_batch = {"uid": columns["uid"]}
    for name in ("prompts", "attention_mask"):
        del data.batch[name]
    rows = expected_rows(keys, failed, "gdpo")
    computed = verl.legacy(rows_of(again, rows), **settings("gdpo"))
    check(hooked()[0].by_keys(verl.v1)(data, keys, **settings("gdpo")), computed, rows, "gdpo")
    del infos[rows[0]]["part"]
    with pytest.raises(InputError, match="gdpo_reward_keys: a sample has no 'part'"):
        hooked()[0].by_keys(verl.v1)(data, keys, **settings("gdpo"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_batch_in_which_nothing_failed_is_left_to_verl(verl, estimator):
    groups = {uid: marks.replace(".", "s") for uid, marks in GROUPS.items()}
    groups = {uid: marks for uid, marks in groups.items() if estimator != "grpo_passk" or len(marks) > 1}
    data, again = (with_baselines(batch_of(groups)[0], estimator) for _ in range(2))
    computed = verl.legacy(again, **settings(estimator))
    ours = hooked()[0].by_columns(verl.legacy)(data, **settings(estimator))
    for name in ("advantages", "returns"):
        assert torch.equal(ours.batch[name], computed.batch[name])


def test_with_a_constant_a_failed_row_trains_on_it(verl):
    data, _, _ = batch_of(GROUPS)
    again, _, _ = batch_of(GROUPS)
    advantages, log = hooked(on_failure=Constant(constant=0.0))
    ours = advantages.by_columns(verl.legacy)(data, **settings("grpo"))
    assert torch.equal(ours.batch["advantages"], verl.legacy(again, **settings("grpo")).batch["advantages"])
    assert log.since_last()["qreward/failed"] == 10


def test_a_screened_row_is_left_out_whatever_a_failed_one_trains_on(verl):
    data, keys, out = batch_of(GROUPS)
    again, _, _ = batch_of(GROUPS)
    of_one_group = np.array([uid == "a" for uid in data.non_tensor_batch["uid"]])
    data.non_tensor_batch["qreward/cause"][out & ~of_one_group] = "policy/screened"
    data.non_tensor_batch["qreward/failed"][out & ~of_one_group] = 0.0
    advantages, log = hooked(on_failure=Constant(constant=0.0))
    ours = advantages.by_columns(verl.legacy)(data, **settings("grpo"))
    rows = expected_rows(keys, out & ~of_one_group, "grpo")
    check(ours, verl.legacy(rows_of(again, rows), **settings("grpo")), rows, "grpo")
    metrics = log.since_last()
    assert (metrics["qreward/failed"], metrics["qreward/screened_rate"]) == (1.0, 9 / len(keys))


def test_steps_of_screened_samples_alone_do_not_end_the_run(verl):
    advantages, _ = hooked()
    for _ in range(4):
        data, _, _ = batch_of({"a": "..", "b": "...."})
        data.non_tensor_batch["qreward/cause"][:] = "policy/screened"
        advantages.by_columns(verl.legacy)(data, **settings("grpo"))
        assert (data.batch["advantages"] == 0).all()


@pytest.mark.parametrize("estimator", ["grpo_passk", "gae", "reinforce_plus_plus"])
def test_steps_in_which_all_samples_failed_train_on_nothing_and_the_run_ends_after_some(verl, estimator):
    advantages, _ = hooked()
    compute = advantages.by_columns(verl.legacy)

    def step(**groups):
        data = compute(batch_of(groups)[0], **settings(estimator))
        returns = data.batch["values"] if estimator == "gae" else torch.zeros(len(data), WIDTH)
        return bool((data.batch["advantages"] == 0).all()) and torch.equal(data.batch["returns"], returns)

    assert step(a="..", b="....")
    assert step(a="..", b="....")
    assert not step(a="ss", b="....")
    assert step(a="..", b="....")
    assert step(a="..", b="....")
    with pytest.raises(JudgeUnavailable, match=r"3 steps in a row .*infra/deadline 18 times.*give_up_after"):
        step(a="..", b="....")


def test_rows_that_fill_up_a_batch_are_no_samples(verl, monkeypatch):
    data, keys, _ = batch_of({"a": "..", "padc0ffee": "ss"})
    columns = {name: values for name, values in data.non_tensor_batch.items() if "/" in name}
    infos = [{name: values[row] for name, values in columns.items()} for row in range(len(data))]
    monkeypatch.setattr(queue, "_extra_fields", lambda *_: [{"reward_extra_info": info} for info in infos])
    advantages, log = hooked()
    for _ in range(2):
        advantages.by_keys(verl.v1)(data, keys, **settings("rloo"))
    assert log.since_last()["qreward/samples"] == 4
    with pytest.raises(JudgeUnavailable):
        advantages.by_keys(verl.v1)(data, keys, **settings("rloo"))


def test_a_prompt_whose_greedy_response_failed_has_nothing_to_be_compared_with(verl):
    """verl subtracts the reward of the greedy response, whose extra info it drops."""
    advantages, _ = hooked()
    data = with_baselines(batch_of({"a": "ss", "b": "ss"})[0], "remax")
    prompts = SimpleNamespace(non_tensor_batch={"uid": [*"aabbab"], "__do_sample__": [True] * 4 + [False] * 2})
    output = SimpleNamespace(non_tensor_batch={"qreward/missing": [0.0, 0.0, 0.0, 0.0, 0.0, 1.0]})
    assert advantages.of_greedy(lambda loops, prompts: output)(None, prompts) is output
    for expected in ({"a"}, {"a", "b"}):
        ours = advantages.by_columns(verl.legacy)(data, **settings("remax"))
        trained = ours.batch["advantages"].abs().sum(-1) > 0
        assert set(data.non_tensor_batch["uid"][trained.numpy()]) == expected


def test_every_estimator_of_this_verl_is_known_here():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    names = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY}
    assert names == {*ESTIMATORS, "tir_optimal_token_baseline"} - {"dr_grpo"}


def test_extra_info_of_a_colocated_reward_model_is_put_where_all_other_rows_have_it(monkeypatch):
    """V1 puts each key into a field of its own. The fields of an agent loop stay."""
    infos = [{"qreward/missing": 1.0, "acc": 0.5}, {"qreward/missing": 0.0, "acc": 1.0}]
    rows = {"a_0_0": {"turns": [1]}, "a_1_0": {"turns": []}}

    def get(keys, partition_id, select_fields):
        stored = np.empty(len(keys), dtype=object)
        stored[:] = [rows[key] for key in keys]
        return {"extra_fields": stored}

    def put(keys, partition_id, fields):
        rows.update(zip(keys, list(fields["extra_fields"]), strict=True))

    monkeypatch.setattr(queue, "_queue", lambda: SimpleNamespace(kv_batch_get=get, kv_batch_put=put))
    columns = {name: np.array([info[name] for info in infos]) for name in infos[0]}
    output = SimpleNamespace(non_tensor_batch=columns, meta_info={"reward_extra_keys": list(columns)})
    manager = SimpleNamespace()
    queue.noting_infos(lambda self, data: output)(manager, rows)
    batch = SimpleNamespace(keys=list(rows), partition_id="val")
    queue.with_extra_info(lambda self, batch: batch)(SimpleNamespace(reward_loop_manager=manager), batch)
    assert queue.extra_info(batch.keys, "val") == infos
    assert [row["turns"] for row in rows.values()] == [[1], []]
