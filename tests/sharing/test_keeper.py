"""The keeper: which answers are due when, and who is forgotten when."""

from __future__ import annotations

import pytest

from qreward_plugins.sharing.division import Division, WaitingLine
from qreward_plugins.sharing.keeper import HOLD_S, MARGIN_S, TTL_S, Keeper
from qreward_plugins.sharing.messages import Part, Report, SourceNews, SourceReport

LIMIT, WINDOW_S = 100.0, 60.0
NO_NEWS = SourceNews()


class Desk:
    """A keeper and its clock."""

    def __init__(self, *, first=True):
        self.now = 1000.0
        self.keeper = Keeper(self.now, boot="k", first=first)

    def report(self, worker, number, *, share=0.0, spent=(), more=0.0, news=NO_NEWS, leaves=False, accepted=None):
        said = SourceReport({"requests": (LIMIT, WINDOW_S)}, {"requests": Part(share, tuple(spent), more)}, news)
        accepted = number if accepted is None else accepted
        self.keeper.report(Report(worker, number, {"s": said}, leaves, accepted), self.now)
        return self.due()

    def due(self):
        return {(due.worker, due.number): due.answer for due in self.keeper.due(self.now)}

    def wait(self, seconds):
        self.now += seconds
        return self.due()

    def share(self, worker, number, **what):
        return self.report(worker, number, **what)[worker, number].sources["s"].grants["requests"].share


@pytest.fixture
def desk():
    return Desk()


def known(desk, *workers):
    """Let the keeper know workers, whose next report is number 1."""
    for worker in workers:
        desk.report(worker, 0)


def test_a_report_with_nothing_to_say_to_is_held_until_a_newer_one_takes_its_place(desk):
    known(desk, "a")
    desk.report("a", 1, share=LIMIT)
    assert desk.report("a", 2, share=LIMIT) == {("a", 1): None}
    assert desk.wait(HOLD_S - 0.01) == {}
    assert list(desk.wait(0.01)) == [("a", 2)]


def test_who_leaves_is_forgotten_at_once_and_what_it_spent_since_its_last_report_is_not(desk):
    known(desk, "a", "b")
    desk.report("a", 1, share=LIMIT)
    assert desk.report("a", 2, leaves=True, spent=[(20.0, 60.0)]) == {("a", 1): None, ("a", 2): None}
    assert desk.keeper.workers == 1
    assert desk.share("b", 1, more=1000.0) == 40.0


def test_an_heir_believes_what_workers_say_they_hold():
    desk = Desk(first=False)
    assert desk.share("a", 0, share=40.0) == 40.0
    assert desk.share("b", 0, share=60.0) == 60.0
    desk.report("a", 1, share=40.0, more=1000.0)
    # What `b` had spent is spent, and the rest of what it gave up is free.
    answers = desk.report("b", 1, share=5.0, more=0.0, spent=[(30.0, 20.0)])
    assert answers["a", 1].sources["s"].grants["requests"].share == 80.0


def test_it_charges_something_until_all_that_was_spent_has_left_the_window(desk):
    """Only then may a machine's keeper end, and a first one follow it."""
    assert desk.keeper.charges_nothing(desk.now)
    desk.report("a", 0, more=1000.0)
    assert not desk.keeper.charges_nothing(desk.now)
    desk.report("a", 1, leaves=True, spent=[(20.0, 60.0)])
    assert not desk.keeper.charges_nothing(desk.now + 19.9)
    assert desk.keeper.charges_nothing(desk.now + 20.0)
    desk.report("silent", 0, more=1000.0)
    desk.wait(TTL_S + MARGIN_S + 0.1)
    assert desk.keeper.workers == 0
    assert not desk.keeper.charges_nothing(desk.now + WINDOW_S - 0.1)
    assert desk.keeper.charges_nothing(desk.now + WINDOW_S)


def test_who_asked_again_before_it_heard_is_told_again(desk):
    known(desk, "a", "b")
    desk.report("b", 1, share=50.0)
    assert ("b", 1) in desk.report("a", 1, share=50.0, news=SourceNews(pause_s=7.0))
    # The answer to its report 1 was on the way: what it has accepted last is 0.
    assert desk.report("b", 2, share=50.0, accepted=0)["b", 2].sources["s"].news.pause_s == 7.0
    assert desk.report("b", 3, share=50.0, accepted=2) == {}


def test_nobody_overtakes_a_large_request():
    def line(*waiting):
        return WaitingLine(dict.fromkeys(waiting), ("small", "large"), ())

    division = Division(LIMIT, WINDOW_S)
    for worker, part in {"holder": Part(60.0), "small": Part(0.0, (), 5.0), "large": Part(0.0, (), 80.0, 80.0)}.items():
        division.report(worker, part, 0.0, limit=LIMIT, window_s=WINDOW_S)
    assert division.raise_shares(0.0, line("large", "small")) == []
    assert division.raise_shares(0.0, line("small", "large")) == ["small"]
