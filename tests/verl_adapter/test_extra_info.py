"""The extra info of samples: the same keys where verl wants the same keys, and what verl's `naive` manager gives."""

from __future__ import annotations

import math

import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeVerlTrainer, JudgeServer
from verl_adapter.rewards import is_absent, unpacked

LEGACY = "trainer.use_v1=False"

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


GRPO = "algorithm.adv_estimator=grpo"


@pytest.fixture
def rule(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return [
        GRPO,
        f"reward.custom_reward_function.path={path}",
        "reward.custom_reward_function.name=rule",
        "+qreward.sources.compute_score.mode=thread",
    ]


@pytest.fixture
def infos(run):
    """The extra info of each of the responses to one question."""
    return lambda texts, *overrides, **named: [
        result["reward_extra_info"] for result in run(texts, *overrides, **named)
    ]


TEXTS = ["raise", "It is 42, more", "It is 7", "number", "raise"]


@pytest.mark.parametrize("order", [TEXTS, TEXTS[3:] + TEXTS[:3]])
@pytest.mark.parametrize("trainer", ["trainer.use_v1=True", LEGACY], ids=["v1", "legacy"])
def test_where_sample_0_speaks_for_all_every_sample_has_its_keys(infos, rule, order, trainer):
    each_a_batch = f"actor_rollout_ref.rollout.agent.num_workers={len(order)}"
    told = infos(order, *rule, trainer, each_a_batch, "reward.num_workers=2")
    values = unpacked({key: [info[key] for info in told] for key in told[0]})
    at = order.index("It is 42, more")
    assert (values["turns"][at], values["pred"][at], values["bonus"][at], values["acc"][at]) == (3, "It i", 0.5, True)
    failed = order.index("raise")
    assert is_absent(values["turns"][failed])
    assert is_absent(values["acc"][failed])
    assert "qreward/returned" not in values


def test_what_a_function_returns_has_its_own_names_and_values(infos, rule):
    told = infos(TEXTS, *rule)
    values = unpacked({key: [info[key] for info in told] for key in told[0]})
    first, more, seven, number, failed = ({key: each[row] for key, each in values.items()} for row in range(5))
    naive = {"acc": True, "turns": 3, "pred": "It i", "bonus": 0.5}
    assert {key: more[key] for key in naive} == naive
    assert more["acc"] is True
    assert not {"reward", "score", "gts", "step"} & values.keys(), "verl's own columns have these names"
    assert (more["none"], more["broken"], more["huge"], more["qreward/score/step"]) == (None, None, None, 7)
    assert (seven["acc"], number["acc"]) == (False, 0.25), "of a number, verl's naive manager makes `acc`"
    assert math.isnan(failed["acc"])
    assert failed["qreward/failed"] == first["qreward/failed"] == 1.0
    for info in told:
        assert info.keys() == told[0].keys()
        assert all(isinstance(value, (float, str, bool)) for value in info.values()), "no None, whatever it returns"


@pytest.mark.parametrize("which", [(), (LEGACY,)], ids=["v1", "legacy"])
def test_validation_takes_them(rule, which):
    rows = [{"prompt": text, "ground_truth": "42", "data_source": "s"} for text in TEXTS]
    overrides = ["+reward_manager=qreward", *rule, *which]
    respond = lambda draft, rng: draft.columns["prompt"][0]["content"]  # noqa: E731
    with FakeVerlTrainer(overrides, val_rows=rows, respond=respond) as fake:
        metrics = fake.validate().metrics
    assert metrics["val-aux/s/turns/mean@1"] == 3.0
    assert metrics["val-core/s/acc/mean@1"] == pytest.approx((1 + 0 + 0.25) / 3)


@pytest.mark.parametrize("metric", ["acc", "turns", "bonus"])
def test_a_filter_of_groups_finds_a_number_or_nan(infos, rule, metric):
    filters = ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}"]
    values = [float(info[metric]) for info in infos(TEXTS, *rule, *filters)]
    assert math.isnan(values[0]), "verl does not replace a group for it"
    expected = {"acc": [1, 0, 0.25], "turns": [3, 3], "bonus": [0.5]}[metric]
    assert [value for value in values if not math.isnan(value)] == expected
    named = {"val_rows": ["?"], "respond": lambda draft, rng: "raise"}
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, *filters], **named) as fake:
        validation = fake.validate()
    assert validation.extra_info[metric] == [pytest.approx(math.nan, nan_ok=True)]
    assert not any(f"/{metric}/" in name for name in validation.metrics)


@pytest.mark.parametrize("metric", ["reward", "score"])
def test_a_filter_by_the_score_itself_finds_it_in_training_only(run, rule, metric):
    """verl 0.9.0 reads `reward`, too, from the extra info. A validation has these columns already."""
    filters = ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}"]
    results = run(TEXTS, *rule, *filters)
    told = [result["reward_extra_info"][metric] for result in results]
    assert told == pytest.approx([result["reward_score"] for result in results])
    with FakeVerlTrainer(["+reward_manager=qreward", *rule, *filters], val_rows=["?"]) as fake:
        validation = fake.validate()
    assert metric == "reward" or metric not in validation.extra_info
    assert len(validation.extra_info["reward"]) == 1


def test_a_filter_that_no_judge_feeds_is_an_error_at_the_start(infos, judge_overrides):
    filters = [GRPO, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"]
    grades = lambda call: float(call.blocks["response"])  # noqa: E731
    with JudgeServer(grades) as server:
        with pytest.raises(ConfigurationError, match=r"no judge provides 'acc'.*`correct_at`"):
            infos(["7", "1"], *judge_overrides(a=server), *filters)
        bar = "+qreward.judges.quality.correct_at=0.5"
        assert infos(["7", "1"], *judge_overrides(a=server), *filters, bar)[0]["acc"] == 1.0
        style = "+qreward.judges.quality.criteria.style='is it well written?'"
        named = [*filters[:2], "algorithm.filter_groups.metric=qreward/score/style"]
        told = infos(["7", "1"], *judge_overrides(a=server), *named, style)
        assert told[0]["qreward/score/style"] == pytest.approx(0.7)


def test_gdpo_never_adds_up_nothing(infos, rule):
    gdpo = [
        "algorithm.adv_estimator=gdpo",
        "+algorithm.gdpo_reward_keys=[turns,bonus]",
        "+qreward.on_failure.constant=-1",
        LEGACY,
    ]
    told = infos(TEXTS, *rule, *gdpo)
    parts = [(info["turns"], info["bonus"], info["qreward/failed"]) for info in told]
    assert parts == [(-1, -1, 1.0), (3, 0.5, 0.0), (-1, -1, 1.0), (-1, -1, 1.0), (-1, -1, 1.0)]


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
