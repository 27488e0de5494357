"""A worker's side of the shares: what it gives up and when, which answers it heeds, and how long its shares last."""

from __future__ import annotations

import math

import pytest

from qreward_plugins.config import Limits
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S
from qreward_plugins.sharing.member import Demand, Member
from qreward_plugins.sharing.messages import Answer, Grant, SourceAnswer

WINDOW_S = 60.15
NOW = 500.0


class Worker:
    """A member with one source."""

    def __init__(self, **limits):
        self.quota = SharedQuota(Limits.model_validate(limits), source="s")
        self.member = Member("w", {"s": self.quota})
        self.now = NOW
        self.waiting = Demand()

    def report(self, waiting=None):
        self.waiting = self.waiting if waiting is None else waiting
        return self.member.report(self.now, {"s": self.waiting}, {})

    def parts(self, waiting=None):
        return self.report(waiting).sources["s"].parts

    def answer(self, number=None, boot="k", target=None, recall=False, scarce=False, **shares):
        grants = {
            name: Grant(share, share if target is None else target, recall, scarce) for name, share in shares.items()
        }
        number = self.member._number if number is None else number
        return self.member.accept(Answer(boot, number, {"s": SourceAnswer(3, grants)}), self.now)

    def given(self, **shares):
        self.report()
        assert self.answer(**shares)
        return self

    def send(self, count=1, tokens=0.0):
        sent = []
        for _ in range(count):
            reservation = self.quota.reserve(tokens, 0.0, self.now)
            reservation.sent(self.now)
            sent.append(reservation)
        return sent

    def report_due(self, count=1, **more):
        return self.member.report_due("s", Demand(count, **more), self.now)


def spent(part):
    return sum(amount for _, amount in part.spent)


@pytest.fixture
def worker():
    return Worker(requests_per_minute=100)


# Which answers count


def test_only_the_answer_to_the_latest_report_counts(worker):
    worker.report()
    first = worker.member._number
    worker.report()
    assert not worker.answer(number=first, requests=10.0)
    assert worker.quota.share == {"requests": 0.0}
    assert worker.answer(requests=20.0)
    assert worker.quota.share == {"requests": 20.0}


def test_an_answer_that_comes_after_its_time_does_not_count(worker):
    worker.report()
    worker.now += TTL_S
    assert not worker.answer(requests=20.0)


def test_after_the_last_report_no_answer_counts(worker):
    worker.given(requests=20.0)
    worker.send(3)
    last = worker.member.last_report(worker.now)
    assert last.leaves
    part = last.sources["s"].parts["requests"]
    assert (part.share, spent(part)) == (0.0, 3.0)
    assert not worker.answer(requests=20.0)


def test_shares_end_by_themselves_and_what_was_spent_stays_spent(worker):
    worker.given(requests=20.0)
    worker.send(7)
    worker.now += TTL_S - 0.01
    assert not worker.member.expire(worker.now)
    worker.now += 0.01
    assert worker.quota.wait_s(0.0, worker.now) == math.inf
    assert worker.member.expire(worker.now)
    assert worker.quota.share == {"requests": 0.0}
    part = worker.parts()["requests"]
    assert (part.share, spent(part)) == (0.0, 7.0)


# What is given up


def test_what_is_more_than_fair_is_kept_until_it_is_asked_for_or_spent(worker):
    worker.given(requests=20.0, target=8.0)
    worker.send(19)
    assert worker.parts()["requests"].share == 20.0
    worker.send(1)
    part = worker.parts()["requests"]
    assert (part.share, spent(part)) == (8.0, 20.0)
    assert max(left_s for left_s, _ in part.spent) == pytest.approx(WINDOW_S)


# What is said


def test_it_is_patient_with_a_slow_keeper(worker):
    worker.given(requests=2.0)
    worker.send(2)
    worker.now += TTL_S - HOLD_S - MARGIN_S
    for _ in range(3):
        worker.report(Demand())
        assert worker.report_due(5)
    worker.now += 0.1
    assert worker.member.must_await_answer(worker.now)
    assert not worker.report_due(5)
    worker.answer(requests=2.0)
    assert worker.report_due(5)
