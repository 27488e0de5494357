"""The fake's data, responses, filters and estimates are ROLL's within 1e-6: both compute the same in ROLL's process."""

from __future__ import annotations

import pytest

SETTINGS = [
    {},
    {"max_len_mask": True},
    {"difficulty_mask": True},
    {"norm_mean_type": "group"},
    {"norm_std_type": "batch"},
    {"norm_mean_type": "batch", "norm_std_type": "batch"},
    {"norm_mean_type": "group", "norm_std_type": "batch"},
    {"gamma": 0.9},
]


@pytest.fixture
def compare(player):
    """What differs, by the name of the comparison."""

    def compare(what, **options):
        told = player.must("compare", what=what, options=options)
        assert told, "nothing was compared"
        return {name: difference for name, difference in told.items() if difference}

    return compare


@pytest.mark.parametrize("what", ["data", "responses", "filters"])
def test_a_rollout_loop_meets_the_same(compare, what):
    assert compare(what) == {}


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings) or "defaults")
def test_the_same_trains(compare, estimator, settings):
    assert compare("training", settings={"adv_estimator": estimator, **settings}) == {}
