"""Several event loops in one process, as slime has them: limits belong to the process, and no loop leaves anything."""

from __future__ import annotations

import pytest

from ..judges import Judge
from ..scenarios import BAD_MINUTE, PATIENT, UNEVEN, Scenario
from . import scenarios
from .checks import check
from .real import play

FULLY_ASYNC = ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async")


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
