"""How long a source that throttles is left alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.errors import Throttled
from qreward_plugins.samples import Scored
from qreward_plugins.scheduling.pauses import PROBE_AFTER_S, Pauses


def test_a_later_word_of_the_server_makes_the_pause_longer():
    pauses = Pauses()
    assert pauses.throttled(1.0, sent_at=0.0, now=0.1) == 1.0
    assert pauses.throttled(5.0, sent_at=0.0, now=0.2) == 5.0
    assert pauses.left_s(0.2) == 5.0
    assert pauses.throttled(1.0, sent_at=0.0, now=0.3) is None
    assert pauses.throttled(None, sent_at=0.0, now=0.4) is None
    assert pauses.left_s(1.2) == pytest.approx(4.0)


def test_a_word_that_comes_when_the_pause_is_over_counts_if_it_is_of_a_later_time():
    pauses = Pauses()
    pauses.throttled(1.0, sent_at=0.0, now=0.1)
    assert pauses.throttled(5.0, sent_at=0.0, now=100.0) == 5.0
    assert pauses.left_s(101.0) == pytest.approx(4.0)


@given(
    words=st.lists(st.tuples(st.floats(0, 50), st.one_of(st.none(), st.floats(0, 300))), min_size=1, max_size=12).map(
        lambda words: sorted(words, key=lambda word: word[0])
    )
)
def test_requests_of_one_burst_pause_until_the_latest_time_that_was_said_and_no_longer(words):
    """All were sent at 0; `words` are when their 429s came, and what they asked for."""
    pauses = Pauses()
    for at, retry_after_s in words:
        pauses.throttled(retry_after_s, sent_at=0.0, now=at)
    said = [at + retry_after_s for at, retry_after_s in words if retry_after_s is not None]
    first_at = words[0][0]
    latest = max([*said, first_at + 1.0])
    now = words[-1][0]
    end = now + pauses.left_s(now)
    assert end <= max(latest, now) + 1e-9
    assert end >= min(max([*said, now]) - 0.06, first_at + PROBE_AFTER_S) - 1e-6


@given(retry_after_s=st.floats(0, 1e9), answers=st.booleans())
def test_no_word_stops_a_source_for_longer_than_a_minute_between_two_probes(retry_after_s, answers):
    """P11, for Retry-After."""
    pauses, now = Pauses(), 0.0
    pauses.throttled(retry_after_s, sent_at=0.0, now=now)
    for _ in range(3):
        wait = pauses.left_s(now)
        assert wait <= PROBE_AFTER_S
        now += wait
        if now >= retry_after_s:
            return
        pauses.started(now)
        assert pauses.left_s(now) > 0  # one at a time
        if answers:
            pauses.answered(now)
            assert pauses.left_s(now + 1) == 0
            return


def test_a_sample_goes_again_when_the_server_said_and_not_before(stage):
    told = iter([1.0, 5.0])

    def behaviour(number, request, now):
        return Throttled("429", status=429, retry_after_s=next(told)) if number < 2 else 0.5

    source = stage.add("a", limits={"concurrency": 2}, behaviour=behaviour)
    played = stage.play([10, 10])
    assert played.all_scored
    assert source.arrivals == pytest.approx([0.0, 0.0, 1.0, 5.0], abs=0.01)


def test_one_absurd_retry_after_costs_a_minute_and_no_sample(stage):
    source = stage.add("a", behaviour=lambda number, *_: Throttled("429", retry_after_s=300) if number == 0 else 0.5)
    played = stage.play([10] * 20, deadline_s=100)
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes)
    assert played.finished_at <= 62
    assert source.arrivals[1] <= 61
