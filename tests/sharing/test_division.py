"""Tests the shares of one limit: what each worker is charged, what is free, which shares are raised and recalled."""

from __future__ import annotations

import pytest

from qreward_plugins.sharing.division import TURN_S, Division, WaitingLine
from qreward_plugins.sharing.messages import Grant, Part

LIMIT = 100.0
WINDOW_S = 60.0


class Everybody:
    """Whoever is asked for listens."""

    def __contains__(self, worker):
        return True


def line(*waiting, listening=None, expected=()):
    return WaitingLine(dict.fromkeys(waiting), Everybody() if listening is None else listening, expected)


@pytest.fixture
def pool():
    return Division(LIMIT, WINDOW_S)


def report(pool, worker, now, share=0.0, spent=(), more=0.0, unit=1.0, limit=LIMIT):
    pool.report(worker, Part(share, tuple(spent), more, unit), now, limit=limit, window_s=WINDOW_S)


# The table of shares


def test_of_limits_that_differ_the_lowest_rate_counts_until_it_is_gone(pool):
    report(pool, "a", 0.0)
    report(pool, "b", 0.0, limit=40.0)
    assert pool.free(0.0) == 40.0
    pool.drop("b", 1.0, silent=False)
    assert pool.free(1.0) == 100.0


# Who gets what


def shares(pool, *workers):
    return [pool.share(worker) for worker in workers]


def test_who_waits_longest_is_first_and_nobody_overtakes_a_large_request(pool):
    report(pool, "holder", 0.0, share=60.0)
    report(pool, "small", 0.0, more=5.0)
    report(pool, "large", 0.0, more=80.0, unit=80.0)
    assert pool.raise_shares(0.0, line("large", "small")) == []
    assert pool.raise_shares(0.0, line("small", "large")) == ["small"]


def test_who_has_more_than_is_fair_is_asked_for_it_after_a_turn(pool):
    report(pool, "a", 0.0, more=100.0)
    pool.raise_shares(0.0, line())
    assert pool.share("a") == 100.0
    report(pool, "a", 0.1, share=100.0, more=100.0)
    report(pool, "b", 0.1, more=100.0)
    assert pool.recalls(TURN_S - 0.1, line("b")) == {}
    told = pool.recalls(TURN_S + 0.1, line("b"))
    assert list(told) == ["a"]
    assert told["a"] == Grant(100.0, 50.0, recall=True)
    assert pool.recalls(TURN_S + 0.1, line("b", listening=("b",))) == {}


def test_who_wants_nothing_is_asked_at_once_for_all_that_it_has_not_spent_however_little(pool):
    report(pool, "idle", 0.0, share=40.0, spent=[(30.0, 39.0)])
    report(pool, "nothing left", 0.0, share=10.0, spent=[(30.0, 10.0)])
    report(pool, "busy", 0.0, share=50.0, spent=[(30.0, 48.0)], more=4.0)
    assert pool.recalls(0.0, line()) == {"idle": Grant(40.0, 39.0, recall=True)}
    assert pool.grant("idle", 0.0).scarce
    assert not pool.grant("busy", 0.0).scarce  # nobody else waits
