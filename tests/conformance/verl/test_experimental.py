"""verl's experimental trainers with a judge that fails, is out for a while and dies: they go on to their end.

They inherit `trainer.use_v1: true` and derive from the legacy trainer, in which a sample without a reward ends the run.
"""

from __future__ import annotations

import math

import pytest

from .agreement import NEEDS_VERL
from .checks import OF_TRAINED_SAMPLES
from .runs import EXPERIMENTAL, GROUP, HELD_OUT, PROMPTS, STEPS, train

pytestmark = NEEDS_VERL

SOURCE = "reasoning_gym/chain_sum"


@pytest.fixture(scope="module", params=EXPERIMENTAL)
def outcome(request, tmp_path_factory, verl_and_tasks):
    return train(tmp_path_factory.mktemp(request.param), request.param)


def test_the_run_goes_on_to_its_end(outcome):
    assert len(outcome.rows) == STEPS * PROMPTS * GROUP
    assert {len(group) for group in outcome.groups.values()} == {GROUP}
    steps = [step for step, metrics in outcome.metrics.items() if "critic/rewards/mean" in metrics]
    assert max(steps) == STEPS, "of the first, the fully asynchronous one writes no line"
    for step in steps:
        assert math.isfinite(outcome.metrics[step]["critic/rewards/mean"])
        assert math.isfinite(outcome.metrics[step].get("actor/grad_norm", 0.0))


def test_samples_failed_and_were_counted_as_such(outcome):
    rates = [metrics["qreward/failed_rate"] for metrics in outcome.metrics.values() if "qreward/failed_rate" in metrics]
    assert max(rates) > 0.2


@pytest.mark.parametrize("holds", OF_TRAINED_SAMPLES)
def test_what_is_trained_in_place_of_a_reward(outcome, holds):
    holds(outcome)


def test_validation_leaves_the_failed_out_of_its_means(outcome):
    validated = [metrics for metrics in outcome.metrics.values() if "qreward/val/samples" in metrics]
    assert validated
    for metrics in validated:
        assert metrics["qreward/val/samples"] == HELD_OUT
        assert 0 < metrics["qreward/val/failed_rate"] < 1
        assert metrics[f"val-aux/{SOURCE}/qreward/missing/mean@1"] == pytest.approx(metrics["qreward/val/failed_rate"])
    for dump in outcome.validations:
        scored = [row["acc"] for row in dump if not row["qreward/missing"]]
        assert len(dump) == HELD_OUT
        assert any(
            metrics[f"val-core/{SOURCE}/acc/mean@1"] == pytest.approx(math.fsum(scored) / len(scored), abs=1e-6)
            for metrics in validated
        )


def test_nothing_of_this_verl_was_missed(outcome):
    for text in (
        "ConfigurationError",
        "Traceback",
    ):
        assert text not in outcome.log
