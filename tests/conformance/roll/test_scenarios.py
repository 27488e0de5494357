"""ROLL's own scheduler and reward workers with every judge: the run goes on, or ends in one error that says why; and
the fake does the same. Then the mixin on ROLL's own trajectory env manager, and the recipes.

Without ROLL the fake's half runs alone, held against what must hold of ROLL.
"""

from __future__ import annotations

import math

import pytest

from qreward_plugins.testing import JudgeServer

from ..judges import GROUP_SIZE, GROUPS, Judge, read_response, uneven
from ..played import close, once, outcomes
from ..processes import RECIPES, dry_run
from ..scenarios import Scenario
from . import scenarios
from .scenarios import ENV_REWARD, check, masks, tree_of
from .trainers import play_fake

BY_CHANCE = (
    *("/time/", "latency_s", "attempts_", "tokens_", "cost_usd_", "blame_s/"),
    # Whether nonsense is the verdict's fault or the source's depends on how much of it came before.
    *("/failed/infra_", "/failed/verdict_"),
)
"""In the names of metrics that differ between two runs of ROLL itself."""

played_by_fake = once(play_fake)


@pytest.mark.parametrize("scenario", scenarios.ALONE, ids=str)
def test_the_fake_does_what_must_hold_of_roll(scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_roll_does_it_and_the_fake_agrees(play_once, scenario):
    theirs, ours = play_once(scenario), played_by_fake(scenario)
    check(scenario, theirs)
    for mine, rolls in zip(ours.steps, theirs.steps, strict=True):
        # Elsewhere a failed sample has the mean of those that happened to be scored by then.
        if masks(scenario) or scenario.mode != "single" or scenario.scored != "unspoilt":
            assert outcomes(mine) == pytest.approx(outcomes(rolls), abs=1e-4)
        assert numbers(mine) == pytest.approx(numbers(rolls), abs=1e-6)
        assert set(mine.columns) <= set(rolls.columns)
    if scenario in scenarios.ENDING:
        assert "3 groups in a row had fewer than 1 samples with a reward" in theirs.error_text
        # A source that answers nothing but nonsense is put to rest: then that is why there is no verdict.
        expected = ("infra",) if scenario.name.startswith("refused") else ("verdict", "infra/garbage")
        assert any(cause in theirs.error_text for cause in expected), theirs.error_text
    if scenario == scenarios.WHOLE_GROUPS:
        _, *others = scenarios.drawn()
        assert {sample.draft.item for sample in theirs.steps[0].samples} == set(others[:GROUPS])


def numbers(step):
    """Our metrics that are no matter of time."""
    names = (
        name for name in step.metrics if name.startswith("qreward/") and not any(part in name for part in BY_CHANCE)
    )
    return {name: step.metrics[name] for name in names}


# Judged rewards for the trajectories of an environment


@pytest.fixture
def trajectories(player):
    """Play a group of environments over a judge. Returns the rollouts."""

    def play(score, *, episodes=1, per_worker=0):
        scenario = Scenario("agentic", Judge(), "any", engine={"deadline_s": 5.0, "max_attempts": 20})
        with JudgeServer(score) as judge:
            tree = tree_of(scenario, judge.base_url)
            tree["engine"]["shared"] = "off"
            keys = {"custom_envs": {"items": {"qreward": tree}}}
            keys["train_env_manager"] = {"max_env_num_per_worker": per_worker}
            return player.must("trajectories", keys=keys, episodes=episodes)

    return play


def quality(call):
    return read_response(call.blocks["response"]).quality


def unless_uneven(call):
    return math.nan if uneven(read_response(call.blocks["response"])) else quality(call)


def draft_of(rollout):
    return read_response(rollout["text"][rollout["text"].rindex("item") :])


def assert_failed_have_the_mean(rollouts):
    """Each failed trajectory of each group adds the mean of all scored ones, and all have the same metrics."""
    for episode in {rollout["episode"] for rollout in rollouts}:
        group = [rollout for rollout in rollouts if rollout["episode"] == episode]
        scored = [rollout["episode_score"] for rollout in group if rollout["mask"]]
        assert all(rollout["mask"] or close(rollout["episode_score"], sum(scored) / len(scored)) for rollout in group)
    assert len({frozenset(rollout["metrics"]) for rollout in rollouts}) == 1


def test_a_finished_trajectory_gets_the_judges_reward_and_a_failed_one_is_masked(trajectories):
    rollouts = trajectories(unless_uneven, episodes=2)
    assert len(rollouts) == 2 * GROUP_SIZE
    for rollout in rollouts:
        draft = draft_of(rollout)
        assert draft.draft == rollout["env"]
        assert (not rollout["mask"]) == uneven(draft)
        assert close(rollout["score_sum"], rollout["episode_score"])
        assert uneven(draft) or close(rollout["episode_score"], ENV_REWARD + draft.reward)
        assert all(math.isfinite(value) for value in rollout["metrics"].values())
    assert_failed_have_the_mean(rollouts)


def test_the_trajectories_of_a_group_meet_though_workers_are_processes(trajectories):
    """The first worker's both fail, and what the other one's get is all there is to be told."""

    def score(call):
        return math.nan if read_response(call.blocks["response"]).draft < 2 else quality(call)

    rollouts = trajectories(score, episodes=3, per_worker=2)
    assert len(rollouts) == 3 * GROUP_SIZE
    assert [rollout["env"] for rollout in rollouts if not rollout["mask"]] == [0, 1] * 3
    assert_failed_have_the_mean(rollouts)


# The recipes on ROLL itself, whose own reading drops keys that it does not know without a word


@pytest.mark.parametrize("name", ["grpo", "ppo", "ppo_sleeping"])
def test_a_dry_run_knows_every_key_and_finds_nothing_missing_but_what_a_cpu_lacks(roll_source, tmp_path, name):
    (tmp_path / "model").mkdir()
    environment = {
        "PYTHONPATH": str(RECIPES.parent),
        "HOME": str(tmp_path),
        "ROLL_DIR": str(roll_source),
        "PRETRAIN": str(tmp_path / "model"),
        "OUTPUT_DIR": str(tmp_path / "output"),
    }
    failed = dry_run("roll", name, tmp_path, environment)
    # The environment of these tests has no GPU, no engine and no tensorboard.
    assert {"GPUs"} <= failed <= {"GPUs", "rollout engine", "logger"}
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "a dry run writes nothing"
