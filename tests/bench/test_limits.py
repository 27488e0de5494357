"""What the bench of shared limits hands out and shows; its runs take minutes on a real Ray."""

from __future__ import annotations

import pytest
from rich.console import Console

pytest.importorskip("ray")

import limits


def test_every_sample_has_one_worker_and_the_same_one_again():
    first = limits.shares(500, 8)
    assert sorted(number for mine in first for number in mine) == list(range(500))
    assert first == limits.shares(500, 8)
    assert len({len(mine) for mine in first}) > 1  # drawn, not dealt


def test_the_table_says_how_much_of_the_rate_was_used_and_how_it_compares_with_one_worker():
    results = [
        limits.Result(limits.OURS, 1, 200, 20.0, 20.0, 0, 0.0, 100, 100, 200, 4, 0.2),
        limits.Result(limits.OURS, 8, 200, 20.0, 25.0, 0, 0.0, 100, 100, 200, 20, 0.5),
        limits.Result(limits.THEIRS, 8, 200, 20.0, 40.0, 321, 9.5, 400, 300, 521, 0, 0.0),
    ]
    console = Console(width=140, record=True)
    console.print(limits.table(results, 100, 20.0))
    lines = console.export_text().splitlines()
    alone, ours, theirs = ([cell.strip() for cell in line.split("│")] for line in lines if "│" in line)
    assert alone[2:9] == ["1", "0", "100", "100", "100.0%", "20.0", "1.00"]
    assert ours[2:11] == ["8", "0", "100", "100", "80.0%", "25.0", "1.25", "0.100", "2.0%"]
    assert theirs[2:9] == ["8", "321", "400", "300", "50.0%", "40.0", ""]


def test_the_most_that_any_window_holds_is_counted_from_when_requests_were_written():
    assert limits.most_in_a_window([], 10.0) == 0
    assert limits.most_in_a_window([0.0, 1.0, 9.0, 10.0, 10.5], 10.0) == 4  # what is a window old is out of it
