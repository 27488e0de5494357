"""The soak of shared limits, and proof that it can fail: each rule of the protocol is broken once, and noticed."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.quotas.pace import Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.scheduling import Dispatcher
from qreward_plugins.sharing import keeper
from qreward_plugins.sharing.division import Division
from qreward_plugins.sharing.keeper import Keeper
from qreward_plugins.sharing.member import Member
from qreward_plugins.sharing.share_table import WorkerState, _Lost
from qreward_plugins.simulation.__main__ import main
from qreward_plugins.simulation.cluster import Cluster
from qreward_plugins.simulation.cluster_plan import ClusterFault, Plan, SharedSource, Work, Worker, random_plan
from qreward_plugins.simulation.soak import check_cluster, soak
from qreward_plugins.simulation.trial_player import quiet


def played(plan, until):
    with quiet(), Cluster(plan) as cluster:
        cluster.run(until)
    return cluster


SEEDS = [1, 3, 5, 7, 11]
"""Among them those that show a broken rule, below. `make clusters` plays more."""


@pytest.mark.parametrize("seed", SEEDS)
def test_no_limit_is_broken_and_everybody_is_served(seed):
    soaked = soak(seed, seed + 1, cluster=True)
    assert not soaked.findings, "\n" + soaked.describe()
    assert soaked.tally.counts["requests"] > 0


def test_the_same_seed_is_the_same_cluster():
    once, again = check_cluster(5)[0], check_cluster(5)[0]
    assert once == again
    assert once.fingerprint != check_cluster(6)[0].fingerprint


def test_plans_meet_everything_that_can_happen():
    plans = [random_plan(seed) for seed in range(400)]
    kinds = {"kill", "stop", "part", "kill keeper", "stop keeper", "slow keeper"}
    assert {fault.kind for plan in plans for fault in plan.faults} == kinds
    assert {plan.restarts for plan in plans} == {True, False}
    limits = [source.declared() for plan in plans for source in plan.sources]
    assert any(one.window == "bucket" and one.burst > 1 for one in limits)
    assert any(one.tokens_per_minute and one.concurrency and one.requests_per_minute for one in limits)
    assert {one.window_s for one in limits} == {60.0, 10.0, 3.0, 1.0}
    assert any(worker.leaves for plan in plans for worker in plan.workers)
    assert any(len(plan.workers) > (source.declared().concurrency or 99) for plan in plans for source in plan.sources)


def test_a_cluster_that_is_not_served_is_a_finding(monkeypatch):
    monkeypatch.setattr(Division, "raise_shares", lambda self, now, line: [])
    monkeypatch.setattr(Division, "raise_to_fair", lambda self, worker, now: None)
    soaked = soak(5, 6, cluster=True)
    assert "liveness" in soaked.describe()
    assert "--cluster --seed 5" in soaked.describe()


def test_a_cluster_that_fails_is_a_finding(monkeypatch):
    def fail(self, until):
        raise ZeroDivisionError

    monkeypatch.setattr(Cluster, "run", fail)
    assert "ZeroDivisionError" in soak(5, 6, cluster=True).describe()


def test_the_command_soaks_clusters(capsys):
    assert main(["--cluster", "--seeds", "5:7", "--jobs", "1"]) == 0
    assert "clusters" in capsys.readouterr().out
    assert main(["--cluster", "--seed", "5"]) == 0
    assert "kept every promise" in capsys.readouterr().out


# The soak can fail


def around(monkeypatch, owner, name, wrap):
    """Replace a method by `wrap(original)`."""
    monkeypatch.setattr(owner, name, wrap(getattr(owner, name)))


def reports_before_it_lowers(monkeypatch):
    late = []

    def give_up(original):
        def mutated(self, key, quota, demand, now):
            before = dict(quota.share)
            original(self, key, quota, demand, now)
            if quota.share != before:
                late.append((quota, before))

        return mutated

    def report(original):
        def mutated(self, now, demands, news):
            said = original(self, now, demands, news)
            while late:
                quota, before = late.pop()
                quota.resize(before, workers=quota.workers, now=now)
            return said

        return mutated

    around(monkeypatch, Member, "_give_up", give_up)
    around(monkeypatch, Member, "report", report)


def no_lost_workers(monkeypatch):
    monkeypatch.setattr(_Lost, "hold", lambda self, name, until, amount: None)


def no_unknown(monkeypatch):
    monkeypatch.setattr(Division, "hold", lambda self, until: None)


def short_unknown(monkeypatch):
    around(monkeypatch, Division, "hold", lambda hold: lambda self, until: hold(self, until - keeper.TTL_S))


def owes_nothing_of_a_bucket(monkeypatch):
    monkeypatch.setattr(Member, "_owed", lambda self, key, quota, now: ())


def owes_only_what_it_gave_up_last(monkeypatch):
    def lower(original):
        def mutated(self, key, quota, share, now):
            self._debts.pop(key, None)
            original(self, key, quota, share, now)

        return mutated

    around(monkeypatch, Member, "_lower", lower)


def counts_a_bucket_from_the_reservation(monkeypatch):
    def reserve(original):
        def mutated(self, prompt_tokens, completion_tokens, now, **how):
            if self._pace is not None:
                self._pace.spend(now)
            return original(self, prompt_tokens, completion_tokens, now, **how)

        return mutated

    monkeypatch.setattr(Quota, "sent", lambda self, now: self.requests.stamp(1.0, now))
    around(monkeypatch, Quota, "reserve", reserve)
    around(monkeypatch, Pace, "wait_s", lambda wait_s: lambda self, now, held=0.0: wait_s(self, now))


def charges_shares_alone(monkeypatch):
    monkeypatch.setattr(WorkerState, "spent", lambda self, now: 0.0)


def gives_up_workers_too_early(monkeypatch):
    def expire(original):
        def mutated(self, now):
            self._ttl_s = 4.0
            original(self, now)

        return mutated

    around(monkeypatch, Keeper, "_expire", expire)


def never_ends(monkeypatch):
    monkeypatch.setattr(Member, "_end_if_over", lambda self, now: None)
    monkeypatch.setattr(Member, "_keep_until", lambda self, until: setattr(self, "valid_until", math.inf))


def valid_from_receiving(monkeypatch):
    def accept(original):
        def mutated(self, answer, now):
            sent_at = self._sent_at
            if answer.number == self._unanswered:
                self._sent_at = now
            try:
                return original(self, answer, now)
            finally:
                self._sent_at = sent_at

        return mutated

    around(monkeypatch, Member, "accept", accept)


def keeps_shares_of_a_dead_keeper(monkeypatch):
    def absent(self, now, *, seen_at=-math.inf):
        if now < self.valid_until:
            self._keep_until(now + 2 * keeper.TTL_S)

    monkeypatch.setattr(Member, "keeper_died", absent)


def calls_nothing_back(monkeypatch):
    monkeypatch.setattr(Dispatcher, "call_back", lambda self, upstream, *, sent: None)


@pytest.mark.parametrize(
    ("mutate", "seed"),
    [
        (reports_before_it_lowers, 3),
        (no_lost_workers, 7),
        (no_unknown, 7),
        (counts_a_bucket_from_the_reservation, 1),
        (owes_nothing_of_a_bucket, 3),
        (owes_only_what_it_gave_up_last, 11),
        (charges_shares_alone, 1),
    ],
)
def test_a_rule_that_is_broken_is_noticed(mutate, seed, monkeypatch):
    assert seed in SEEDS
    mutate(monkeypatch)
    assert [one.promise for one in check_cluster(seed)[1]][:1] == ["P3"]


# What takes a certain order of faults


def two_workers(limits, count, faults, *, seed=0, message_s=0.001, service_s=(0.01, 0.02), **how):
    """Two workers with as much work at one source."""
    source = SharedSource("s", limits, (0.0, 0.0), service_s)
    work = tuple(Work(0.0, number, "s", count) for number in range(2))
    return Plan(seed, (source,), (Worker(), Worker()), work, tuple(faults), message_s=(message_s, 1e-4), **how)


SHORT_WINDOW = {"requests_per_minute": 600, "window_s": 1.0, "window": "sliding"}


def stopped_while_the_keeper_dies(seed):
    """A worker hears late that the keeper is dead, and then never reaches its heir."""
    resumes_at = 10.9 + 0.3 * (seed % 6)
    faults = (
        ClusterFault(4.9, "stop", 0, resumes_at - 4.9),
        ClusterFault(5.0, "kill keeper"),
        ClusterFault(resumes_at + 0.1, "part", 0, 60.0),
    )
    return two_workers(SHORT_WINDOW, 700, faults, seed=seed, message_s=1e-4, restarts=False)


def answers_that_take_long(seed):
    """A worker is cut off after the keeper's answer to it went off, before its next report comes."""
    faults = (ClusterFault(12.0 + 0.3 * seed, "part", 0, 60.0),)
    return two_workers({"concurrency": 4}, 150, faults, seed=seed, message_s=0.9, service_s=(0.3, 0.6))


def long_answers(seed):
    """A worker is cut off while it has long requests in flight, and another one has work."""
    return two_workers({"concurrency": 4}, 8, (ClusterFault(3.0, "part", 0, 60.0),), seed=seed, service_s=(25.0, 30.0))


def cut_off_for_a_while(seed):
    """A worker with work is cut off from the keeper."""
    return two_workers(SHORT_WINDOW, 700, (ClusterFault(5.0, "part", 0, 30.0),), seed=seed)


@pytest.mark.parametrize(
    ("faulty", "mutate", "seed"),
    [
        (stopped_while_the_keeper_dies, keeps_shares_of_a_dead_keeper, 10),
        (stopped_while_the_keeper_dies, short_unknown, 10),
        (cut_off_for_a_while, gives_up_workers_too_early, 0),
        (answers_that_take_long, valid_from_receiving, 23),
        (answers_that_take_long, never_ends, 0),
        (long_answers, calls_nothing_back, 1),
    ],
)
def test_a_rule_for_one_order_of_troubles_is_kept_and_noticed_when_it_is_broken(faulty, mutate, seed, monkeypatch):
    assert played(faulty(seed), 100.0).servers["s"].broken == []
    mutate(monkeypatch)
    assert played(faulty(seed), 100.0).servers["s"].broken


def test_concurrency_of_one_goes_round_quickly():
    source = SharedSource("s", {"concurrency": 1}, (0.0, 0.0), (0.1, 0.2))
    work = tuple(Work(0.0, number, "s", 30) for number in range(3))
    cluster = played(Plan(0, (source,), (Worker(),) * 3, work, message_s=(0.002, 0.001)), 200.0)
    # 90 requests of 0.15 s, one at a time.
    assert cluster.now < 20.0
    assert not cluster.unfinished()


def test_a_limit_of_a_minute_is_used_wholly_by_many_workers_with_little_to_say():
    source = SharedSource("s", {"requests_per_minute": 600}, (0.01, 0.06), (0.5, 2.0))
    work = tuple(Work(0.0, number, "s", 400) for number in range(8))
    cluster = played(Plan(0, (source,), (Worker(),) * 8, work), 120.0)
    server = cluster.servers["s"]
    assert not server.broken
    assert len(server.came_from) >= 0.95 * 2 * 600
    came_from = [server.came_from.count(worker.name) for worker in cluster.workers]
    assert min(came_from) > 0.8 * max(came_from)


def test_workers_take_turns_where_there_is_less_than_one_for_each():
    source = SharedSource("s", {"requests_per_minute": 40, "window_s": 3.0}, (0.0, 0.05), (0.1, 0.2))
    work = tuple(Work(0.0, number, "s", 50) for number in range(12))
    cluster = played(Plan(0, (source,), (Worker(),) * 12, work), 150.0)
    came_from = [cluster.servers["s"].came_from.count(worker.name) for worker in cluster.workers]
    assert min(came_from) > 0
    assert max(came_from) <= min(came_from) + 3
