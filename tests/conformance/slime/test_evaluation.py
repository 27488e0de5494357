"""slime's own evaluation: failed samples are not in its means, and never end the job."""

from __future__ import annotations

import pytest

from . import scenarios
from .checks import check
from .scenarios import EVAL_DRAFTS, EVAL_ITEMS, PARTS


@pytest.mark.parametrize("scenario", scenarios.EVALUATED, ids=str)
def test_failed_samples_are_left_out_of_the_mean(play_once, scenario):
    played = play_once(scenario)
    check(scenario, played)
    (evaluation,) = played.evaluations
    parts = PARTS if scenario.mode == "fan_out" else 1
    assert evaluation.metrics["eval/sums/qreward/samples"] == EVAL_ITEMS * EVAL_DRAFTS * parts


def test_pass_rates_are_of_whole_prompts(play_once):
    (scenario,) = (each for each in scenarios.EVALUATED if each.name == "eval-up")
    (evaluation,) = play_once(scenario).evaluations
    assert {"eval/sums-pass@1", "eval/sums-pass@2"} <= set(evaluation.metrics)


def test_evaluation_without_any_reward_logs_its_failures(play_once):
    (scenario,) = (each for each in scenarios.EVALUATED if each.name == "eval-refused")
    (evaluation,) = play_once(scenario).evaluations
    assert evaluation.metrics["eval/sums/qreward/failed_rate"] == 1.0
