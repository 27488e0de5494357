"""The extra info of samples: the same keys where verl wants the same keys, and what verl's `naive` manager gives."""

from __future__ import annotations

import math

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.rewards import unpacked

LEGACY = "trainer.use_v1=False"
BOTH = pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY], ids=["v1", "legacy"])
GRPO = "algorithm.adv_estimator=grpo"
STYLE = "+qreward.judges.quality.criteria.style='is it well written?'"
TEXTS = ["raise", "It is 42, more", "It is 7", "number", "raise"]
FUNCTIONS = """
def rule(data_source, solution_str, ground_truth, extra_info):
    if "raise" in solution_str:
        raise ValueError("no such answer")
    if "number" in solution_str:
        return 0.25
    result = {"score": 0.5, "acc": "42" in solution_str, "turns": 3, "pred": solution_str[:4], "none": None}
    if "more" in solution_str:
        result |= {"bonus": 0.5, "broken": float("nan"), "huge": 1e39, "reward": 9.0, "gts": "?", "step": 7}
    return result
"""


def filtered(metric):
    return ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}"]


@pytest.fixture
def rule(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    node = "reward.custom_reward_function"
    return [GRPO, f"{node}.path={path}", f"{node}.name=rule", "+qreward.sources.compute_score.mode=thread"]


@pytest.fixture
def infos(run):
    """The extra info of each of the responses to one question."""
    return lambda texts, *overrides, **named: [
        result["reward_extra_info"] for result in run(texts, *overrides, **named)
    ]


def test_what_a_function_returns_has_its_own_names_and_values(infos, rule):
    told = infos(TEXTS, *rule)
    values = unpacked({key: [info[key] for info in told] for key in told[0]})
    _, more, seven, number, failed = ({key: each[row] for key, each in values.items()} for row in range(5))
    naive = {"acc": True, "turns": 3, "pred": "It i", "bonus": 0.5}
    assert {key: more[key] for key in naive} == naive
    assert more["acc"] is True
    assert not {"reward", "score", "gts", "step"} & values.keys(), "verl's own columns have these names"
    assert (more["none"], more["broken"], more["huge"], more["qreward/score/step"]) == (None, None, None, 7)
    assert (seven["acc"], number["acc"]) == (False, 0.25), "of a number, verl's naive manager makes `acc`"
    assert math.isnan(failed["acc"])
    for info in told:
        assert info.keys() == told[0].keys()
        assert all(isinstance(value, (float, str, bool)) for value in info.values()), "no None, whatever it returns"


@BOTH
def test_validation_takes_them(rule, trainer):
    rows = [{"prompt": text, "ground_truth": "42", "data_source": "s"} for text in TEXTS]
    respond = lambda draft, rng: draft.columns["prompt"][0]["content"]  # noqa: E731
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, trainer], val_rows=rows, respond=respond) as fake:
        metrics = fake.validate().metrics
    assert metrics["val-aux/s/turns/mean@1"] == 3.0
    assert metrics["val-core/s/acc/mean@1"] == pytest.approx((1 + 0 + 0.25) / 3)


@pytest.mark.parametrize(("metric", "values"), [("acc", [1, 0, 0.25]), ("turns", [3, 3]), ("score", None)])
def test_a_filter_of_groups_finds_a_number_or_nan(run, rule, metric, values):
    """verl 0.9.0 reads `reward`, too, from the extra info. A validation has the score's columns already."""
    results = run(TEXTS, *rule, *filtered(metric))
    told = [result["reward_extra_info"][metric] for result in results]
    if values is None:
        assert told == pytest.approx([result["reward_score"] for result in results])
    else:
        assert math.isnan(told[0]), "verl does not replace a group for it"
        assert [value for value in told if not math.isnan(value)] == values
    named = {"val_rows": ["?"], "respond": lambda draft, rng: "raise"}
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, *filtered(metric)], **named) as fake:
        validation = fake.validate()
    assert not any(f"/{metric}/" in name for name in validation.metrics)
    assert metric != "score" or metric not in validation.extra_info
    assert len(validation.extra_info["reward"]) == 1


def test_a_filter_that_no_judge_feeds_is_an_error_at_the_start(infos, judge_overrides):
    with JudgeServer(lambda call: float(call.blocks["response"])) as server:
        ours = [GRPO, *judge_overrides(a=server)]
        with pytest.raises(ConfigurationError, match=r"no judge provides 'acc'.*`correct_at`"):
            infos(["7", "1"], *ours, *filtered("acc"))
        assert infos(["7", "1"], *ours, *filtered("acc"), "+qreward.judges.quality.correct_at=0.5")[0]["acc"] == 1.0
        told = infos(["7", "1"], *ours, *filtered("qreward/score/style"), STYLE)
        assert told[0]["qreward/score/style"] == pytest.approx(0.7)


def test_a_judge_that_defines_no_correctness_says_nothing_of_it(infos, rule, judge_overrides):
    with JudgeServer(lambda call: 5.0) as server:
        overrides = [
            GRPO,
            *judge_overrides(a=server),
            "+qreward.judges.quality.sources=[a]",
            "+qreward.judges.strict={kind: llm, sources: [a], correct_at: 1.0}",
            "+qreward.routes={origin: strict, *: quality}",
        ]
        told = infos(["7", "7"], *overrides, row={"data_source": "other"})
        told += infos(["7", "7"], *overrides, row={"data_source": "origin"})[:1]
    assert [info["acc"] for info in told] == [pytest.approx(math.nan, nan_ok=True)] * 2 + [0.0]
