"""What the bench of shared limits hands out and shows; its runs take minutes on a real Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

import limits


def test_every_sample_has_one_worker_and_the_same_one_again():
    first = limits.shares(500, 8)
    assert sorted(number for mine in first for number in mine) == list(range(500))
    assert first == limits.shares(500, 8)
    assert len({len(mine) for mine in first}) > 1  # drawn, not dealt


def test_the_most_that_any_window_holds_is_counted_from_when_requests_were_written():
    assert limits.most_in_a_window([], 10.0) == 0
    assert limits.most_in_a_window([0.0, 1.0, 9.0, 10.0, 10.5], 10.0) == 4  # what is a window old is out of it
