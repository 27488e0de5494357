"""The soak of CI: some hundred trials in which every promise is kept, each shard a test of its own.

pytest reports the range that failed, with the seed, the promise, the trial, and the command that plays it again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qreward_plugins.simulation.__main__ import main
from qreward_plugins.simulation.soak import check, replay_command, shards, soak, soak_in_processes
from qreward_plugins.simulation.trial import random_trial

ROOT = Path(__file__).parents[2]
SHARDS = shards(50, 150, 50)
"""A few seconds. `make soak` plays more."""


@pytest.mark.parametrize("shard", SHARDS, ids=lambda shard: f"{shard[0]}:{shard[1]}")
def test_every_promise_is_kept(shard):
    soaked = soak(*shard)
    assert not soaked.findings, "\n" + soaked.describe()
    assert soaked.tally.trials == shard[1] - shard[0]
    assert soaked.tally.scored > 0


def test_trials_meet_everything_that_can_happen():
    trials = [random_trial(seed) for seed in range(400)]
    calls = [call for trial in trials for step in trial.steps for call in step.calls]
    servers = [server for trial in trials for server in trial.servers]
    assert {call.kind for call in calls} == {"batch", "single", "stream"}
    assert any(call.cutoff for call in calls)
    assert {call.priority for call in calls} == {None, 0, 1, -3, 2, 7}
    assert {sample.split for trial in trials for sample in trial.samples()} == {None, "train", "val"}
    routes = [route for trial in trials for route in trial.config["routes"].values() if isinstance(route, dict)]
    assert {route["latency_sensitive"] for route in routes} == {True, False}
    assert any("priority" in route for route in routes)
    assert any("priority" in judge for trial in trials for judge in trial.config["judges"].values())
    assert any(call.cancel_after_s is not None for call in calls)
    assert any(step.close_after_s is not None for trial in trials for step in trial.steps)
    assert any(len(trial.steps) > 1 for trial in trials)
    engines = [trial.config["engine"] for trial in trials]
    assert len({engine["scheduling"]["strategy"] for engine in engines}) == 5
    assert {engine["scheduling"]["hedge"] for engine in engines} == {True, False}
    assert {engine["scheduling"]["prefer"] for engine in engines} == {"speed", "cost"}
    assert {fault.kind for server in servers for fault in server.faults} == {
        "refuse",
        "hang",
        "slow",
        "errors",
        "throttle",
    }
    assert {server.batch.max_size for server in servers if server.batch is not None} == {2, 3, 8, 64}
    assert any(not server.declared for server in servers)


def test_a_seed_gives_the_same_trial_and_the_same_record():
    trial, record, broken = check(7, replay=True)
    assert trial == random_trial(7)
    assert record.text() == check(7, replay=True)[1].text()
    assert broken == []


def test_the_schedules_are_the_same_in_another_process_with_another_hash_seed():
    def fingerprint(hash_seed):
        program = "from qreward_plugins.simulation.soak import soak; print(soak(0, 6).tally.fingerprint)"
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert fingerprint("1") == fingerprint("2") == soak(0, 6).tally.fingerprint


def test_ranges_are_cut_into_shards_without_gaps():
    assert shards(3, 10, 3) == [(3, 6), (6, 9), (9, 10)]
    assert shards(0, 3, 50) == [(0, 3)]


def test_shards_in_processes_add_up_to_the_soak_in_one(monkeypatch):
    monkeypatch.setattr("qreward_plugins.simulation.soak.shards", lambda first, last: shards(first, last, 5))
    parts = list(soak_in_processes(soak, 0, 12, jobs=2))
    assert sorted(part.tally.trials for part in parts) == [2, 5, 5]
    whole = soak(0, 12).tally
    assert sum(part.tally.fingerprint for part in parts) % 2**64 == whole.fingerprint
    assert sum(part.tally.attempts for part in parts) == whole.attempts


def test_the_command_prints_a_summary(capsys):
    assert main(["--seeds", "0:6", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    for word in ("trials", "samples", "scored", "attempts", "hedges", "virtual time", "infra/deadline"):
        assert word in said


def test_the_command_plays_one_seed(capsys):
    assert main(["--seed", "7", "--trace"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("trial 7")
    assert "sent\n" in said
    assert "seed 7 kept every promise" in said


@pytest.mark.parametrize("seeds", ["5:5", "7:3", "many", "0"])
def test_the_command_refuses_ranges_without_seeds(seeds, capsys):
    with pytest.raises(SystemExit):
        main(["--seeds", seeds])
    assert "FIRST:LAST" in capsys.readouterr().err


def test_the_replay_command_is_one_that_exists(capsys):
    arguments = replay_command(7).split()[3:]
    assert main(arguments) == 0
    assert "trial 7" in capsys.readouterr().out
