"""The soak of the shares' protocol, and proof that it can fail: each rule of it is broken once, and noticed."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.quotas.pace import Pace
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.sharing import keeper
from qreward_plugins.sharing.division import Division
from qreward_plugins.sharing.keeper import Keeper
from qreward_plugins.sharing.member import Member
from qreward_plugins.sharing.share_table import WorkerState, _Lost
from qreward_plugins.simulation.__main__ import main
from qreward_plugins.simulation.cluster import Cluster, check_cluster, soak_clusters, time_allowed_s
from qreward_plugins.simulation.cluster_plan import ClusterFault, Plan, SharedSource, Work, Worker, random_plan
from qreward_plugins.simulation.cluster_worker import SimulatedWorker

SEEDS = 30
SHARD = 10


@pytest.mark.parametrize("first", range(0, SEEDS, SHARD))
def test_no_limit_is_broken_and_everybody_is_served(first):
    soaked = soak_clusters(first, first + SHARD)
    assert not soaked.findings, "\n" + soaked.describe()
    assert soaked.tally.trials == SHARD
    assert soaked.tally.requests > 0


@pytest.mark.parametrize(
    "seed",
    [
        # Two limits of one source each went to another worker, and neither could send.
        8,
        # What a worker had sent since its last report was forgotten when it left.
        50,
        # Concurrency that was given up was free for others only with the next report.
        137,
        # A worker asked again and again, and so never had an answer that counted.
        1168,
    ],
)
def test_what_once_went_wrong_goes_right_now(seed):
    soaked = soak_clusters(seed, seed + 1)
    assert not soaked.findings, "\n" + soaked.describe()


def test_the_same_seed_is_the_same_cluster():
    _, once, _ = check_cluster(1)
    _, again, _ = check_cluster(1)
    assert once == again
    assert once.fingerprint != check_cluster(2)[1].fingerprint


def test_plans_meet_everything_that_can_happen():
    plans = [random_plan(seed) for seed in range(400)]
    assert {fault.kind for plan in plans for fault in plan.faults} == {
        "kill",
        "stop",
        "part",
        "loss",
        "kill keeper",
        "stop keeper",
        "slow keeper",
    }
    assert {plan.restarts for plan in plans} == {True, False}
    limits = [source.declared() for plan in plans for source in plan.sources]
    assert any(one.window == "bucket" and one.burst > 1 for one in limits)
    assert any(one.tokens_per_minute and one.concurrency and one.requests_per_minute for one in limits)
    assert {one.window_s for one in limits} == {60.0, 10.0, 3.0, 1.0}
    assert any(plan.lost for plan in plans)
    assert any(plan.doubled for plan in plans)
    assert any(worker.leaves for plan in plans for worker in plan.workers)
    assert all(abs(worker.clock[1] - 1.0) <= 1e-4 for plan in plans for worker in plan.workers)
    assert any(len(plan.workers) > (source.declared().concurrency or 99) for plan in plans for source in plan.sources)


def test_a_cluster_that_is_not_served_is_a_finding(monkeypatch):
    monkeypatch.setattr(Division, "raise_shares", lambda self, now, line: [])
    monkeypatch.setattr(Division, "raise_to_fair", lambda self, worker, now: None)
    soaked = soak_clusters(88, 89)
    assert "liveness" in soaked.describe()
    assert "--cluster --seed 88" in soaked.describe()


def test_a_cluster_that_fails_is_a_finding(monkeypatch):
    def fail(self, now):
        raise ZeroDivisionError

    monkeypatch.setattr(Keeper, "due", fail)
    assert "ZeroDivisionError" in soak_clusters(1, 2).describe()


def test_the_command_soaks_clusters(capsys):
    assert main(["--cluster", "--seeds", "3:5", "--jobs", "1"]) == 0
    assert "clusters" in capsys.readouterr().out
    assert main(["--cluster", "--seed", "3"]) == 0
    assert "kept every limit" in capsys.readouterr().out


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


def heeds_any_answer(monkeypatch):
    def accept(original):
        def mutated(self, answer, now):
            self._unanswered = answer.number
            return original(self, answer, now)

        return mutated

    around(monkeypatch, Member, "accept", accept)


def hears_old_reports(monkeypatch):
    def report(original):
        def mutated(self, report, now):
            self._numbers.pop(report.worker, None)
            original(self, report, now)

        return mutated

    around(monkeypatch, Keeper, "report", report)


def no_lost_workers(monkeypatch):
    monkeypatch.setattr(_Lost, "hold", lambda self, name, until, amount: None)


def no_unknown(monkeypatch):
    monkeypatch.setattr(Division, "hold", lambda self, until: None)


def short_unknown(monkeypatch):
    def hold(original):
        return lambda self, until: original(self, until - keeper.TTL_S)

    around(monkeypatch, Division, "hold", hold)


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
    def sent(self, now):
        return self.requests.stamp(1.0, now)

    def reserve(original):
        def mutated(self, prompt_tokens, completion_tokens, now, **how):
            if self._pace is not None:
                self._pace.spend(now)
            return original(self, prompt_tokens, completion_tokens, now, **how)

        return mutated

    def no_held(original):
        return lambda self, now, held=0.0: original(self, now)

    monkeypatch.setattr(Quota, "sent", sent)
    around(monkeypatch, Quota, "reserve", reserve)
    around(monkeypatch, Pace, "wait_s", no_held)


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
    def end(self):
        self.member.expire(self.now())

    monkeypatch.setattr(SimulatedWorker, "_end", end)


@pytest.mark.parametrize(
    ("mutate", "seed"),
    [
        (reports_before_it_lowers, 7),
        (heeds_any_answer, 11),
        (hears_old_reports, 36),
        (no_lost_workers, 28),
        (no_unknown, 29),
        (counts_a_bucket_from_the_reservation, 17),
        (owes_nothing_of_a_bucket, 17),
        (owes_only_what_it_gave_up_last, 38),
        (charges_shares_alone, 3),
        (gives_up_workers_too_early, 35),
    ],
)
def test_a_rule_that_is_broken_is_noticed(mutate, seed, monkeypatch):
    mutate(monkeypatch)
    _, _, broken = check_cluster(seed)
    assert [one.promise for one in broken][:1] == ["P3"]


# What takes a certain order of faults


def broken_in(plan):
    cluster = Cluster(plan)
    cluster.run(150.0)
    assert sum(server.came for server in cluster.servers.values()) > 10
    return [said for server in cluster.servers.values() for said in server.broken]


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


@pytest.mark.parametrize(
    ("faulty", "mutate"),
    [
        (stopped_while_the_keeper_dies, keeps_shares_of_a_dead_keeper),
        (stopped_while_the_keeper_dies, short_unknown),
        (answers_that_take_long, valid_from_receiving),
        (answers_that_take_long, never_ends),
        (long_answers, calls_nothing_back),
    ],
)
def test_a_rule_for_one_order_of_troubles_is_kept_and_noticed_when_it_is_broken(faulty, mutate, monkeypatch):
    plans = [faulty(seed) for seed in range(12)]
    assert [broken_in(plan) for plan in plans] == [[]] * 12
    mutate(monkeypatch)
    assert any(broken_in(plan) for plan in plans)


def test_concurrency_of_one_goes_round_quickly():
    source = SharedSource("s", {"concurrency": 1}, (0.0, 0.0), (0.1, 0.2))
    work = tuple(Work(0.0, number, "s", 30) for number in range(3))
    plan = Plan(0, (source,), (Worker(),) * 3, work, message_s=(0.002, 0.001))
    cluster = Cluster(plan)
    # 90 requests of 0.15 s, one at a time.
    assert cluster.run(200.0) < 20.0
    assert not cluster.unfinished()


def test_a_limit_of_a_minute_is_used_wholly_by_many_workers_with_little_to_say():
    source = SharedSource("s", {"requests_per_minute": 6000}, (0.01, 0.06), (0.5, 2.0))
    work = tuple(Work(0.0, number, "s", 4000) for number in range(8))
    plan = Plan(0, (source,), (Worker(),) * 8, work)
    cluster = Cluster(plan)
    cluster.run(120.0)
    server = cluster.servers["s"]
    assert not server.broken
    assert server.came >= 0.95 * 2 * 6000
    assert sum(worker.reports for worker in cluster.workers.values()) <= server.came / 20
    assert min(server.came_from.values()) > 0.8 * max(server.came_from.values())


def test_workers_take_turns_where_there_is_less_than_one_for_each():
    source = SharedSource("s", {"requests_per_minute": 40, "window_s": 3.0}, (0.0, 0.05), (0.1, 0.2))
    work = tuple(Work(0.0, number, "s", 50) for number in range(12))
    cluster = Cluster(Plan(0, (source,), (Worker(),) * 12, work))
    cluster.run(150.0)
    came_from = cluster.servers["s"].came_from
    assert len(came_from) == 12
    assert max(came_from.values()) <= min(came_from.values()) + 3


def test_the_time_allowed_follows_from_the_limits():
    assert time_allowed_s(random_plan(1)) > 60.0
    slow = two_workers({"requests_per_minute": 6}, 30, ())
    fast = two_workers({"requests_per_minute": 600}, 30, ())
    assert time_allowed_s(slow) > time_allowed_s(fast) + 600.0
