"""Validations: what becomes of failed samples in the means of a prompt."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.metrics import RewardLog, with_means

BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", "trainer.use_v1=False"], ids=["v1", "legacy"])


def verdict(call):
    return "no verdict" if "break" in call.blocks["response"] else float(call.blocks["response"])


@pytest.fixture
def validate(judge_overrides):
    """Validate two answers to each prompt."""

    def validate(answers, *overrides):
        rows = [{"prompt": f"{number}?", "data_source": "math"} for number in range(len(answers) // 2)]
        ours = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.agent.num_workers=1"]
        ours += ["actor_rollout_ref.rollout.val_kwargs.n=2", "+qreward.judges.quality.invalid_retries=0", *overrides]

        def respond(draft, rng):
            return answers[2 * int(draft.columns["prompt"][0]["content"][:-1]) + draft.number]

        with (
            JudgeServer(verdict) as server,
            FakeVerlTrainer([*judge_overrides(a=server), *ours], val_rows=rows, respond=respond) as fake,
        ):
            return fake.validate()

    return validate


@pytest.mark.parametrize(
    ("trainer", "failing", "correct"),
    [
        ("trainer.use_v1=True", True, True),
        ("trainer.use_v1=False", True, False),
        ("trainer.use_v1=True", False, False),
    ],
)
def test_a_validation_of_judged_samples(validate, trainer, correct, failing):
    answers = ["10", "break" if failing else "0", "10", "4"]
    style = "+qreward.judges.quality.criteria.style='is it well written?'"
    more = ["+qreward.judges.quality.correct_at=0.5"] if correct else []
    validation = validate(answers, trainer, style, *more)
    metrics = validation.metrics
    assert all(math.isfinite(value) for value in metrics.values())
    assert validation.extra_info["qreward/missing"] == [0.0, float(failing), 0.0, 0.0]
    core = "acc" if correct else "reward"
    # The failed one takes the mean of its prompt, so it stays a prompt of two answers.
    expected = {("acc", True): [1, 0.5], ("acc", False): [0.5, 0.5], ("reward", True): [1.0, 0.7]}
    by_prompt = expected.get((core, failing), [0.5, 0.7])
    assert metrics[f"val-core/math/{core}/mean@2"] == pytest.approx(sum(by_prompt) / 2)
    assert not any("mean@1" in name for name in metrics)
    assert metrics["val-aux/math/qreward/missing/mean@2"] == failing / 4
    assert metrics["qreward/val/samples"] == 4
    assert metrics["qreward/val/failed_rate"] == metrics["qreward/val/data/math/failed_rate"] == failing / 4
    assert metrics["qreward/val/reward/mean"] == pytest.approx(0.8 if failing else 0.6), "without the failed ones"
    assert not any("/qreward/reward/" in name for name in metrics if name.startswith("val-"))
    assert "qreward/samples" not in metrics
    assert correct or not any("/acc/" in name for name in metrics)


@BOTH
def test_a_prompt_of_which_every_sample_failed_is_left_out_and_counted(validate, trainer):
    answers = ["10", "0", "break", "break", "10", "10"]
    metrics = validate(answers, trainer, "+qreward.judges.quality.correct_at=0.5").metrics
    assert metrics["val-core/math/acc/mean@2"] == 0.75
    assert metrics["val-aux/math/reward/mean@2"] == 0.75
    assert metrics["val-aux/math/qreward/missing/mean@2"] == pytest.approx(1 / 3)
    assert (metrics["qreward/val/unscored_prompts"], metrics["qreward/val/samples"]) == (1, 6)


def test_a_data_source_without_correctness_gets_none_by_prompts_that_are_lost():
    """verl counts the sessions of a prompt that ended in errors as wrong, where the data source has `acc`."""
    infos = {"acc": [1.0, math.nan, math.nan], "qreward/missing": [0.0, 1.0, 0.0]}
    expected = {("s", "u"): 2, ("s", "lost"): 2, ("t", "w"): 1, ("t", "lost"): 1}
    seen = {}
    process = lambda sources, uids, part, **more: seen.update(part, **more) or {}  # noqa: E731
    with_means(RewardLog(), process, ["s", "s", "t"], ["u", "u", "w"], infos, expected_acc_counts=expected)
    assert seen["acc"] == [1.0, 1.0, ""]
    assert seen["expected_acc_counts"] == {("s", "u"): 2, ("s", "lost"): 2}


def test_a_row_without_a_value_takes_the_mean_of_its_prompt_and_a_text_the_first():
    """Of a key that a prompt does not have, its rows have empty texts, of which verl makes no mean."""
    infos = {
        "acc": [1.0, True, 0.0, math.nan, 1.0, 1.0],
        "pred": ["a", "a", "b", math.nan, "c", "c"],
        "only": [0.5, None, None, math.nan, None, None],
        "reward": [1.0, 1.0, 0.0, 0.25, 1.0, 1.0],  # the failed one's is a stand-in
        "qreward/missing": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        "qreward/latency_s": [1.0, 1.0, 1.0, 5.0, 2.0, 2.0],
    }
    seen = {}
    with_means(
        RewardLog(), lambda sources, uids, part: seen.update(part) or {}, ["s"] * 6, ["u"] * 4 + ["w"] * 2, infos
    )
    assert seen["acc"] == seen["reward"] == pytest.approx([1.0, 1.0, 0.0, 2 / 3, 1.0, 1.0])
    assert seen["pred"] == ["a", "a", "b", "a", "c", "c"]
    assert seen["only"] == [*[0.5] * 4, "", ""]
    assert seen["qreward/latency_s"] == infos["qreward/latency_s"]
