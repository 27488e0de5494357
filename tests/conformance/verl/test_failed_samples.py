"""A judge that fails, is out for a while and dies, in both of verl's trainers: the run goes on, and nothing is taught
that nobody said.
"""

from __future__ import annotations

import math
import warnings

import pytest

from .agreement import NEEDS_VERL
from .checks import OF_TRAINED_SAMPLES
from .runs import GROUP, HELD_OUT, PROMPTS, STEPS, train

pytestmark = NEEDS_VERL

SOURCE = "reasoning_gym/chain_sum"


@pytest.fixture(scope="module", params=["v1", "legacy"])
def outcome(request, tmp_path_factory, verl_and_tasks):
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        return train(tmp_path_factory.mktemp(request.param), request.param)


def test_the_run_goes_on_and_all_its_numbers_are_finite(outcome):
    assert len(outcome.rows) == STEPS * PROMPTS * GROUP
    assert {len(group) for group in outcome.groups.values()} == {GROUP}
    for row in outcome.rows:
        assert row["advantages"]
        assert all(math.isfinite(advantage) for advantage in row["advantages"])
    for metrics in outcome.metrics.values():
        assert math.isfinite(metrics.get("actor/grad_norm", 0.0))


def test_every_kind_of_trouble_was_met(outcome):
    failed = [[row["missing"] for row in group] for group in outcome.groups.values()]
    assert any(all(group) for group in failed), "a group that failed whole"
    assert any(any(group) and not all(group) for group in failed), "a group that failed in part"
    assert any(not any(group) for group in failed), "a group that is sound"
    assert any(row["cause"] in ("infra/deadline", "infra/exhausted") for row in outcome.rows), "a judge that went down"
    rates = [outcome.metrics[step]["qreward/failed_rate"] for step in range(1, STEPS + 1)]
    assert max(rates) > 0.9
    assert rates[-1] < 0.6


@pytest.mark.parametrize("holds", OF_TRAINED_SAMPLES)
def test_what_is_trained_in_place_of_a_reward(outcome, holds):
    holds(outcome)


def test_the_metrics_tell_what_failed(outcome):
    for step in range(1, STEPS + 1):
        rows = [row for row in outcome.rows if row["step"] == step]
        metrics = outcome.metrics[step]
        assert metrics["qreward/samples"] == len(rows) == PROMPTS * GROUP
        assert metrics["qreward/failed_rate"] == pytest.approx(sum(row["failed"] for row in rows) / len(rows))


def test_validation_leaves_the_failed_out_of_its_means_and_counts_them(outcome):
    for step, dump in zip((0, STEPS), outcome.validations, strict=True):
        metrics = outcome.metrics[step]
        scored = [row for row in dump if not row["qreward/missing"]]
        assert len(dump) == HELD_OUT
        assert 0 < len(scored) < HELD_OUT
        rewards = [metrics[name] for name in metrics if name.endswith(f"{SOURCE}/reward/mean@1")]
        right = [metrics[name] for name in metrics if name.endswith(f"{SOURCE}/acc/mean@1")]
        assert rewards == [pytest.approx(math.fsum(row["score"] for row in scored) / len(scored), abs=1e-6)]
        assert right == [pytest.approx(math.fsum(row["acc"] for row in scored) / len(scored), abs=1e-6)]
        assert metrics["qreward/val/samples"] == HELD_OUT
        assert metrics[f"val-aux/{SOURCE}/qreward/missing/mean@1"] == pytest.approx(1 - len(scored) / HELD_OUT)


def test_nothing_of_this_verl_was_missed(outcome):
    for text in (
        "ConfigurationError",
        "Traceback",
    ):
        assert text not in outcome.log
