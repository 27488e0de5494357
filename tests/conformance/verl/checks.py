"""What holds for every sample that was trained in a run with failed samples, whichever of verl's trainers had it."""

from __future__ import annotations

import pytest


def failed_samples_have_no_advantage(outcome):
    assert any(row["missing"] for row in outcome.rows)
    assert any(row["advantages"][0] for row in outcome.rows)
    for row in outcome.rows:
        if row["missing"]:
            assert set(row["advantages"]) == {0.0}


def the_others_have_what_verl_makes_of_them_alone(outcome):
    for row in outcome.rows:
        assert row["advantages"] == pytest.approx(row["raw"], abs=1e-6)


def who_is_left_alone_of_a_group_has_none(outcome):
    for group in outcome.groups.values():
        scored = [row for row in group if not row["missing"]]
        if len(scored) == 1 < len(group):
            assert set(scored[0]["advantages"]) == {0.0}


OF_TRAINED_SAMPLES = (
    failed_samples_have_no_advantage,
    the_others_have_what_verl_makes_of_them_alone,
    who_is_left_alone_of_a_group_has_none,
)
