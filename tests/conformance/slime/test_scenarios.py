"""slime's own rollout with every judge: the job goes on, what failed does not train, and the fake does the same.

Without slime the fake's half runs alone, held against what must hold of slime.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.kit import Program
from tests.replicas.conftest import StandIns

from ..judges import GROUPS, Judge
from ..played import check_counts, once, outcomes, own_metrics
from ..scenarios import BAD_MINUTE, PATIENT, UNEVEN, Scenario
from . import scenarios
from .scenarios import check, check_samples, check_train_data
from .trainers import Player, play, play_fake, played_sample

FLAG = ("--data-source-path", "slime_adapter.DataSource")
FULLY_ASYNC = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")

played_by_fake = once(play_fake)


@pytest.mark.parametrize("scenario", scenarios.ALONE, ids=str)
def test_the_fake_does_what_must_hold_of_slime(scenario):
    check(scenario, played_by_fake(scenario))


@pytest.mark.parametrize("scenario", scenarios.SHARED, ids=str)
def test_slime_does_it_and_the_fake_agrees(play_once, scenario):
    theirs, ours = play_once(scenario), played_by_fake(scenario)
    check(scenario, theirs)
    pairs = [*zip(ours.steps, theirs.steps, strict=True), *zip(ours.evaluations, theirs.evaluations, strict=True)]
    for mine, slimes in pairs:
        assert names(mine) == names(slimes)
        # Elsewhere who is scored depends on who comes first.
        if scenario.scored != "some":
            assert outcomes(mine) == pytest.approx(outcomes(slimes), abs=1e-4)
    if items := scenarios.FILTERED_ITEMS.get(scenario.name):
        assert {sample.draft.item for sample in theirs.steps[0].samples} == items
        assert theirs.steps[0].metrics.get("rollout/dynamic_filter/drop_qreward_failed", 0) == (items != {0, 1})
    if scenario in scenarios.FILTERED_DEAD:
        reasons = "infra/garbage|verdict/invalid" if scenario.judge.listens else "infra/"
        assert re.search(reasons, theirs.error_text), theirs.error_text
    if scenario in scenarios.REWARD_KEY:
        (step,) = theirs.steps
        causes = {sample.cause for sample in step.samples}
        assert causes > {""}
        for cause in causes:
            share = sum(sample.cause == cause for sample in step.samples) / len(step.samples)
            assert step.metrics[f"rollout/error_cat/{cause}"] == pytest.approx(share)


def names(step):
    """The metrics of rewards, without those that tell how the time went."""
    return {name for name in step.metrics if "/qreward/" in name and "/blame_s/" not in name}


@pytest.mark.parametrize("scenario", scenarios.NOT_FAKED, ids=str)
def test_what_only_slime_plays(play_once, scenario):
    check(scenario, play_once(scenario))


@pytest.mark.parametrize("key", [None, "score"])
def test_a_generation_that_was_lost_is_a_failed_sample(player, key):
    """The server ends a generation as aborted though slime did not ask: that sample never sees the reward function."""
    played = play(Scenario("lost", Judge(), "any", reward_key=key), player, loses=lambda draft: draft.draft == 2)
    assert played.error is None, played.error_text
    lost = [sample for sample in played.steps[0].samples if sample.status == "aborted"]
    assert len(lost) == GROUPS
    assert all(sample.removed and sample.trained == 0.0 and not any(sample.mask) for sample in lost)
    assert played.said == ()


def test_a_mistake_ends_the_run_before_anything_is_generated(player):
    scenario = Scenario("start", Judge(), "all", evaluate=True)
    played = play(scenario, player, flags=[*FLAG, "--group-rm"])
    assert (played.error, played.steps) == ("ConfigurationError", ())
    assert "--eval-function-path slime_adapter.eval_rollout" in played.error_text


def test_a_run_without_mistakes_is_slimes_own_and_another_reward_function_is_one(player):
    scenario = Scenario("start", Judge(), "all")
    check(scenario, play(scenario, player, flags=FLAG))
    played = play(scenario, player, flags=[*FLAG, "--rm-type", "math"])
    assert played.error == "ConfigurationError"
    assert "Add --custom-rm-path slime_adapter.reward" in played.error_text


# When slime's batch is full it aborts, and waits for every reward that is still pending: nobody may keep it waiting.
# The judge holds the rewards that are not needed until it is told otherwise, and the deadline is an hour: that the step
# ends at all is the proof.


@pytest.mark.parametrize("scenario", scenarios.ABORTED, ids=str)
def test_pending_rewards_do_not_hold_the_step(player, scenario):
    reports = []

    def script(stage):
        stage.step(0)
        # Nobody waits for what was held: the judge sees its clients go.
        reports.append(stage.judge.server.wait_for(lambda report: report.abandoned == scenario.judge.held))

    played = play(scenario, player, script=script)
    check(scenario, played)
    (report,) = reports
    assert report.in_flight == 0
    assert report.answered == len(played.steps[0].samples)
    assert {sample.draft.item for sample in played.steps[0].samples} == set(range(GROUPS))


@pytest.mark.parametrize("scenario", scenarios.PARTIAL, ids=str)
def test_with_partial_rollout_they_are_scored_behind_the_step_and_train_in_the_next(player, scenario):
    buffers = {}

    def script(stage):
        stage.step(0)
        buffers["aborted"] = stage.ask("buffered")
        stage.judge.release()
        stage.judge.server.wait_for(lambda report: not report.in_flight)
        stage.step(1)

    played = play(scenario, player, script=script)
    assert played.error is None, played.error_text
    assert not played.complaints
    first, second = played.steps
    for step in (first, second):
        check_samples(scenario, step)
        check_train_data(scenario, step)
        check_counts(scenario, own_metrics(step, "rollout/qreward/"), step)
    held = [sample for sample in map(played_sample, buffers["aborted"]) if scenario.judge.holds(sample.draft)]
    assert len(held) == scenario.judge.held
    for sample in held:
        assert sample.reward == 0.0
        assert sample.removed
        assert sample.failed
    assert {sample.draft.item for sample in second.samples} <= {2, 3, 4}
    again = [sample for sample in second.samples if scenario.judge.holds(sample.draft)]
    assert again
    assert not any(sample.failed or sample.removed for sample in again)


# Several event loops in one process, as slime has them: limits belong to the process, and no loop leaves anything.

ASYNC = [each for each in scenarios.EVERY_JUDGE if each.name in ("uneven-single", "invalid-group", "refused-single")]


@pytest.mark.parametrize("scenario", [*ASYNC, BAD_MINUTE], ids=str)
def test_fully_async_rollouts_run_on_a_loop_of_their_own(player, scenario):
    check(scenario, play(scenario, player, flags=[*FULLY_ASYNC, "--sglang-server-concurrency", "16"]))


def test_fully_async_rollouts_and_evaluation_have_a_loop_each(player):
    scenario = Scenario("async-eval", UNEVEN, "unspoilt", engine=PATIENT, evaluate=True)
    flags = [*FULLY_ASYNC, "--sglang-server-concurrency", "8"]
    played = play(
        scenario, player, flags=[*flags, "--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"]
    )
    check(scenario, played)


def test_a_closed_job_leaves_no_thread_of_ours(new_player):
    """After the engines are closed, a second job of the same process opens them anew."""
    scenario = Scenario("again", Judge(), "all")
    threads = []
    for _ in range(2):
        check(scenario, play(scenario, new_player))
        threads.append(sorted(new_player.ask("close").result["threads"]))
    assert threads[0] == threads[1]
    assert not any("qreward" in name or "portal" in name.lower() for name in threads[0]), threads[0]


# slime beside other parts of ours


def test_slimes_client_of_reward_servers_asks_ours(player, tmp_path):
    scenario = Scenario("served", Judge(), "all", hook=False)
    config = tmp_path / "judges.yaml"
    with scenario.judge.start() as judge:
        config.write_text(json.dumps(scenario.config(judge.base_url)))
        with Program("-m", "qreward_plugins.cli", "serve", config, "--port", "0") as server:
            url = server.line("http").split()[3].rstrip(";")
            flags = ["--rm-url", f"{url}/slime", "--rm-type", "remote_rm"]
            played = play(scenario, player, tree={}, flags=flags)
    assert played.error is None, played.error_text
    assert all(sample.raw == sample.draft.reward for sample in played.steps[0].samples)


def test_the_judge_sleeps_while_slime_trains(slime_source, tmp_path):
    """A judge on the GPUs of a run is awake for every reward, and sleeps before slime trains."""
    stand_ins, steps = StandIns(tmp_path), 2
    engine = {"deadline_s": 30, "shared": "off"}
    tree = stand_ins.tree(colocated=True, sleep_mode=True, data_parallel=1, start_within_s=300, engine=engine)

    def script(stage):
        for number in range(steps):
            stage.evaluate(number)
            stage.step(number)
            with (tmp_path / "notes").open("a") as notes:
                notes.write("trainer /train\n")

    scenario = Scenario("sleeping", Judge(), "all", steps=steps, evaluate=True)
    (tmp_path / "player").mkdir()
    with Player(slime_source, tmp_path / "player") as player:
        played = play(scenario, player, script=script, tree=tree, flags=["--colocate"])
    assert (played.error, played.error_text) == (None, "")
    assert stand_ins.events("/sleep", "/wake_up", "/train") == (["/sleep", "/train", "/wake_up"] * steps)[:-1]
    assert len(played.steps) == len(played.evaluations) == steps
    for step in (*played.steps, *played.evaluations):
        assert {round(sample.reward, 6) for sample in step.samples} == {0.7}
    assert stand_ins.living() == [], "the servers end with the process of slime"
