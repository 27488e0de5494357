"""The soak of shared limits, and proof that it can fail."""

from __future__ import annotations

import pytest

from qreward_plugins.sharing.division import Division
from qreward_plugins.simulation.__main__ import check_cluster, main, soak
from qreward_plugins.simulation.cluster import Cluster
from qreward_plugins.simulation.cluster_plan import ClusterFault, Plan, SharedSource, Work, random_plan
from qreward_plugins.simulation.trial_player import quiet

from ..kit import each_of


def played(plan, until):
    with quiet(), Cluster(plan) as cluster:
        cluster.run(until)
    return cluster


SEEDS = [1, 3, 5, 7, 11, 18]
"""Each shows another rule of the protocol that is broken. `make clusters` plays more."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_limit_is_broken_and_everybody_is_served(seed):
    soaked = soak(seed, seed + 1, cluster=True)
    assert not soaked.findings, "\n" + soaked.describe()
    assert soaked.counts["requests"] > 0


def test_the_same_seed_is_the_same_cluster():
    once, again = check_cluster(1)[0], check_cluster(1)[0]
    assert once == again
    assert once.fingerprint != check_cluster(3)[0].fingerprint


def test_plans_meet_everything_that_can_happen():
    plans = [random_plan(seed) for seed in range(400)]
    kinds = {"kill", "stop", "part", "kill keeper", "stop keeper"}
    assert {fault.kind for plan in plans for fault in plan.faults} == kinds
    assert {plan.restarts for plan in plans} == {True, False}
    limits = [source.declared() for plan in plans for source in plan.sources]
    assert any(one.window == "bucket" and one.burst > 1 for one in limits)
    assert any(any(plan.leaves) for plan in plans)


def test_a_cluster_that_is_not_served_is_a_finding(monkeypatch):
    monkeypatch.setattr(Division, "raise_shares", lambda self, now, line: [])
    monkeypatch.setattr(Division, "raise_to_fair", lambda self, worker, now: None)
    monkeypatch.setattr("qreward_plugins.simulation.__main__.ALLOWED_S", 100.0)
    soaked = soak(5, 6, cluster=True)
    assert "liveness" in soaked.describe()
    assert "--cluster --seed 5" in soaked.describe()


def test_the_command_soaks_clusters(capsys):
    assert main(["--cluster", "--seeds", "1:2", "--jobs", "1"]) == 0
    assert "clusters" in capsys.readouterr().out
    assert main(["--cluster", "--seed", "1"]) == 0
    assert "kept every promise" in capsys.readouterr().out


def test_a_rule_that_is_broken_is_noticed(monkeypatch):
    monkeypatch.setattr(Division, "hold", lambda self, until: None)
    assert [one.promise for one in check_cluster(7)[1]][:1] == ["P3"]


# What takes a certain order of faults


SHORT_WINDOW = {"requests_per_minute": 600, "window_s": 1.0, "window": "sliding"}
PLACES = {"concurrency": 4}


@each_of(
    ("limits", "count", "faults", "seed", "how"),
    [
        # A worker hears late that the keeper is dead, and then never reaches its heir.
        (
            *(SHORT_WINDOW, 700),
            [(4.9, "stop", 0, 7.2), (5.0, "kill keeper"), (12.2, "part", 0, 60.0)],
            *(10, {"message_s": (1e-4, 1e-4), "restarts": False}),
        ),
        # A worker with work is cut off from the keeper.
        (SHORT_WINDOW, 700, [(5.0, "part", 0, 30.0)], 0, {}),
        # A worker is cut off after the keeper's answer to it went off, before its next report comes.
        (PLACES, 150, [(18.9, "part", 0, 60.0)], 23, {"message_s": (0.9, 1e-4), "service_s": (0.3, 0.6)}),
        # A worker is cut off while it has long requests in flight, and another one has work.
        (PLACES, 8, [(3.0, "part", 0, 60.0)], 1, {"service_s": (25.0, 30.0)}),
    ],
)
def test_no_order_of_troubles_breaks_a_limit(limits, count, faults, seed, how):
    """Of two workers with as much work at one source."""
    settings = {"message_s": (0.001, 1e-4), **how}
    source = SharedSource("s", limits, (0.0, 0.0), settings.pop("service_s", (0.01, 0.02)))
    work = tuple(Work(0.0, number, "s", count) for number in range(2))
    found = tuple(ClusterFault(*fault) for fault in faults)
    assert played(Plan(seed, (source,), (False, False), work, found, **settings), 60.0).servers["s"].broken == []


def workers_at(limits, workers, count, seconds, network_s=(0.0, 0.05), service_s=(0.1, 0.2), **how):
    """A cluster of workers with as much work at one source after so many seconds, and what each has sent."""
    work = tuple(Work(0.0, number, "s", count) for number in range(workers))
    cluster = played(
        Plan(0, (SharedSource("s", limits, network_s, service_s),), (False,) * workers, work, **how), seconds
    )
    server = cluster.servers["s"]
    assert not server.broken
    return cluster, [server.came_from.count(worker.name) for worker in cluster.workers]


def test_concurrency_of_one_goes_round_quickly():
    cluster, _ = workers_at({"concurrency": 1}, 3, 30, 200.0, (0.0, 0.0), message_s=(0.002, 0.001))
    # 90 requests of 0.15 s, one at a time.
    assert cluster.now < 20.0
    assert not cluster.unfinished()


def test_workers_take_turns_where_there_is_less_than_one_for_each():
    _, came = workers_at({"requests_per_minute": 40, "window_s": 3.0}, 12, 50, 90.0)
    assert 0 < min(came) >= max(came) - 3
