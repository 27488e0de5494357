"""The extra info of samples: the same keys where verl wants the same keys, and what verl's `naive` manager gives."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest

from qreward_plugins import ConfigurationError
from qreward_plugins.testing import JudgeServer
from verl_adapter import trainer

LEGACY = "trainer.use_v1=False"
OURS = "reward.reward_manager.name=qreward"

FUNCTIONS = """
def rule(data_source, solution_str, ground_truth, extra_info):
    if "raise" in solution_str:
        raise ValueError("no such answer")
    if "number" in solution_str:
        return 0.25
    result = {"score": 0.5, "acc": "42" in solution_str, "turns": 3, "pred": solution_str[:4], "none": None}
    if "more" in solution_str:
        result |= {"bonus": 0.5, "broken": float("nan"), "huge": 1e39, "reward": 9.0}
    return result
"""


@pytest.fixture
def rule(tmp_path):
    path = tmp_path / "functions.py"
    path.write_text(FUNCTIONS)
    return [
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={path}",
        "reward.custom_reward_function.name=rule",
        # What it returns is the matter here; a worker process would import torch and verl for each manager.
        "+qreward.sources.compute_score.mode=thread",
    ]


@pytest.fixture
def infos(compose, tokenizer, make_data):
    """The extra info of one response after the other, each of another reward worker if `workers` says so."""
    from verl.trainer.ppo.reward import load_reward_manager

    def infos(texts, *overrides, workers=1, **columns):
        async def main():
            grpo = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "+qreward.groups.wait_s=0.01")
            config = compose(OURS, *grpo, *overrides)
            managers = [load_reward_manager(config, tokenizer) for _ in range(workers)]
            try:
                told = []
                for number, text in enumerate(texts):
                    data = make_data([text], uid=f"u{number}", columns=columns)
                    told.append((await managers[number % workers].run_single(data))["reward_extra_info"])
                return told
            finally:
                for manager in managers:
                    await manager.aclose()

        return asyncio.run(main())

    return infos


def legacy_columns(infos):
    """As verl's agent loop makes columns of the extra info of samples (agent_loop.py, `_postprocess`)."""
    return {key: np.array([info[key] for info in infos]) for key in list(infos[0])}


TEXTS = ["raise", "It is 42, more", "It is 7", "number", "raise"]


@pytest.mark.parametrize("order", [TEXTS, TEXTS[1:], TEXTS[3:] + TEXTS[:3]])
@pytest.mark.parametrize("workers", [1, 2])
def test_where_sample_0_speaks_for_all_every_sample_has_its_keys(infos, rule, order, workers):
    told = infos(order, *rule, LEGACY, workers=workers)
    assert len({tuple(info) for info in told}) == 1, "the order, too: batches of several workers are compared"
    columns = legacy_columns(told)
    values = trainer._unpacked({name: column.tolist() for name, column in columns.items()})
    at = order.index("It is 42, more")
    assert (values["turns"][at], values["pred"][at], values["bonus"][at], values["acc"][at]) == (3, "It i", 0.5, True)
    failed = order.index("raise")
    assert (values["turns"][failed], values["acc"][failed]) == (None, None)
    assert "qreward/returned" not in values


def test_what_a_function_returns_has_its_own_names_and_values(infos, rule):
    first, more, seven, number, failed = infos(TEXTS, *rule)
    naive = {"score": 0.5, "acc": True, "turns": 3, "pred": "It i", "none": None, "bonus": 0.5}
    assert {key: more[key] for key in naive} == naive
    assert more["acc"] is True
    assert (more["broken"], more["huge"]) == (None, None), "no NaN and nothing that is infinite in float32"
    assert "reward" not in more, "verl's validation has a column of this name"
    assert (seven["acc"], number["acc"]) == (False, 0.25), "of a number, verl's naive manager makes `acc`"
    assert failed["acc"] is None
    assert failed["qreward/failed"] == first["qreward/failed"] == 1.0
    assert failed.keys() >= naive.keys(), "what was seen once is there from then on"


def test_validation_of_v1_and_legacy_takes_them(infos, rule):
    from verl.trainer.ppo.metric_utils import process_validation_metrics

    for overrides in ([LEGACY], []):
        columns = {}
        for row, info in enumerate(infos(TEXTS, *rule, *overrides)):
            for key in {**columns, **info}:
                columns.setdefault(key, [None] * row).append(info.get(key))
        metrics = process_validation_metrics(["s"] * 5, [f"u{row}" for row in range(5)], trainer._unpacked(columns))
        assert metrics["s"]["turns"]["mean@1"] == 3.0
        assert metrics["s"]["acc"]["mean@1"] == pytest.approx((1 + 0 + 0.25) / 3)


FILTER = "algorithm.filter_groups.enable=True"


@pytest.mark.parametrize("metric", ["acc", "turns", "bonus", "score"])
def test_a_filter_of_groups_finds_a_number_or_nan(infos, rule, compose, metric):
    filters = f"+algorithm.filter_groups={{enable: true, metric: {metric}}}"
    values = [float(info[metric]) for info in infos(TEXTS, *rule, filters)]
    assert math.isnan(values[0])
    expected = {"acc": [1, 0, 0.25], "turns": [3, 3], "bonus": [0.5], "score": [0.5, 0.5]}[metric]
    assert [value for value in values if not math.isnan(value)] == expected
    assert float(np.std([values[0], 1.0, 1.0])) != 0.0, "verl does not replace a group for it"
    (marked,) = infos(["raise"], *rule, filters, extra_info=[{"qreward_validation": True}])
    assert marked[metric] is None if metric in marked else metric != "acc"


def test_a_filter_that_no_judge_feeds_is_an_error_at_the_start(infos, judge_overrides):
    filters = "+algorithm.filter_groups={enable: true, metric: acc}"
    with JudgeServer(lambda call: 5.0) as server:
        with pytest.raises(ConfigurationError, match=r"no judge gives 'acc'.*`correct_at`"):
            infos(["7"], *judge_overrides(a=server), filters)
        bar = "+qreward.judges.quality.correct_at=0.5"
        assert infos(["7"], *judge_overrides(a=server), filters, bar)[0]["acc"] == 1.0
        style = "+qreward.judges.quality.criteria.style='is it well written?'"
        named = "+algorithm.filter_groups={enable: true, metric: qreward/score/style}"
        assert infos(["7"], *judge_overrides(a=server), named, style)[0]["qreward/score/style"] == 0.5


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
            *judge_overrides(a=server),
            "+qreward.judges.quality.sources=[a]",
            "+qreward.judges.strict={kind: llm, sources: [a], correct_at: 1.0}",
            "+qreward.routes={origin: strict, *: quality}",
        ]
        told = infos(["7", "7"], *overrides, data_source=["other"]) + infos(["7"], *overrides, data_source=["origin"])
    assert [info["acc"] for info in told] == [None, None, 0.0]
