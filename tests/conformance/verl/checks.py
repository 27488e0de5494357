"""What holds for every sample that was trained in a run with failed samples, whichever of verl's trainers had it."""

from __future__ import annotations

import math

import pytest

from .runs import GROUP


def failed_samples_have_no_advantage(outcome):
    for row in outcome.rows:
        assert row["imputed"] == row["missing"], "all could be waited for"
        if row["imputed"]:
            assert set(row["advantages"]) == {0.0}
            assert max(map(abs, row["raw"])) < 1e-3, "without our hand in it, too, but for float32"
    assert any(row["advantages"][0] for row in outcome.rows)


def failed_samples_have_the_mean_of_their_siblings(outcome):
    for group in outcome.groups.values():
        scored = [row["score"] for row in group if not row["missing"]]
        mean = math.fsum(scored) / len(scored) if scored else 0.0
        assert all(row["score"] == pytest.approx(mean, abs=1e-6) for row in group if row["missing"])


def siblings_are_scaled_as_documented(outcome):
    checked = 0
    for group in outcome.groups.values():
        scored = [row for row in group if not row["missing"]]
        mean = math.fsum(row["score"] for row in scored) / max(len(scored), 1)
        squares = math.fsum((row["score"] - mean) ** 2 for row in scored)
        if len(scored) < 2 or len(scored) == GROUP or squares < 1e-4:
            continue
        alone = math.sqrt(squares / (len(scored) - 1))
        for row in scored:
            expected = (row["score"] - mean) / alone * math.sqrt((GROUP - 1) / (len(scored) - 1))
            assert row["advantages"][0] == pytest.approx(expected, rel=1e-3, abs=1e-4)
            checked += 1
    assert checked


OF_TRAINED_SAMPLES = (
    failed_samples_have_no_advantage,
    failed_samples_have_the_mean_of_their_siblings,
    siblings_are_scaled_as_documented,
)
