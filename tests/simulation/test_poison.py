"""Trials with poisoned samples: every kind is met, and a sample that pays for another one's poison is noticed."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from qreward_plugins.samples import Cause, Failed
from qreward_plugins.simulation.poison import Poison, error_of, poison_of
from qreward_plugins.simulation.promises import broken_promises
from qreward_plugins.simulation.trial import random_trial
from qreward_plugins.simulation.trial_player import play

SEEDS = range(600)


@pytest.fixture(scope="module")
def poisoned():
    return [trial for trial in map(random_trial, SEEDS) if trial.poisoned]


def test_every_poison_is_met(poisoned):
    met = {poison_of(sample) for trial in poisoned for sample in trial.samples()}
    # Those are tried for two hours, so tests/reliability/test_throttled.py plays them.
    assert met == {None, *get_args(Poison)} - {"throttled"}


def test_nothing_else_goes_wrong_in_these_trials(poisoned):
    for trial in poisoned:
        assert not any(server.faults or server.error_share or server.invalid_share for server in trial.servers)
        calls = [call for step in trial.steps for call in step.calls]
        assert all(call.deadline_s is None and call.cutoff is None and call.cancel_after_s is None for call in calls)
        assert all(step.close_after_s is None for step in trial.steps)


def test_some_servers_have_a_replica_that_refuses_everything(poisoned):
    """No sample fails because of it, and it soon gets few requests."""
    assert {server.replicas for trial in poisoned for server in trial.servers} == {1, 2, 3}
    trial = next(trial for trial in poisoned if trial.servers[0].replicas == 2)
    record = play(trial)
    assert broken_promises(trial, record) == []
    asked = {name: server.replica_statistics(0.0) for name, server in record.servers.items()}
    assert all(refusing.failures > 0 for _, refusing in asked.values())
    assert sum(good.requests for good, _ in asked.values()) > sum(refusing.requests for _, refusing in asked.values())


@pytest.mark.parametrize("poison", get_args(Poison))
def test_a_poison_is_answered_with_an_error_or_a_verdict(poison):
    error = error_of(poison, "s0")
    assert (error is None) == (poison in ("throttled", "hang", "prose", "usage", "limits"))


def test_a_sample_that_pays_for_another_one_is_noticed(poisoned):
    trial = next(trial for trial in poisoned if any(map(poison_of, trial.samples())))
    record = play(trial)
    assert broken_promises(trial, record) == []
    harmed = next(given for given in record.given() if poison_of(given.sample) is None)
    harmed.outcome = Failed(Cause.INFRA, "no_source", judge="j0")
    assert any("P11" in broken.promise for broken in broken_promises(trial, record))
    assert not any("P11" in broken.promise for broken in broken_promises(replace(trial, poisoned=False), record))
