"""`FakeVerlTrainer` with plain reward functions and managers: no verl, no torch, no Ray."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter

import pytest
from hydra.errors import HydraException

from qreward_plugins.testing import FakeVerlTrainer, verl_stand_in

from ..kit import each_of

GRPO = "algorithm.adv_estimator=grpo"
LEGACY = "trainer.use_v1=False"
BOTH = each_of("trainer", [(), (LEGACY,)])


def right(data_source, solution_str, ground_truth, extra_info):
    return float(ground_truth in solution_str)


def in_turns(draft, rng):
    """Right and wrong answers by turns."""
    return f"It is {draft.ground_truth if draft.number % 2 else 'nothing'}"


def scoring(**scores):
    """A reward function by the first word of the response; an exception is raised."""

    def score(data_source, solution_str, ground_truth, extra_info):
        value = scores[solution_str.split()[0]]
        if isinstance(value, Exception):
            raise value
        return value

    return score


def saying(*words):
    """Each response of a prompt is the next word."""
    return lambda draft, rng: words[draft.number % len(words)]


# Where the score goes


@BOTH
def test_a_step_has_scores_at_the_last_token_and_advantages_by_group(trainer):
    with FakeVerlTrainer([GRPO, *trainer], reward=right, respond=in_turns) as fake:
        step = fake.step()
    assert step.scores == [0.0, 1.0] * 8
    assert step.advantages == pytest.approx([-0.866, 0.866] * 8, abs=1e-3)
    assert Counter(step.uids).most_common(1)[0][1] == 4
    assert step.sessions == [0, 1, 2, 3] * 4
    last = step.batch.batch["response_mask"].sum(dim=-1) - 1
    assert [list(row.nonzero()[0]) for row in step.batch.batch["rm_scores"]][1::2] == [[each] for each in last[1::2]]
    assert step.metrics["critic/score/mean"] == 0.5
    assert [info["acc"] for info in step.extra_info] == step.scores


# What happens where a reward raises, or is none


def test_v1_leaves_out_who_raises_and_ends_where_nobody_is_left():
    reward = scoring(good=7.0, bad=ValueError("no such answer"), poor=0.0)
    with FakeVerlTrainer([GRPO], reward=reward, respond=saying("good", "bad", "poor", "poor")) as fake:
        step = fake.step()
    assert all(isinstance(error, ValueError) for _, _, error in step.dropped)
    assert sorted({session for _, session, _ in step.dropped}) == [1]
    assert len(step.scores) == 12
    assert step.metrics["critic/score/mean"] == pytest.approx(7 / 3)
    with FakeVerlTrainer([GRPO], reward=reward, respond=saying("good", "bad", "bad", "bad")) as fake:
        assert fake.step().advantages == pytest.approx([7.0] * 4, rel=1e-5), "a lone survivor trains on its raw score"
    with FakeVerlTrainer([GRPO], reward=reward, respond=saying("bad")) as fake:
        with pytest.raises(RuntimeError, match="no materializable"):
            fake.step()
        with pytest.raises(RuntimeError, match="the run has ended"):
            fake.step()


@BOTH
def test_none_is_a_key_error_and_nan_trains(trainer):
    reward = scoring(a=1.0, none=None, nan=math.nan)
    with (
        FakeVerlTrainer([GRPO, *trainer], reward=reward, respond=saying("a", "none")) as fake,
        pytest.raises(KeyError, match="rm_scores"),
    ):
        fake.step()
    with FakeVerlTrainer([GRPO, *trainer], reward=reward, respond=saying("a", "nan")) as fake:
        assert fake.step().poisoned


def test_a_number_too_large_for_float32_drops_a_sample_in_v1_and_is_infinite_in_the_legacy_trainer():
    named = {"reward": scoring(a=1.0, b=1e39), "respond": saying("a", "a", "a", "b")}
    with FakeVerlTrainer([GRPO], **named) as fake:
        assert "without overflow" in str(fake.step().dropped[0])
    with FakeVerlTrainer([GRPO, LEGACY], **named) as fake:
        assert max(fake.step().scores) == math.inf


def test_extra_info_of_the_first_sample_says_what_the_legacy_trainer_takes():
    reward = scoring(a={"score": 1.0, "more": 2.0}, b={"score": 0.0})
    with FakeVerlTrainer([GRPO, LEGACY], reward=reward, respond=saying("a", "b")) as fake:  # noqa: SIM117
        with pytest.raises(KeyError, match="more"):
            fake.step()
    with FakeVerlTrainer([GRPO, LEGACY], reward=reward, respond=saying("b", "a")) as fake:
        assert all("more" not in info for info in fake.step().extra_info)


# Validation


def test_a_session_that_failed_counts_as_wrong_where_there_is_acc():
    rows = [{"prompt": f"{n}?", "ground_truth": "1", "__rollout_n__": n} for n in (4, 2)]
    reward = scoring(good=1.0, bad=ValueError("no"))
    with FakeVerlTrainer([GRPO], reward=reward, respond=saying("good", "bad"), val_rows=rows) as fake:
        metrics = fake.validate().metrics
    assert metrics["val-core/fake/data/acc/mean@4"] == metrics["val-aux/fake/data/acc/mean@2"] == 0.5
    assert metrics["val-aux/fake/data/acc_success_only/mean@2"] == 1.0
    assert metrics["val-aux/fake/data/reward/mean@2"] == 1.0


# What is not played


def test_a_row_without_a_prompt_is_named():
    with pytest.raises(ValueError, match=r"needs a 'prompt': \{'question'"):
        FakeVerlTrainer([GRPO], reward=scoring(a=1.0), rows=[{"question": "?"}]).close()


@each_of(
    ("overrides", "error", "match"),
    [
        (["reward.reward_maanger.name=naive"], HydraException, "reward_maanger"),
        (["reward.reward_manager.name=mine"], ValueError, "Unknown reward manager: mine"),
        (["reward.custom_reward_function.path=/nowhere.py"], FileNotFoundError, "nowhere"),
        (["data.train_batch_size=17"], AssertionError, r"empty! rows has 16, and a batch is 17 \(data\.train_batch"),
    ],
)
def test_mistakes_are_reported_as_verl_does(overrides, error, match):
    with pytest.raises(error, match=match):
        FakeVerlTrainer(overrides, reward=None if "custom" in overrides[0] else right)


@each_of(
    "override",
    [
        "algorithm.use_kl_in_reward=True",
        "algorithm.use_pf_ppo=True",
        "algorithm.rollout_correction.rollout_rs=token_k1",
        "trainer.v1.trainer_mode=separate_async",
        "reward.reward_manager.name=dapo",
        "trainer.v1.sampler.sync_refill_failed_groups=True",
        "algorithm.adv_estimator=opo",
    ],
)
def test_what_is_not_played_is_refused_by_its_name(override):
    with (
        pytest.raises(NotImplementedError, match="not played") as caught,
        FakeVerlTrainer([GRPO, override], reward=right) as fake,
    ):
        fake.step()
    assert override.split("=")[0].split(".")[-1] in str(caught.value) or "`dapo`" in str(caught.value)


def test_keys_that_do_not_reach_rewards_are_taken():
    overrides = [
        GRPO,
        "actor_rollout_ref.actor.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.name=vllm",
        "data.train_files=x.parquet",
        "reward_model.reward_manager=mine",
        "algorithm.rollout_correction.bypass_mode=True",
        "trainer.test_freq=5",
    ]
    with FakeVerlTrainer(overrides, reward=right, respond=in_turns) as fake:
        assert fake.config.reward.reward_manager.name == "naive"
        assert fake.step().scores == [0.0, 1.0] * 8


def test_it_runs_where_there_is_neither_verl_nor_torch_nor_ray():
    program = """
import sys
absent = dict.fromkeys(("verl", "torch", "ray", "tensordict", "transformers", "transfer_queue"))
sys.modules |= absent  # as if they were not installed
from qreward_plugins.testing import FakeVerlTrainer
with FakeVerlTrainer(["algorithm.adv_estimator=grpo"], reward=lambda **_: 1.0) as trainer:
    assert trainer.step().scores == [1.0] * 16
assert not [name for name, module in sys.modules.items() if module and name.split(".")[0] in absent]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_stand_in_puts_back_what_was_there():
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("verl", "verl_adapter")}
    with verl_stand_in():
        from verl import DataProto  # noqa: F401

        assert sys.modules["verl"] is not before.get("verl")
        with pytest.raises(ModuleNotFoundError):
            import verl.models  # noqa: F401
    after = {name: module for name, module in sys.modules.items() if name.split(".")[0] in ("verl", "verl_adapter")}
    assert after == before
