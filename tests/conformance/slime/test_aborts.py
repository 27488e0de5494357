"""When slime's batch is full it aborts, and waits for every reward that is still pending: nobody may keep it waiting.

The judge holds the rewards that are not needed until it is told otherwise, and the deadline is an hour: that the step
ends at all is the proof.
"""

from __future__ import annotations

import pytest

from ..judges import GROUPS
from . import scenarios
from .checks import check
from .real import play


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
