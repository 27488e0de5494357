"""The keeper: which answers are due when, and who is forgotten when."""

from __future__ import annotations

import pytest

from qreward_plugins.sharing.keeper import BACK_WITHIN_S, HOLD_S, MARGIN_S, RECALL_EVERY_S, TTL_S, Keeper
from qreward_plugins.sharing.messages import Charged, Part, Report, SourceNews, SourceReport
from qreward_plugins.sharing.pool import TURN_S

LIMIT, WINDOW_S = 100.0, 60.0
NO_NEWS = SourceNews()


def said(share=0.0, spent=(), more=0.0, unit=1.0, news=NO_NEWS, limit=LIMIT):
    return SourceReport({"requests": (limit, WINDOW_S)}, {"requests": Part(share, tuple(spent), more, unit)}, news)


class Desk:
    """A keeper and its clock."""

    def __init__(self, *, first=True, unheard=None):
        self.now = 1000.0
        self.keeper = Keeper(self.now, boot="k", first=first, unheard=unheard)

    def report(self, worker, number, key="s", leaves=False, accepted=None, **what):
        accepted = number if accepted is None else accepted
        self.keeper.report(Report(worker, number, {key: said(**what)}, leaves, accepted), self.now)
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


def test_the_first_report_is_answered_at_once(desk):
    (answer,) = desk.report("a", 0).values()
    assert (answer.boot, answer.number) == ("k", 0)
    assert answer.sources["s"].workers == 1
    assert answer.sources["s"].grants["requests"].share == LIMIT


def test_a_report_with_nothing_to_say_to_is_held(desk):
    known(desk, "a")
    assert desk.report("a", 1, share=LIMIT) == {}
    assert desk.wait(HOLD_S - 0.01) == {}
    assert list(desk.wait(0.01)) == [("a", 1)]


def test_it_says_when_it_wants_to_be_asked_again(desk):
    known(desk, "a", "b")
    assert desk.report("a", 1, share=LIMIT) == {}
    assert desk.keeper.wake_at(desk.now) == desk.now + HOLD_S
    desk.report("b", 1, more=5.0)
    assert desk.keeper.wake_at(desk.now) == desk.now + RECALL_EVERY_S
    assert desk.keeper.wake_at(desk.now + 10.0) == desk.now + 10.0


def test_a_newer_report_takes_the_place_of_the_one_that_is_held(desk):
    known(desk, "a")
    desk.report("a", 1, share=LIMIT)
    assert desk.report("a", 2, share=LIMIT) == {("a", 1): None}
    assert list(desk.wait(HOLD_S)) == [("a", 2)]


def test_old_and_doubled_reports_are_not_heard(desk):
    known(desk, "a", "b")
    desk.report("a", 5, share=LIMIT)
    for number in (5, 4):
        assert desk.report("a", number, share=0.0)["a", number] is None
    # The share of the latest report is charged.
    assert desk.report("b", 1, more=1000.0) == {}


def test_an_old_report_does_not_keep_a_worker_alive(desk):
    known(desk, "a")
    desk.report("a", 5)
    desk.wait(TTL_S)
    desk.report("a", 4)
    desk.wait(MARGIN_S + 0.01)
    assert desk.keeper.workers == 0


def test_shares_are_charged_before_the_worker_hears_of_them(desk):
    assert desk.share("a", 0, more=1000.0) == LIMIT
    # The answer to `a` may be lost; until it says so, it may hold everything.
    assert desk.share("b", 0, more=10.0) == 0.0
    desk.report("a", 1, share=0.0)
    assert desk.share("b", 1, more=10.0) > 0.0


def test_a_silent_worker_is_forgotten_after_its_time_and_a_margin_and_is_a_ghost_for_a_window(desk):
    desk.report("a", 0, more=1000.0)
    assert desk.share("b", 0, more=10.0) == 0.0
    silent_since, number, forgotten_at, share = desk.now, 0, 0.0, 0.0
    while not share:
        number += 1
        answers = desk.report("b", number, more=10.0) | desk.wait(0.5)
        forgotten_at = forgotten_at or (desk.now if desk.keeper.workers == 1 else 0.0)
        shares = [one.sources["s"].grants["requests"].share for one in answers.values() if one]
        share = max(shares, default=0.0)
    assert TTL_S + MARGIN_S < forgotten_at - silent_since <= TTL_S + MARGIN_S + 0.5
    assert desk.now - forgotten_at == pytest.approx(WINDOW_S, abs=0.5)


def test_what_a_dead_worker_may_have_sent_counts_for_a_window_from_its_death(desk):
    desk.share("dead", 0, more=1000.0)
    desk.wait(5.0)
    desk.keeper.died("dead", desk.now)
    assert desk.keeper.workers == 0
    assert desk.share("a", 0, more=1000.0) == 0.0
    number = 1
    for _ in range(int(WINDOW_S) - 1):
        answers = desk.wait(1.0) | desk.report("a", number, more=1000.0)
        assert all(not one.sources["s"].grants["requests"].share for one in answers.values() if one)
        number += 1
    desk.wait(1.1)
    desk.report("a", number, more=1000.0)
    assert desk.keeper._sources["s"].pools["requests"].share("a") == LIMIT


def test_a_report_of_a_dead_worker_that_was_under_way_is_not_heard(desk):
    desk.share("dead", 0, more=1000.0)
    desk.keeper.died("dead", desk.now)
    assert desk.report("dead", 1, more=1000.0) == {("dead", 1): None}
    assert desk.keeper.workers == 0


def test_what_runs_at_a_dead_worker_ends_with_its_connections(desk):
    """The source sees a moment later that they have ended."""
    limits, part = {"concurrency": (LIMIT, 0.0)}, Part(0.0, (), 1000.0)
    said = {"s": SourceReport(limits, {"concurrency": part}, NO_NEWS)}

    def share(worker, number):
        desk.keeper.report(Report(worker, number, said), desk.now)
        return desk.due()[worker, number].sources["s"].grants["concurrency"].share

    assert share("dead", 0) == LIMIT
    desk.keeper.died("dead", desk.now)
    assert share("a", 0) == 0.0
    answers = desk.wait(MARGIN_S - 0.1)
    assert not answers
    desk.keeper.report(Report("a", 1, said), desk.now)
    assert desk.wait(0.2)["a", 1].sources["s"].grants["concurrency"].share == LIMIT


def test_who_leaves_is_forgotten_at_once_and_what_it_spent_since_its_last_report_is_not(desk):
    known(desk, "a", "b")
    desk.report("a", 1, share=LIMIT)
    assert desk.report("a", 2, leaves=True, spent=[(20.0, 60.0)]) == {("a", 1): None, ("a", 2): None}
    assert desk.keeper.workers == 1
    assert desk.share("b", 1, more=1000.0) == 40.0


def test_others_are_told_at_once_that_they_got_more(desk):
    known(desk, "a", "b")
    desk.report("a", 1, share=LIMIT)
    assert desk.report("b", 1, more=10.0) == {}
    answers = desk.report("a", 2, share=50.0)
    assert answers["b", 1].sources["s"].grants["requests"].share == 50.0


def test_who_holds_what_others_wait_for_is_asked_for_it(desk):
    known(desk, "a", "b")
    desk.report("a", 1, share=LIMIT, more=1000.0)
    desk.wait(TURN_S + RECALL_EVERY_S)
    desk.report("b", 1, more=1000.0)
    answers = desk.wait(RECALL_EVERY_S)
    grant = answers["a", 1].sources["s"].grants["requests"]
    assert grant.recall
    assert grant.target == LIMIT / 2


def test_an_heir_gives_nothing_away_until_nobody_can_have_anything_untold():
    desk = Desk(first=False)
    assert desk.share("a", 0, more=10.0) == 0.0
    number = 1
    waited_s = 0.0
    while waited_s < WINDOW_S + 2 * TTL_S + MARGIN_S - 1.0:
        answers = desk.report("a", number, more=10.0)
        answers |= desk.wait(1.0)
        number, waited_s = number + 1, waited_s + 1.0
        assert all(not one.sources["s"].grants["requests"].share for one in answers.values() if one)
    desk.wait(1.0)
    assert desk.share("a", number, more=10.0) > 0.0


def test_an_heir_believes_what_workers_say_they_hold():
    desk = Desk(first=False)
    assert desk.share("a", 0, share=40.0) == 40.0
    assert desk.share("b", 0, share=60.0) == 60.0
    desk.report("a", 1, share=40.0, more=1000.0)
    # What `b` had spent is spent, and the rest of what it gave up is free.
    answers = desk.report("b", 1, share=5.0, more=0.0, spent=[(30.0, 20.0)])
    assert answers["a", 1].sources["s"].grants["requests"].share == 80.0


def heir_gives_after_s(desk, worker="a"):
    """Return after how many seconds an heir gives a worker something."""
    began_at, number = desk.now, 1
    while True:
        answers = desk.report(worker, number, more=1000.0) | desk.wait(0.5)
        if any(one.sources["s"].grants["requests"].share for one in answers.values() if one):
            return desk.now - began_at
        number += 1


def test_an_heir_that_has_heard_everybody_waits_for_a_window_only():
    desk = Desk(first=False, unheard=["a", "b", "dead"])
    desk.report("a", 0, more=1000.0)
    desk.wait(2.0)
    desk.report("b", 0)
    assert desk.keeper.unheard == ("dead",)
    desk.wait(1.0)
    desk.keeper.died("dead", desk.now)
    assert desk.keeper.unheard == ()
    assert WINDOW_S <= heir_gives_after_s(desk) <= WINDOW_S + 1.0


def test_an_heir_waits_for_a_worker_that_lives_and_does_not_report():
    desk = Desk(first=False, unheard=["a", "stopped"])
    desk.report("a", 0, more=1000.0)
    assert WINDOW_S + 2 * TTL_S + MARGIN_S <= heir_gives_after_s(desk) <= WINDOW_S + 2 * TTL_S + MARGIN_S + 1.0
    assert desk.keeper.unheard == ()


def test_a_source_that_comes_later_counts_as_spent_from_when_everybody_was_heard():
    desk = Desk(first=False, unheard=["a"])
    desk.report("a", 0, key="other")
    desk.wait(WINDOW_S / 2)
    desk.report("b", 0, more=1000.0)
    assert WINDOW_S / 2 <= heir_gives_after_s(desk, "b") <= WINDOW_S / 2 + 1.0


def test_an_heir_that_knows_of_nobody_waits_for_a_window_only():
    desk = Desk(first=False, unheard=[])
    desk.report("a", 0, more=1000.0)
    assert WINDOW_S <= heir_gives_after_s(desk) <= WINDOW_S + 1.0


def test_what_an_earlier_keeper_charged_to_a_dead_worker_counts_for_a_window():
    charged = {"s": {"requests": Charged(LIMIT, WINDOW_S, {"dead": (5000.0, 70.0), "stopped": (5000.0, 30.0)})}}
    desk = Desk()
    desk.keeper = Keeper(desk.now, boot="k", first=False, charged=charged, unheard=["stopped"])
    desk.report("a", 0, more=1000.0)
    desk.keeper.died("dead", desk.now)
    assert WINDOW_S <= heir_gives_after_s(desk) <= WINDOW_S + 1.0
    assert desk.keeper._sources["s"].pools["requests"].share("a") == 70.0


def test_two_resources_go_to_the_same_worker_first():
    keeper, now = Keeper(0.0, boot="k", first=False), 0.0
    limits = {"requests": (1.0, WINDOW_S), "concurrency": (1.0, 0.0)}

    def report(worker, number, requests, concurrency):
        parts = {"requests": Part(requests, (), 1.0), "concurrency": Part(concurrency, (), 1.0)}
        keeper.report(Report(worker, number, {"s": SourceReport(limits, parts)}), now)

    held = {"a": {"requests": 1.0, "concurrency": 0.0}, "b": {"requests": 0.0, "concurrency": 1.0}}
    numbers = {"a": 0, "b": 0}
    for worker in held:
        report(worker, 0, **held[worker])
    complete = None
    for _ in range(100):
        for due in keeper.due(now):
            if due.answer is None:
                continue
            for resource, grant in due.answer.sources["s"].grants.items():
                held[due.worker][resource] = grant.target if grant.recall else grant.share
            numbers[due.worker] += 1
            report(due.worker, numbers[due.worker], **held[due.worker])
        complete = next((worker for worker, has in held.items() if min(has.values()) >= 1.0), None)
        if complete:
            break
        now += 0.1
    assert complete == "a"
    assert now < TURN_S


def test_a_keeper_that_was_stopped_for_long_forgets_who_it_held_and_goes_on(desk):
    known(desk, "a")
    desk.report("a", 1, share=LIMIT)
    desk.now += TTL_S + MARGIN_S + 1.0
    assert desk.due() == {("a", 1): None}
    assert desk.keeper.workers == 0
    assert desk.report("a", 2, share=0.0)["a", 2] is not None


def test_what_one_learns_all_hear_at_once(desk):
    known(desk, "a", "b")
    desk.report("b", 1, share=50.0)
    answers = desk.report("a", 1, share=50.0, news=SourceNews(pause_s=7.0))
    assert answers["b", 1].sources["s"].news.pause_s == 7.0
    desk.wait(2.0)
    answers = desk.report("c", 0)
    assert answers["c", 0].sources["s"].news.pause_s == 5.0


def test_a_recovery_ends_a_rest_for_all(desk):
    known(desk, "a", "b")
    desk.report("b", 1, share=50.0)
    assert desk.report("a", 1, share=50.0, news=SourceNews(open_s=30.0))["b", 1].sources["s"].news.open_s == 30.0
    desk.report("b", 2, share=50.0)
    news = desk.report("a", 2, share=50.0, news=SourceNews(recovered=True))["b", 2].sources["s"].news
    assert news.recovered
    assert news.open_s == 0.0


def test_who_asked_again_before_it_heard_is_told_again(desk):
    known(desk, "a", "b")
    desk.report("b", 1, share=50.0)
    assert ("b", 1) in desk.report("a", 1, share=50.0, news=SourceNews(pause_s=7.0))
    # The answer to its report 1 was on the way: what it has accepted last is 0.
    assert desk.report("b", 2, share=50.0, accepted=0)["b", 2].sources["s"].news.pause_s == 7.0
    assert desk.report("b", 3, share=50.0, accepted=2) == {}


def test_who_was_not_listening_is_told_with_its_next_report(desk):
    known(desk, "a", "b")
    desk.report("a", 1, share=50.0, news=SourceNews(pause_s=7.0))
    assert desk.report("a", 2, share=50.0, accepted=0) == {("a", 1): None}  # it is its own news
    assert desk.report("b", 1, share=50.0)["b", 1].sources["s"].news.pause_s == 7.0
    assert desk.report("b", 2, share=50.0, accepted=1) == {}


def test_each_source_has_books_of_its_own(desk):
    desk.report("a", 0, key="s", more=1000.0)
    answers = desk.report("b", 0, key="t", more=1000.0)
    assert answers["b", 0].sources["t"].grants["requests"].share == LIMIT
    assert answers["b", 0].sources["t"].workers == 1


def test_who_was_answered_is_expected_back_for_a_moment(desk):
    known(desk, "holder", "first", "second")
    desk.report("holder", 1, share=LIMIT)
    desk.report("first", 1, more=60.0, unit=60.0)
    desk.report("second", 1, more=60.0, unit=60.0)
    answers = desk.wait(HOLD_S)
    assert ("first", 1) in answers
    desk.report("second", 2, more=60.0, unit=60.0)
    answers = desk.report("holder", 2, share=0.0, spent=[(60.0, 40.0)])
    assert ("second", 2) not in answers
    answers = desk.wait(BACK_WITHIN_S)
    assert ("second", 2) in answers
