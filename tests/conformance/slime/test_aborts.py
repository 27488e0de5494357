"""When slime's batch is full it aborts, and waits for every reward that is still pending: nobody may keep it waiting.

The judge holds the rewards that are not needed until it is told otherwise, and the deadline is an hour: that the step
ends at all is the proof.
"""

from __future__ import annotations

import pytest

from ..checks import check_counts, own_metrics
from ..judges import GROUPS
from . import scenarios
from .checks import check, check_samples, check_train_data
from .real import play
from .rollouts import played_sample


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
