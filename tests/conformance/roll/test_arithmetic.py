"""The fake's data, filters and estimates are ROLL's, number for number: both compute the same in ROLL's process."""

from __future__ import annotations

import pytest

SETTINGS = [
    {},
    {"max_len_mask": True},
    {"difficulty_mask": True},
    {"error_max_len_clip": True},
    {"reward_clip": 0.5},
    {"advantage_clip": 0.3},
    {"whiten_advantages": True},
    {"whiten_rewards": True},
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


@pytest.mark.parametrize("what", ["operations", "refusals", "groups", "chunks", "concatenations"])
def test_data_behave_alike(compare, what):
    assert compare(what) == {}


@pytest.mark.parametrize("what", ["responses", "filters", "reductions"])
def test_a_rollout_loop_meets_the_same(compare, what):
    assert compare(what) == {}


@pytest.mark.parametrize("estimator", ["grpo", "gae", "reinforce"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "+".join(settings) or "defaults")
def test_the_same_trains(compare, estimator, settings):
    assert compare("training", settings={"adv_estimator": estimator, **settings}) == {}
