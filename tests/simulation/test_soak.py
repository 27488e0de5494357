"""The soak of CI: some trials in which every promise is kept.

A failure shows the seed, the promise, the trial, and the command that plays it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from qreward_plugins.samples import Cause, Failed
from qreward_plugins.simulation.__main__ import check, main, replay_command, shards, soak
from qreward_plugins.simulation.draws import Poison, poison_of
from qreward_plugins.simulation.promises import broken_promises
from qreward_plugins.simulation.trial import random_trial
from qreward_plugins.simulation.trial_player import play

from ..kit import each_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def trials():
    return [random_trial(seed) for seed in range(300)]


def test_every_promise_is_kept():
    """A few seconds. `make soak` plays more."""
    soaked = soak(50, 110)
    assert not soaked.findings, "\n" + soaked.describe()
    assert soaked.played == 60
    assert soaked.counts["scored"] > 0


def test_trials_meet_everything_that_can_happen(trials):
    calls = [call for trial in trials for step in trial.steps for call in step.calls]
    servers = [server for trial in trials for server in trial.servers]
    assert {call.kind for call in calls} == {"batch", "single", "stream"}
    assert any(call.cutoff for call in calls)
    assert any(call.cancel_after_s is not None for call in calls)
    assert {call.priority for call in calls} == {None, 0, 1, -3, 2, 7}
    routes = [route for trial in trials for route in trial.config["routes"].values() if isinstance(route, dict)]
    assert {route["latency_sensitive"] for route in routes} == {True, False}
    assert any(step.close_after_s is not None for trial in trials for step in trial.steps)
    assert len({trial.config["engine"]["scheduling"]["strategy"] for trial in trials}) == 4
    kinds = {"refuse", "hang", "slow", "errors", "throttle"}
    assert {fault.kind for server in servers for fault in server.faults} == kinds
    assert any(server.batch is not None for server in servers)
    assert any(not server.declared for server in servers)


def test_in_trials_with_poisoned_samples_nothing_else_goes_wrong(trials):
    poisoned = [trial for trial in trials if trial.poisoned]
    met = {poison_of(sample) for trial in poisoned for sample in trial.samples()}
    # Those are tried for two hours, so tests/reliability/test_reliability.py plays them.
    assert met == {None, *get_args(Poison)} - {"throttled"}
    for trial in poisoned:
        assert not any(server.faults or server.error_share or server.invalid_share for server in trial.servers)
        calls = [call for step in trial.steps for call in step.calls]
        assert all(call.deadline_s is None and call.cutoff is None and call.cancel_after_s is None for call in calls)
        assert all(step.close_after_s is None for step in trial.steps)


def test_a_sample_that_pays_for_another_ones_poison_is_noticed(trials):
    trial = next(trial for trial in trials if trial.poisoned and any(map(poison_of, trial.samples())))
    record = play(trial)
    harmed = next(given for given in record.given() if poison_of(given.sample) is None)
    harmed.outcome = Failed(Cause.INFRA, "no_source", judge="j0")
    assert any("P11" in broken.promise for broken in broken_promises(trial, record))
    assert not any("P11" in broken.promise for broken in broken_promises(replace(trial, poisoned=False), record))


def test_the_schedules_are_the_same_in_other_processes_with_another_hash_seed_and_the_command_sums_them_up():
    assert shards(3, 10, 3) == [(3, 6), (6, 9), (9, 10)]
    program = """
import sys
from qreward_plugins.simulation import __main__ as soak
soak.shards.__defaults__ = (2,)
sys.exit(soak.main(["--seeds", "4:8", "--jobs", "2"]))
"""
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    whole = soak(4, 8)
    for line in (
        "4 trials; 0 seeds",
        f"attempts: {whole.counts['attempts']:,}",
        f"fingerprint: {whole.fingerprint:016x}",
    ):
        assert line in done.stdout
    assert check(7, replay=True)[0] == random_trial(7)


def test_the_replay_command_plays_one_seed(capsys):
    assert main(replay_command(7).split()[3:]) == 0
    said = capsys.readouterr().out
    assert said.startswith("trial 7")
    assert "was sent 7-0: " in said
    assert "seed 7 kept every promise" in said


@each_of("seeds", ["5:5", "7:3", "many", "0"])
def test_the_command_refuses_ranges_without_seeds(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["--seeds", seeds])
    assert "FIRST:LAST" in capsys.readouterr().err
