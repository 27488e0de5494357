"""How long short and long requests waited, in constant memory, and that people get to see it."""

from __future__ import annotations

import pytest

from qreward_plugins.observers.waits import KEPT, WaitBySize, Waits


def test_the_shortest_and_the_longest_third_are_told_apart():
    waits = Waits()
    for size in (9, 1, 5, 2, 8, 6):
        waits.add(size, 10.0 * size)
    assert waits.by_size() == WaitBySize(15.0, 20.0, 85.0, 90.0)
    assert waits.by_size().describe() == (
        "the shortest third waited 15.0 s for a source (p95 20.0), the longest 85.0 s (p95 90.0)"
    )


@pytest.mark.parametrize("sizes", [[], [1, 2], [5] * 30, [5] * 29 + [9]])
def test_too_few_or_all_alike_say_nothing(sizes):
    waits = Waits()
    for size in sizes:
        waits.add(size, 1.0)
    assert waits.by_size() is None


def test_memory_is_bounded_and_the_whole_run_counts():
    waits = Waits()
    for number in range(100_000):
        waits.add(number % 7, float(number >= 50_000))
    assert len(waits._kept) <= KEPT
    told = waits.by_size()
    assert (told.short_mean_s, told.long_mean_s) == pytest.approx((0.5, 0.5), abs=0.05)
