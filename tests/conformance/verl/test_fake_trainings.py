"""Whole trainings row by row, and the findings that the real trainers showed: one scenario, two players.

The stand-in always plays; verl itself with QREWARD_VERL=1.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from .agreement import NEEDS_VERL
from .players import COLUMNS, IN_PARTS, LEGACY, RANKED, SCREENED, Scenario

PLAYERS = pytest.mark.parametrize("player", ["fake", pytest.param("verl", marks=NEEDS_VERL)])

FUNCTION_V1 = Scenario("function-v1", ())
FUNCTION_LEGACY = Scenario("function-legacy", (LEGACY,))
HUGE_V1 = Scenario("huge-v1", (), script="huge")
HUGE_LEGACY = Scenario("huge-legacy", (LEGACY,), script="huge")
NAIVE_V1 = Scenario("naive-v1", ("reward.reward_manager.name=naive",), script="sound")
NAIVE_LEGACY = Scenario("naive-legacy", (LEGACY, "reward.reward_manager.name=naive"))
ONE_STEP_OFF = Scenario("one-step-off", (), experimental="one_step_off")
FILTER_V1 = Scenario(
    "filter-by-acc-v1",
    (
        "algorithm.filter_groups.enable=True",
        "algorithm.filter_groups.metric=acc",
        "trainer.v1.sampler.custom_sampler.path=null",
    ),
    script="uniform",
)
NO_MANAGER = Scenario(
    "reward-model-without-manager",
    ("reward.reward_model.enable=True", "reward.custom_reward_function.path=null"),
    script="sound",
)

RANKED_V1 = Scenario("ranked-v1", (), configuration=RANKED)
SCREENED_V1 = Scenario("screened-v1", (), configuration=SCREENED)
RANKED_LEGACY = Scenario("ranked-legacy", (LEGACY,), configuration=RANKED)

_BY_TOKEN = "algorithm.adv_estimator=reinforce_plus_plus"
PARTS_V1 = Scenario("parts-v1", (_BY_TOKEN,), script="turns", configuration=IN_PARTS)
PARTS_LEGACY = Scenario("parts-legacy", (_BY_TOKEN, LEGACY), script="turns", configuration=IN_PARTS)

GDPO_V1 = Scenario("gdpo-v1", ("algorithm.adv_estimator=gdpo", "+algorithm.gdpo_reward_keys=[acc,qreward/reward]"))

COMPARED = [FUNCTION_V1, FUNCTION_LEGACY, NAIVE_V1, ONE_STEP_OFF]

MEASURED = ("qreward/latency_s", "qreward/blame_s", "qreward/waited", "qreward/val/latency_s")
"""Extra info and metrics that are times."""
STAND_INS = ("token_level_scores", "token_level_rewards")
"""Columns of a failed sample that depend on what its process had scored by then; and metrics that count them."""
OF_STAND_INS = ("critic/score/", "critic/rewards/")


def told(info):
    """What the manager said of a row. In V1 it has a key with NaN once its process has seen it with a value."""
    values = {name: value.item() if hasattr(value, "item") else value for name, value in info.items()}
    values.pop("qreward/sample", None)  # has the uid
    return {name: value for name, value in values.items() if not same(value, math.nan)}


def same(one, other):
    return one == other or (isinstance(one, float) and math.isnan(one) and math.isnan(other))


def same_numbers(one, other):
    return len(one) == len(other) and np.allclose(one, other, rtol=1e-6, atol=1e-6)


def compare_rows(real, fake, *, same_keys):
    """Compare all that is said of every row. `same_keys`: of the extra info, in the same order, NaN among them."""
    groups: dict[str, str] = {}
    for written, row in fake.table.items():
        other = real.table[written]
        assert groups.setdefault(row["uid"], other["uid"]) == other["uid"]
        missing = row["info"].get("qreward/missing") == 1.0
        for name in COLUMNS:
            if missing and name in STAND_INS:
                continue
            assert same_numbers(row[name], other[name]), (name, row, other)
        if same_keys:
            assert list(row["info"]) == list(other["info"])
        one, another = told(row["info"]), told(other["info"])
        assert set(one) == set(another)
        for name, value in one.items():
            assert name in MEASURED or same(value, another[name]), name
    assert len(set(groups.values())) == len(groups)


@pytest.mark.parametrize("player", [pytest.param("verl", marks=NEEDS_VERL)])
@pytest.mark.parametrize("scenario", COMPARED, ids=lambda scenario: scenario.name)
def test_every_row_of_a_training_is_the_same(players, player, scenario):
    real, fake = players.play(player, scenario), players.play("fake", scenario)
    assert (real.error, fake.error) == ("", "")
    assert len(fake.rows) >= 16 * scenario.steps
    assert set(fake.table) == set(real.table)
    ordered = LEGACY in scenario.overrides or scenario.experimental is not None
    compare_rows(real, fake, same_keys=ordered)
    for written, row in fake.table.items():
        assert row["step"] == real.table[written]["step"]
    left_out = MEASURED
    if any(row["info"].get("qreward/missing") for row in fake.table.values()):
        left_out += OF_STAND_INS
    if scenario.experimental:
        left_out += ("qreward/",)  # samples of the batch that is generated ahead are counted at once
    for step, metrics in fake.metrics.items():
        for name, value in metrics.items():
            if not any(each in name for each in left_out):
                assert real.metrics[step][name] == pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True), (step, name)


@PLAYERS
def test_one_step_off_goes_on_where_samples_fail(players, player):
    """Finding 6: it inherits `use_v1: true`, and one failed sample would end its run, of validation, too."""
    outcome = players.play(player, ONE_STEP_OFF)
    assert outcome.error == ""
    assert {row["step"] for row in outcome.rows} == {1, 2}
    assert all(math.isfinite(value) for row in outcome.rows for value in row["advantages"])
    assert outcome.metrics[0]["qreward/val/failed_rate"] == 0.5
    assert outcome.metrics[0]["val-core/sums/acc/mean@2"] == 1.0
    rates = [metrics.get("qreward/failed_rate", 0.25) for metrics in list(outcome.metrics.values())[1:]]
    assert set(rates) == {0.25}, "the next batch may be counted with this one"


@PLAYERS
def test_the_first_sample_has_the_keys_of_all(players, player):
    """Finding 7: the legacy trainer takes the keys of the first sample for all, and the first one fails here."""
    outcome = players.play(player, FUNCTION_LEGACY)
    assert outcome.error == ""
    assert len({tuple(row["info"]) for row in outcome.rows}) == 1
    first = min(outcome.rows, key=lambda row: row["step"])["info"]
    assert {"acc", "qreward/missing", "qreward/returned"} <= set(first)
    assert sum(row["info"]["qreward/missing"] for row in outcome.rows) == 8


@PLAYERS
@pytest.mark.parametrize("scenario", [FUNCTION_V1, FUNCTION_LEGACY], ids=lambda scenario: scenario.name)
def test_the_advantage_of_a_failed_sample_is_zero(players, player, scenario):
    outcome = players.play(player, scenario)
    for row in outcome.rows:
        missing = row["info"]["qreward/missing"] == 1.0
        assert (set(row["advantages"]) == {0.0}) == missing


@PLAYERS
@pytest.mark.parametrize("scenario", [RANKED_V1, RANKED_LEGACY], ids=lambda scenario: scenario.name)
def test_the_places_of_a_group_become_advantages(players, player, scenario):
    """A group has a failed sample, a wrong one, and two right ones, of which the judge prefers the second."""
    outcome = players.play(player, scenario)
    assert outcome.error == ""
    groups: dict[tuple, list] = {}
    for row in outcome.rows:
        groups.setdefault((row["step"], row["uid"]), []).append(row)
    assert len(groups) == 4 * scenario.steps
    for rows in groups.values():
        scored = [row for row in rows if not row["info"]["qreward/missing"]]
        rewards = np.array([sum(row["token_level_rewards"]) for row in scored])
        assert set(rewards) == {0.0, 0.5, 1.0}
        advantages = (rewards - rewards[rewards >= 0].mean()) / (np.std(sorted(set(rewards)), ddof=1) + 1e-6)
        for row, advantage in zip(scored, advantages, strict=True):
            trained = [value for value, mask in zip(row["advantages"], row["response_mask"], strict=True) if mask]
            assert trained == pytest.approx([advantage] * len(trained), abs=1e-6)
        for row in rows:
            assert row["info"]["qreward/missing"] == 0.0 or set(row["advantages"]) == {0.0}
    assert outcome.metrics[1]["qreward/failed_rate"] == 0.25
    assert outcome.metrics[0]["qreward/val/failed_rate"] == 0.5


@PLAYERS
@pytest.mark.parametrize("scenario", [PARTS_V1, PARTS_LEGACY], ids=lambda scenario: scenario.name)
def test_each_turn_has_its_reward_where_its_mask_ends(players, player, scenario):
    """With a discount of 1, a token's return is what comes at it and after it: of its own turn and of later ones."""
    outcome = players.play(player, scenario)
    assert outcome.error == ""
    several = 0
    for row in outcome.rows:
        mask, returns = np.array(row["response_mask"]), np.array(row["returns"])
        total = sum(row["token_level_scores"])
        last = np.flatnonzero(mask)[-1]
        assert returns[0] == pytest.approx(total)
        if mask.all():
            assert set(returns) == {returns[0]}
            continue
        several += 1
        first = np.flatnonzero(mask == 0)[0] - 1
        assert set(returns[: first + 1]) == {returns[0]}
        assert set(returns[first + 1 : last + 1][mask[first + 1 : last + 1] == 1]) == {0.125}
        assert total - 0.125 in (0.0, 0.25, 0.5, 1.0)
    assert several >= 4


@PLAYERS
def test_gdpo_trains_in_v1_and_leaves_the_failed_out(players, player):
    """verl itself would end the first step: its V1 trainer passes no single rewards to an estimator."""
    outcome = players.play(player, GDPO_V1)
    assert outcome.error == ""
    assert {row["step"] for row in outcome.rows} == {1, 2}
    for row in outcome.rows:
        assert any(row["advantages"]) != bool(row["info"]["qreward/missing"])


@PLAYERS
def test_a_screened_sample_moves_nobody(players, player):
    """Of each group one sample has failed, and a monitor takes the best one out."""
    outcome = players.play(player, SCREENED_V1)
    assert outcome.error == ""
    causes = [row["info"]["qreward/cause"] for row in outcome.rows]
    assert causes.count("policy/screened") >= len(outcome.rows) / 4 - 2
    for row in outcome.rows:
        trained = [value for value, mask in zip(row["advantages"], row["response_mask"], strict=True) if mask]
        if row["info"]["qreward/missing"]:
            assert set(trained) == {0.0}
        else:
            side = 1 if sum(row["token_level_scores"]) == 0.5 else -1
            advantage = side * 0.125 / (np.std([0.25, 0.5], ddof=1) + 1e-6)
            assert trained == pytest.approx([advantage] * len(trained), abs=1e-6)
    assert outcome.metrics[1]["qreward/screened_rate"] == outcome.metrics[1]["qreward/failed_rate"] == 0.25


@PLAYERS
def test_verls_own_manager_ends_the_legacy_trainer_with_the_first_failure(players, player):
    """What qreward is compared with: the first sample that fails is one of the first validation."""
    outcome = players.play(player, NAIVE_LEGACY)
    assert "ValueError" in outcome.error
    assert "no such answer" in outcome.error
    assert outcome.rows == []
    assert outcome.metrics == {}


@PLAYERS
def test_what_a_function_returns_keeps_its_names_and_a_number_is_acc(players, player):
    """Finding 10."""
    outcome = players.play(player, FUNCTION_V1)
    for row in outcome.rows:
        info, score = row["info"], sum(row["token_level_scores"])
        if info["qreward/missing"]:
            assert math.isnan(info["acc"])
        elif score == 0.5:
            assert info["acc"] is False
            told = json.loads(info["qreward/returned"])
            assert told["style"] > 1
            assert isinstance(told["why"], str)
        else:
            assert info["acc"] == score
    assert outcome.metrics[0]["val-core/sums/acc/mean@2"] == 1.0, "a session that failed is nobody's wrong answer"
    assert "val-aux/sums/acc/mean@1" not in outcome.metrics[0]


@PLAYERS
def test_a_filter_by_acc_has_its_metric(players, player):
    """Finding 10: without `acc` of a function that returns a number, the filter ends the run."""
    outcome = players.play(player, FILTER_V1)
    assert outcome.error == ""
    groups: dict[tuple, set] = {}
    for row in outcome.rows:
        groups.setdefault((row["step"], row["uid"]), set()).add(row["info"]["acc"])
    assert len(groups) == 4 * FILTER_V1.steps
    assert all(len(values) > 1 for values in groups.values()), "groups of one value are replaced"
    evicted = [outcome.metrics[step].get("training/filter_groups/evicted_samples", 0) for step in (1, 2)]
    assert evicted[0] >= 1
    assert all(step["qreward/failed_rate"] == 0.0 for number, step in outcome.metrics.items() if number)


@PLAYERS
@pytest.mark.parametrize("scenario", [HUGE_V1, HUGE_LEGACY], ids=lambda scenario: scenario.name)
def test_no_score_is_too_large_for_float32(players, player, scenario):
    """Finding 15: 1e39 is infinite in float32. A row of training that is called `test` is one of training, too."""
    outcome = players.play(player, scenario)
    assert outcome.error == ""
    for row in outcome.rows:
        assert all(math.isfinite(value) for name in COLUMNS for value in row[name])
        huge = row["info"]["qreward/missing"] == 1.0
        assert huge == (row["info"]["qreward/cause"] != "")
    for step in (1, 2):
        assert outcome.metrics[step]["qreward/samples"] == 16
        assert outcome.metrics[step]["qreward/failed_rate"] == 0.25


@PLAYERS
def test_a_reward_model_that_bypasses_managers_ends_the_run_before_it_begins(players, player):
    """Finding 16."""
    outcome = players.play(player, NO_MANAGER)
    assert outcome.rows == []
    assert outcome.metrics == {}
    assert "ConfigurationError" in outcome.error
    assert "a reward model without" in outcome.error or "reward_model.enable: " in outcome.error, outcome.error[-2000:]
