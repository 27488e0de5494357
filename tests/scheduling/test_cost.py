"""`prefer: cost`: cheap sources as long as deadlines allow, dear ones after that, and hedges of last resort only."""

from __future__ import annotations

import pytest

from qreward_plugins.errors import SourceUnusable, Throttled
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling.hedging import OVERDUE_AT


def shops(stage, *, cheap=None, dear=None, cheap_s=2.0, dear_s=1.0):
    """A cheap source and a dear, faster one, both known, of concurrency 2."""
    for name, price, seconds, more in (("dear", 5.0, dear_s, dear), ("cheap", 1.0, cheap_s, cheap)):
        options = {"behaviour": lambda number, request, now, seconds=seconds: seconds, **(more or {})}
        stage.add(name, price=price, limits={"concurrency": 2}, **options)
        stage.knows(name, seconds)


def cost(played):
    return sum(outcome.verdict.cost_usd for outcome in played.outcomes if isinstance(outcome, Scored))


def test_a_batch_with_time_to_spare_uses_cheap_sources_only(stage, new_stage):
    shops(stage)
    played = stage.play([10] * 40, prefer="cost", deadline_s=120)
    assert (played.shares, cost(played)) == ({"cheap": 40}, 40.0)
    assert played.finished_at == pytest.approx(40.0)
    quick = new_stage()
    shops(quick)
    assert quick.play([10] * 40, prefer="speed", deadline_s=120).shares["dear"] > 15


def test_a_slower_source_serves_the_longest_first_when_it_serves_all(stage):
    for name, price, seconds in (("dear", 5.0, 0.1), ("cheap", 1.0, 1.0)):
        stage.add(
            name,
            price=price,
            limits={"concurrency": 1},
            behaviour=lambda number, request, now, seconds=seconds: seconds * request.size / 100,
        )
        stage.knows(name, seconds, size=100)
    played = stage.play([100, 900, 300, 500, 700], prefer="cost", deadline_s=290)
    assert played.shares == {"cheap": 5}
    assert [sent.size for sent in stage.sent] == [900, 700, 500, 300, 100]
    assert played.finished_at == pytest.approx(25.0)


def test_a_batch_that_cheap_sources_cannot_end_in_time_uses_dear_ones_too(stage):
    shops(stage)
    played = stage.play([10] * 40, prefer="cost", deadline_s=35)
    assert played.all_scored
    assert played.shares["dear"] > 15
    assert played.shares["cheap"] > 5


def test_dear_sources_are_left_again_when_there_is_time(stage):
    shops(stage)
    tight = stage.play([10] * 40, prefer="cost", deadline_s=45)
    assert tight.all_scored
    assert 0 < tight.shares["dear"] < 40
    # As soon as what is left fits into half of the time, it is left to the cheap one.
    last = {name: max(sent.at for sent in stage.sent if sent.source == name) for name in stage.sources}
    assert last["cheap"] > last["dear"]


@pytest.mark.parametrize(
    "error", [SourceUnusable("401", status=401), Throttled("429", retry_after_s=200)], ids=["unusable", "paused"]
)
def test_dear_sources_serve_when_the_cheap_one_does_not(stage, error):
    shops(stage, cheap={"behaviour": lambda *_: error})
    played = stage.play([10] * 10, prefer="cost", deadline_s=100)
    assert (played.all_scored, played.shares["dear"]) == (True, 10)


def test_one_of_three_prices_is_enough(stage):
    shops(stage)
    stage.add("middling", price=2.0, limits={"concurrency": 2})
    stage.knows("middling", 1.0)
    played = stage.play([10] * 60, prefer="cost", deadline_s=80)
    # Half of the time is 40 s; the two cheaper sources need 20 s, the cheapest alone 60 s.
    assert played.shares["dear"] == 0
    assert played.shares["middling"] > 0
    assert played.shares["cheap"] > 0


def test_a_strategy_by_name_keeps_to_the_cheap_ones_too(stage):
    shops(stage)
    assert stage.play([10] * 40, prefer="cost", strategy="round_robin", deadline_s=120).shares == {"cheap": 40}


def straggling(number, request, now):
    return 60.0 if number == 19 else 2.0


@pytest.mark.parametrize("prefer", ["cost", "speed"])
def test_only_what_is_overdue_is_hedged(stage, prefer):
    shops(stage, cheap={"behaviour": straggling}, dear_s=2.0)
    played = stage.play([10] * 20, prefer=prefer, hedge=True, deadline_s=400)
    hedges = stage.counted("dear").hedges + stage.counted("cheap").hedges
    assert played.all_scored
    assert played.report.hedges == hedges
    if prefer == "cost":
        assert hedges == 1
        # A soft hedge would have come as soon as the queue was empty.
        assert stage.sent[-1].at >= stage.sent[19].at + OVERDUE_AT * 2.0
        assert played.finished_at < 30
    else:
        assert hedges >= 1


def test_own_replicas_come_first_and_hosted_sources_take_what_they_cannot_do(stage, new_stage):
    def both(stage):
        for name, price, places in (("own", 0.0, 4), ("hosted", 1.0, 32)):
            stage.add(name, price=price, limits={"concurrency": places}, behaviour=lambda *_: 1.0)
            stage.knows(name, 1.0, size=10)

    both(stage)
    assert stage.play([10] * 40, prefer="cost", deadline_s=60).shares == {"own": 40}
    tight = new_stage()
    both(tight)
    played = tight.play([10] * 40, prefer="cost", deadline_s=8)
    assert played.all_scored
    assert played.shares["own"] >= 8
    assert played.shares["hosted"] >= 8
    quick = new_stage()
    both(quick)
    played = quick.play([10] * 40, prefer="speed", deadline_s=60)
    assert played.shares["own"] >= 4
    assert played.shares["hosted"] >= 32
