"""verl's own functions compute advantages of batches with failed rows, and of the same batches without these."""

from __future__ import annotations

import inspect
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from qreward_plugins import InputError, JudgeUnavailable, load_config
from qreward_plugins.config import Constant
from verl_adapter import batches
from verl_adapter.advantages import NOT_GROUPED, Advantages
from verl_adapter.metrics import RewardLog
from verl_adapter.startup import _BEYOND_V1

from ..kit import imported, later

torch, tensordict, protocol = later("torch"), later("tensordict"), later("verl.protocol")

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
    legacy = imported("verl.trainer.ppo.ray_trainer").compute_advantage
    v1 = imported("verl.trainer.ppo.v1.utils").compute_advantage_for_multi_trajectories
    return SimpleNamespace(legacy=inspect.unwrap(legacy), v1=inspect.unwrap(v1))


def batch_of(groups, outputs=1, estimator=""):
    """A batch with all that any estimator reads, the keys of its rows, and which of them failed."""
    if estimator == "grpo_passk":
        groups = {uid: marks for uid, marks in groups.items() if len(marks) > 1}
    rows = [(uid, session, mark == ".") for uid, marks in groups.items() for session, mark in enumerate(marks)]
    rows = [(*row, index) for row in rows for index in range(outputs)]
    rng = torch.Generator().manual_seed(3)
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
    if estimator == "remax":  # only it is given the rewards of greedy responses
        tensors["reward_baselines"] = torch.tensor([ord(row[0]) / 200 for row in rows])
    failed = [row[2] for row in rows]
    reward = np.array([np.nan if each else number for each, number in zip(failed, values, strict=True)])
    columns = {
        **{f"qreward/{name}": np.zeros(count) for name in NUMBERS},
        "qreward/source": np.array(["judge"] * count),
        "qreward/data_source": np.array(["sums"] * count),
        "qreward/reward": reward,
        "uid": np.array([row[0] for row in rows], dtype=object),
        "qreward/missing": np.array(failed, dtype=float),
        "qreward/failed": np.array(failed, dtype=float),
        "qreward/cause": np.array(["infra/deadline" if each else "" for each in failed], dtype=object),
        "part": reward,
    }
    data = protocol.DataProto(tensordict.TensorDict(tensors, batch_size=count), columns)
    return data, [f"{uid}_{session}_{index}" for uid, session, _, index in rows], np.array(failed)


def settings(estimator):
    by_std = estimator != "dr_grpo"
    named = {"gamma": 0.9, "lam": 0.8, "norm_adv_by_std_in_grpo": by_std}
    name = {"dr_grpo": "grpo"}.get(estimator, estimator)
    return {"adv_estimator": name, "config": OmegaConf.create({**named, "gdpo_reward_keys": ["part"]}), **named}


def hooked(**changes):
    """Our wrappers, and what they log."""
    tree = {"sources": {"f": {"kind": "function", "function": "builtins:dict"}}, "judges": {"j": {"kind": "function"}}}
    log = RewardLog()
    settings = load_config({**tree, "groups": {"give_up_after": 8}}).model_copy(update=changes)
    return Advantages(settings, log), log


def in_queue(monkeypatch, data):
    """Move the extra info of rows to where V1 has it: into its queue."""
    columns = data.non_tensor_batch
    names = [name for name in columns if "/" in name]
    infos = [{name: columns[name][row] for name in names} for row in range(len(data))]
    # An agent loop that rewards its samples itself asks no manager: its rows have no extra info.
    told = [{"reward_extra_info": info} if info["qreward/missing"] else {} for info in infos]
    monkeypatch.setattr(batches, "_extra_fields", lambda keys, partition: told if partition == "train" else None)
    data.non_tensor_batch = {"uid": columns["uid"]}


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
    data, keys, failed = batch_of(GROUPS, estimator=estimator)
    rows = expected_rows(keys, failed, estimator)
    computed = verl.legacy(data.select_idxs(np.array(rows)), **settings(estimator))
    advantages, log = hooked()
    check(advantages.by_columns(verl.legacy, data, **settings(estimator)), computed, rows, estimator)
    assert data.batch["advantages"].abs().sum() > 0
    metrics = log.since_last()
    assert metrics["qreward/failed_rate"] == metrics["qreward/data/sums/failed_rate"] == failed.mean()
    assert metrics["qreward/reward/mean"] == pytest.approx(data.non_tensor_batch["qreward/reward"][~failed].mean())
    assert metrics["qreward/flat_rate"] == 0.0


@pytest.mark.parametrize("estimator", V1_ESTIMATORS)
def test_of_a_batch_of_v1_whole_sessions_are(verl, monkeypatch, estimator):
    data, keys, failed = batch_of(GROUPS, 3, estimator)
    in_queue(monkeypatch, data)
    rows = expected_rows(keys, failed, estimator)
    computed = verl.v1(data.select_idxs(np.array(rows)), [keys[row] for row in rows], **settings(estimator))
    advantages, log = hooked()
    check(advantages.by_keys(verl.v1, data, keys, **settings(estimator)), computed, rows, estimator)
    assert log.since_last()["qreward/samples"] == failed.sum() / 3


def test_gdpo_in_v1_gets_the_single_rewards_of_the_rows_that_are_left(verl, monkeypatch):
    """V1 passes it neither these nor where responses end."""
    data, keys, failed = batch_of(GROUPS)
    rows = expected_rows(keys, failed, "gdpo")
    computed = verl.legacy(data.select_idxs(np.array(rows)), **settings("gdpo"))
    names = ("part", "qreward/missing", "qreward/cause")
    infos = [{name: data.non_tensor_batch[name][row] for name in names} for row in range(len(data))]
    monkeypatch.setattr(batches, "_extra_fields", lambda *_: [{"reward_extra_info": info} for info in infos])
    data.pop(["prompts", "attention_mask"], ["part"])
    advantages, _ = hooked()
    check(advantages.by_keys(verl.v1, data, keys, **settings("gdpo")), computed, rows, "gdpo")
    del infos[rows[0]]["part"]
    with pytest.raises(InputError, match="gdpo_reward_keys: a sample has no 'part'"):
        advantages.by_keys(verl.v1, data, keys, **settings("gdpo"))


def test_a_prompt_whose_greedy_response_failed_has_nothing_to_be_compared_with(verl):
    """verl subtracts the reward of the greedy response, whose extra info it drops."""
    (data, _, failed), (again, _, _) = (batch_of(GROUPS, estimator="remax") for _ in range(2))
    uids = data.non_tensor_batch["uid"]
    both = {"uid": np.concatenate([uids, [*GROUPS]]), "__do_sample__": np.array([True] * len(uids) + [False] * 8)}
    missing = np.concatenate([failed, [uid == "f" for uid in GROUPS]]).astype(float)
    causes = np.where(missing > 0, "infra/deadline", "")
    output = protocol.DataProto(None, {"qreward/missing": missing, "qreward/cause": causes})
    advantages, _ = hooked()
    generate = partial(advantages.of_greedy, lambda loops, prompts: output, None)
    assert generate(protocol.DataProto(None, both)) is output
    generate(protocol.DataProto(None, {"uid": both["uid"]}))  # a validation has none
    rows = [row for row in range(len(data)) if not failed[row] and uids[row] != "f"]
    computed = verl.legacy(data.select_idxs(np.array(rows)), **settings("remax"))
    check(advantages.by_columns(verl.legacy, data, **settings("remax")), computed, rows, "remax")
    rows = [row for row in range(len(data)) if not failed[row]]
    computed = verl.legacy(again.select_idxs(np.array(rows)), **settings("remax"))
    check(advantages.by_columns(verl.legacy, again, **settings("remax")), computed, rows, "remax")


def test_a_batch_in_which_nothing_failed_is_left_to_verl_and_so_is_one_with_constants(verl):
    sound = {uid: marks.replace(".", "s") for uid, marks in GROUPS.items()}
    for groups, changes in ((sound, {}), (GROUPS, {"on_failure": Constant(constant=0.0)})):
        data, again = (batch_of(groups)[0] for _ in range(2))
        advantages, log = hooked(**changes)
        ours = advantages.by_columns(verl.legacy, data, **settings("grpo"))
        assert torch.equal(ours.batch["advantages"], verl.legacy(again, **settings("grpo")).batch["advantages"])
        assert log.since_last()["qreward/failed"] == (10 if changes else 0)


def test_a_screened_row_is_left_out_whatever_a_failed_one_trains_on(verl):
    (data, keys, out), (again, _, _) = batch_of(GROUPS), batch_of(GROUPS)
    screened = out & np.array([uid != "a" for uid in data.non_tensor_batch["uid"]])
    data.non_tensor_batch["qreward/cause"][screened] = "policy/screened"
    data.non_tensor_batch["qreward/failed"][screened] = 0.0
    advantages, log = hooked(on_failure=Constant(constant=0.0))
    ours = advantages.by_columns(verl.legacy, data, **settings("grpo"))
    rows = expected_rows(keys, screened, "grpo")
    check(ours, verl.legacy(again.select_idxs(np.array(rows)), **settings("grpo")), rows, "grpo")
    metrics = log.since_last()
    assert (metrics["qreward/failed"], metrics["qreward/screened_rate"]) == (1.0, 9 / len(keys))


def test_the_run_ends_after_groups_in_a_row_in_steps_that_train_on_nothing(verl):
    advantages, _ = hooked()

    def step(**groups):
        data = advantages.by_columns(verl.legacy, batch_of(groups)[0], **settings("grpo_passk"))
        return bool((data.batch["advantages"] == 0).all())

    assert step(a="..", b="....")
    assert step(a="..", b="....")
    assert not step(a="ss", b="....")
    assert step(a="..", b="....")
    assert step(a="..", b="....")
    for _ in range(4):
        screened = batch_of({"a": "..", "b": "...."})[0]
        screened.non_tensor_batch["qreward/cause"][:] = "policy/screened"
        assert (advantages.by_columns(verl.legacy, screened, **settings("grpo")).batch["advantages"] == 0).all()
    for _ in range(3):
        step(a="..", b="....", pad0="ss")  # rows of verl's own, which fill up a batch
    with pytest.raises(JudgeUnavailable, match=r"4 steps in a row .*infra/deadline 6 times.*give_up_after"):
        step(a="..", b="....", pad0="..")


def test_every_estimator_of_this_verl_is_known_here():
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY

    names = {str(getattr(name, "value", name)) for name in ADV_ESTIMATOR_REGISTRY}
    assert names == {*ESTIMATORS, "tir_optimal_token_baseline"} - {"dr_grpo"}
    assert names - {*V1_ESTIMATORS} == {*_BEYOND_V1, "gdpo"}, "what V1 cannot compute is refused"
