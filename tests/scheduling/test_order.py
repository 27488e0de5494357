"""The order of a batch that needs several windows, and when another order than by size is worth it."""

from __future__ import annotations

import heapq
import random
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.scheduling.order import windows_order

WINDOW_S = 60.0


def jobs_of(sizes):
    return [SimpleNamespace(size=size, sequence=number) for number, size in enumerate(sizes)]


def sizes_of(jobs):
    return [job.size for job in jobs]


def lognormal(count, seed):
    rng = random.Random(seed)
    return [rng.lognormvariate(0, 0.6) * 1000 for _ in range(count)]


def makespan(sizes, *, per_window, concurrency, seconds_per_size=1 / 1000):
    """How long jobs take in this order: each starts when a place is free and a slot of the window has come back."""
    places, starts, end = [0.0] * concurrency, [], 0.0
    for number, size in enumerate(sizes):
        start = heapq.heappop(places)
        if number >= per_window:
            start = max(start, starts[number - per_window] + WINDOW_S)
        starts.append(start)
        end = max(end, start + size * seconds_per_size)
        heapq.heappush(places, start + size * seconds_per_size)
    return end


@pytest.mark.parametrize(("count", "per_window"), [(10, 10), (5, 10), (1, 1), (10, 0), (10, 1e9)])
def test_one_window_keeps_the_longest_first(count, per_window):
    assert windows_order(jobs_of(range(count)), per_window) is None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=200), st.floats(0.5, 150))
def test_it_is_an_order_of_the_same_jobs(sizes, per_window):
    jobs = jobs_of(sizes)
    order = windows_order(jobs, per_window)
    if order is not None:
        assert sorted(map(id, order)) == sorted(map(id, jobs))


def test_every_window_begins_with_short_jobs_goes_on_with_the_longest_and_the_shortest_come_last():
    # 23 jobs at 10 a window: two windows, and 4 short jobs for each of them and for the rest.
    order = sizes_of(windows_order(jobs_of(range(1, 24)), 10))
    assert order == [12, 11, 10, 9, 23, 22, 21, 20, 19, 18, 8, 7, 6, 5, 17, 16, 15, 14, 13, 4, 3, 2, 1]


def test_equal_sizes_keep_the_order_of_submission():
    jobs = jobs_of([7] * 30)
    order = [job.sequence for job in windows_order(jobs, 12)]
    assert order[0] < order[1]
    assert order[-2] < order[-1]


def test_a_batch_that_overflows_a_little_ends_earlier_than_longest_first():
    gains = []
    for seed in range(20):
        sizes = lognormal(430, seed)
        room = {"per_window": 200, "concurrency": 30, "seconds_per_size": 6 / 1000}
        order = sizes_of(windows_order(jobs_of(sizes), 200))
        gains.append(makespan(sorted(sizes, reverse=True), **room) / makespan(order, **room))
    assert min(gains) > 1.01
    assert sum(gains) / len(gains) > 1.02


def test_no_more_than_most_of_the_batch_serves_as_short_jobs():
    # The last window is nearly full: there are not that many short jobs for all of the windows.
    sizes = list(range(1, 200))
    order = sizes_of(windows_order(jobs_of(sizes), 100))
    assert max(order) in order[:100]
    assert sorted(order) == sizes
