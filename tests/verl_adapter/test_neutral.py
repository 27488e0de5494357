"""Failed samples in `run_single`: neutral to their group in training, and nobody's number in validation."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardMissing
from qreward_plugins.testing import JudgeServer
from verl_adapter.rollouts import VALIDATION

GRPO = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "+qreward.judges.quality.invalid_retries=0")
LEGACY = "trainer.use_v1=False"
LONG = "+qreward.groups.wait_s=60"


def verdict(call):
    if "break" in call.blocks["response"]:
        return "no verdict"
    return 10.0 * float(call.blocks["response"])


@pytest.fixture
def play(compose, tokenizer, judge_overrides):
    """Load managers as verl does and hand out the rollouts among them; the results are in the order of rollouts."""
    from verl.trainer.ppo.reward import load_reward_manager

    def play(rollouts, *overrides, managers=1):
        async def main(server):
            config = compose(*judge_overrides(a=server), "reward.num_workers=1", *GRPO, *overrides)
            made = [load_reward_manager(config, tokenizer) for _ in range(managers)]
            try:
                calls = [made[number % managers].run_single(data) for number, data in enumerate(rollouts)]
                return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 50)
            finally:
                for manager in made:
                    await manager.aclose()

        with JudgeServer(verdict) as server:
            return asyncio.run(main(server))

    return play


@pytest.fixture
def group(make_data):
    def group(*texts, uid="u1", named=True, **info):
        columns = {"extra_info": [{"index": 3, **info}]}
        return [
            make_data([text], uid=uid, columns={**columns, **({"session_id": [number]} if named else {})})
            for number, text in enumerate(texts)
        ]

    return group


def scores(results):
    return [result["reward_score"] for result in results]


def infos(results, key):
    return [result["reward_extra_info"][key] for result in results]


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY])
def test_a_failed_sample_waits_for_its_siblings_and_gets_their_mean(play, group, trainer):
    rollouts = group("0.2", "break", "0.6", "break", named=trainer != LEGACY)
    results = play(rollouts, trainer, LONG)
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/imputed") == [0.0, 1.0, 0.0, 1.0]
    assert infos(results, "qreward/missing") == [0.0, 1.0, 0.0, 1.0]
    assert len({frozenset(result["reward_extra_info"]) for result in results}) == 1


def test_a_group_that_failed_whole_has_one_number(play, group):
    assert scores(play(group("break", "break", "break", "break"), LONG)) == [0.0] * 4


def test_groups_are_told_apart(play, group):
    rollouts = [*group("0.2", "break", "0.2", "0.2"), *group("0.8", "0.8", "break", "0.8", uid="u2")]
    assert scores(play(rollouts, LONG)) == pytest.approx([0.2] * 4 + [0.8] * 4)


def test_siblings_that_never_come_are_waited_for_no_longer_than_that(play, group):
    results = play(group("0.2", "break"), "+qreward.groups.wait_s=0.05")
    assert scores(results)[0] == pytest.approx(0.2)
    assert results[1]["reward_extra_info"]["qreward/imputed"] == 1.0


def test_exclude_and_raise_are_what_they_say(play, group):
    for policy in ("exclude", "raise"):
        good, failed = play(group("0.2", "break"), f"+qreward.on_failure={policy}")
        assert good["reward_score"] == pytest.approx(0.2)
        assert isinstance(failed, RewardMissing)


def test_a_constant_is_no_mean(play, group):
    results = play(group("0.2", "break"), "+qreward.on_failure.constant=-1")
    assert scores(results) == pytest.approx([0.2, -1.0])
    assert infos(results, "qreward/imputed") == [0.0, 0.0]
    assert infos(results, "qreward/missing") == [0.0, 1.0]


@pytest.mark.parametrize("policy", ["+qreward.on_failure=auto", "+qreward.on_failure=exclude"])
def test_validation_waits_for_nobody_and_marks_what_is_missing(play, group, policy):
    results = play(group("0.2", "break", **{VALIDATION: True}), policy, LONG)
    assert scores(results) == pytest.approx([0.2, 0.0])
    assert infos(results, "qreward/missing") == [0.0, 1.0]
    assert infos(results, "qreward/imputed") == [0.0, 0.0]


def test_raise_holds_for_validation_too(play, group):
    good, failed = play(group("0.2", "break", **{VALIDATION: True}), "+qreward.on_failure=raise")
    assert good["reward_score"] == pytest.approx(0.2)
    assert isinstance(failed, RewardMissing)


@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY])
@pytest.mark.parametrize("told", [(), ("+qreward_trainer={name: v1, marks_validation: true}",)])
def test_rows_of_training_that_are_called_test_train_like_any_other(play, group, trainer, told):
    results = play(group("0.2", "break", "0.6", "break", split="test"), LONG, trainer, *told)
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/imputed") == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["v1", "legacy"])
def test_where_the_trainer_marks_nothing_the_split_that_a_row_names_keeps_it_from_waiting(play, group, name):
    told = f"+qreward_trainer={{name: {name}, marks_validation: false}}"
    good, failed = play(group("0.2", "break", split="test"), LONG, told)
    assert good["reward_score"] == pytest.approx(0.2)
    if name == "v1":
        assert isinstance(failed, RewardMissing)
    else:
        assert failed["reward_score"] == pytest.approx(0.2)


def test_a_session_that_is_generated_anew_trains_on_its_last_reward(play, group, make_data):
    def session(number, text):
        return make_data([text], uid="u1", columns={"session_id": [number]})

    first = play([session(0, "0.2"), session(0, "0.9")], LONG)
    assert scores(first) == pytest.approx([0.2, 0.9])
    whole = [session(number, text) for number, text in enumerate(("0.2", "0.4", "0.6", "break"))]
    results = play([*whole, session(3, "1.0")], LONG)
    assert scores(results)[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert scores(results)[4] == pytest.approx(1.0)


@pytest.mark.parametrize("column", ["extra_info", "raw_prompt", "tool_extra_fields", "reward_model"])
@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY])
def test_a_row_that_cannot_be_read_is_its_own_failure(play, make_data, column, trainer):
    rollouts = [
        make_data(["0.2"], columns={"session_id": [0]}),
        make_data(["0.4"], columns={"session_id": [1], column: [7]}),
        make_data(["0.6"], columns={"session_id": [2], "extra_info": [None]}),
        make_data(["0.4"], columns={"session_id": [3], "reward_model": [None]}),
    ]
    results = play(rollouts, trainer, LONG)
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/cause") == ["", "infra/input", "", ""]


def test_the_mark_is_not_shown_to_a_judge(make_data, tokenizer):
    from verl_adapter.rollouts import to_sample

    item = make_data(["0.2"], columns={"extra_info": [{"index": 3, VALIDATION: True}]})[0]
    sample = to_sample(item, "0.2", tokenizer.decode)
    assert sample.split == "val"
    assert VALIDATION not in sample.extras
