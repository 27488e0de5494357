"""One limit for all reward workers of a run: nothing is configured for that, and ROLL's own cluster starts them."""

from __future__ import annotations

import pytest

from qreward_plugins.testing import Latency, ServerLimits

from ..judges import GROUP_SIZE, GROUPS, Judge
from ..scenarios import Scenario
from .real import Player, scenario_keys
from .scenarios import DOMAIN, TAG

STEPS = 4
WINDOW_S = 6.0
PER_WINDOW = 6
IN_FLIGHT = 3
"""Not a multiple of the workers: of fixed shares one would go to waste."""
JUDGE = Judge(
    latency=Latency(median_s=0.3),
    limits=ServerLimits(requests_per_minute=PER_WINDOW * 60 / WINDOW_S, concurrency=IN_FLIGHT, window_s=WINDOW_S),
)


@pytest.fixture
def fresh_player(roll_source, tmp_path):
    """A process of ROLL whose Ray job has had no workers yet that could hold anything."""
    with Player(roll_source, tmp_path) as player:
        yield player


def test_two_workers_use_all_of_a_limit_and_never_more(fresh_player):
    scenario = Scenario("shared", JUDGE, "all", engine={"shared": "auto", "deadline_s": 150.0}, steps=STEPS, workers=2)
    with JUDGE.start() as judge:
        keys = {**scenario_keys(scenario, judge.base_url), "max_steps": STEPS}
        reply = fresh_player.ask("pipeline", keys=keys, tags={TAG: DOMAIN}, val_tags={}, timeout_s=170.0)
        report = judge.server.report()
    assert reply.error is None, reply.text
    told = reply.result
    assert told["stage"] == "done", (told["error"], told["text"])
    assert [step[f"{DOMAIN}/qreward/failed_sum"] for step in told["logged"]] == [0] * STEPS
    assert report.answered >= STEPS * GROUPS * GROUP_SIZE
    assert report.violations_total == 0, report.violations[:5]
    assert (report.max_requests_in_window, report.peak_concurrency) == (PER_WINDOW, IN_FLIGHT)
