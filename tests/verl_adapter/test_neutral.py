"""Failed samples in `run_single`: neutral to their group in training, and nobody's number in validation."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardMissing
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.rollouts import VALIDATION

GRPO = ("algorithm.adv_estimator=grpo", "+qreward.judges.quality.invalid_retries=0")
LEGACY = "trainer.use_v1=False"
BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY], ids=["v1", "legacy"])
LONG = "+qreward.groups.wait_s=60"
ROW = {"prompt": "What is 17 plus 25?", "ground_truth": "42", "data_source": "test/add"}


def verdict(call):
    if "break" in call.blocks["response"]:
        return "no verdict"
    return 10.0 * float(call.blocks["response"])


@pytest.fixture
def play(run, judge_overrides):
    """The results of responses to one question; a sample whose response says so fails."""

    def play(responses, *overrides, **named):
        with JudgeServer(verdict) as server:
            return run(responses, *judge_overrides(a=server), *GRPO, *overrides, **named)

    return play


@pytest.fixture
def validate(judge_overrides):
    """A validation with two responses to its one question."""

    def validate(responses, *overrides):
        with (
            JudgeServer(verdict) as server,
            FakeVerlTrainer(
                [
                    *judge_overrides(a=server),
                    *GRPO,
                    "actor_rollout_ref.rollout.val_kwargs.n=2",
                    "actor_rollout_ref.rollout.agent.num_workers=1",
                    *overrides,
                ],
                val_rows=[ROW],
                respond=lambda draft, rng: responses[draft.number],
            ) as fake,
        ):
            return fake.validate()

    return validate


@pytest.fixture
def direct(compose, tokenizer, judge_overrides, make_data):
    """What a manager makes of sessions that no trainer hands out like that; each is (number, response, extra info)."""
    from verl.trainer.ppo.reward import load_reward_manager

    def direct(sessions, *overrides):
        async def main(server):
            config = compose(
                *judge_overrides(a=server), "reward.num_workers=1", "actor_rollout_ref.rollout.n=4", *GRPO, *overrides
            )
            manager = load_reward_manager(config, tokenizer)
            rollouts = [
                make_data([text], columns={"extra_info": [{"index": 3, **info}], "session_id": [number]})
                for number, text, info in sessions
            ]
            try:
                return await asyncio.wait_for(
                    asyncio.gather(*map(manager.run_single, rollouts), return_exceptions=True), 50
                )
            finally:
                await manager.aclose()

        with JudgeServer(verdict) as server:
            return asyncio.run(main(server))

    return direct


def scores(results):
    return [result["reward_score"] for result in results]


def infos(results, key):
    return [result["reward_extra_info"][key] for result in results]


@BOTH
def test_a_failed_sample_waits_for_its_siblings_and_gets_their_mean(play, trainer):
    results = play(["0.2", "break", "0.6", "break"], trainer, LONG)
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/imputed") == [0.0, 1.0, 0.0, 1.0]
    assert infos(results, "qreward/missing") == [0.0, 1.0, 0.0, 1.0]
    assert len({frozenset(result["reward_extra_info"]) for result in results}) == 1


def test_a_group_that_failed_whole_has_one_number(play):
    assert scores(play(["break"] * 4, LONG)) == [0.0] * 4


@BOTH
def test_groups_are_told_apart(judge_overrides, trainer):
    texts = (("0.2", "break", "0.2", "0.2"), ("0.8", "0.8", "break", "0.8"))
    with (
        JudgeServer(verdict) as server,
        FakeVerlTrainer(
            [*judge_overrides(a=server), *GRPO, LONG, trainer, "data.train_batch_size=2"],
            rows=[{**ROW, "extra_info": {"index": place}} for place in range(2)],
            respond=lambda draft, rng: texts[draft.columns["extra_info"]["index"]][draft.number],
        ) as fake,
    ):
        step = fake.step()
    assert sorted(step.scores) == pytest.approx([0.2] * 4 + [0.8] * 4)
    assert set(step.advantages) == {0.0}


def test_exclude_and_raise_are_what_they_say(play):
    for policy in ("exclude", "raise"):
        good, failed = play(["0.2", "break"], f"+qreward.on_failure={policy}")
        assert good["reward_score"] == pytest.approx(0.2)
        assert isinstance(failed, RewardMissing)


def test_a_constant_is_no_mean(play):
    results = play(["0.2", "break"], "+qreward.on_failure.constant=-1")
    assert scores(results) == pytest.approx([0.2, -1.0])
    assert infos(results, "qreward/imputed") == [0.0, 0.0]
    assert infos(results, "qreward/missing") == [0.0, 1.0]


@pytest.mark.parametrize(
    ("policy", "trainer"), [("auto", "trainer.use_v1=True"), ("exclude", "trainer.use_v1=True"), ("auto", LEGACY)]
)
def test_validation_waits_for_nobody_and_marks_what_is_missing(validate, policy, trainer):
    validation = validate(("0.2", "break"), f"+qreward.on_failure={policy}", LONG, trainer)
    assert validation.scores == pytest.approx([0.2, 0.0])
    assert validation.extra_info["qreward/missing"] == [0.0, 1.0]
    assert validation.extra_info["qreward/imputed"] == [0.0, 0.0]


def test_raise_holds_for_validation_too(validate):
    assert validate(("0.2", "break"), "+qreward.on_failure=raise").scores == pytest.approx([0.2])


@BOTH
def test_rows_of_training_that_are_called_test_train_like_any_other(play, trainer):
    results = play(["0.2", "break", "0.6", "break"], LONG, trainer, row={"extra_info": {"split": "test"}})
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/imputed") == [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", ["v1", "legacy"])
def test_where_the_trainer_marks_nothing_the_split_that_a_row_names_keeps_it_from_waiting(direct, name):
    told = f"+qreward_trainer={{name: {name}, marks_validation: false}}"
    good, failed = direct(
        [(number, text, {"split": "test"}) for number, text in enumerate(("0.2", "break"))], LONG, told
    )
    assert good["reward_score"] == pytest.approx(0.2)
    if name == "v1":
        assert isinstance(failed, RewardMissing)
    else:
        assert failed["reward_score"] == pytest.approx(0.2)


def test_a_session_that_is_generated_anew_trains_on_its_last_reward(direct):
    assert scores(direct([(0, "0.2", {}), (0, "0.9", {})], LONG)) == pytest.approx([0.2, 0.9])
    whole = [(number, text, {}) for number, text in enumerate(("0.2", "0.4", "0.6", "break"))]
    results = direct([*whole, (3, "1.0", {})], LONG)
    assert scores(results)[:3] == pytest.approx([0.2, 0.4, 0.6])
    assert scores(results)[4] == pytest.approx(1.0)


@pytest.mark.parametrize("column", ["extra_info", "raw_prompt", "reward_model"])
@BOTH
def test_a_row_that_cannot_be_read_is_its_own_failure(play, column, trainer):
    def respond(draft, rng):
        if draft.number == 1:
            draft.columns[column] = 7
        if draft.number == 2:
            draft.columns["extra_info"] = None
        if draft.number == 3:
            draft.columns["reward_model"] = None
        return ("0.2", "0.4", "0.6", "0.4")[draft.number]

    results = play([""] * 4, trainer, LONG, respond=respond)
    assert scores(results) == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert infos(results, "qreward/cause") == ["", "infra/input", "", ""]


def test_the_mark_is_not_shown_to_a_judge(make_data, tokenizer):
    from verl_adapter.rollouts import to_sample

    item = make_data(["0.2"], columns={"extra_info": [{"index": 3, VALIDATION: True}]})[0]
    sample = to_sample(item, "0.2", tokenizer.decode)
    assert sample.split == "val"
    assert VALIDATION not in sample.extras
