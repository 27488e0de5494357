"""Workers that share an undeclared limit learn it together: the figures of bench/learned_limits.py, in virtual time."""

from __future__ import annotations

import learned_limits as bench
import pytest
from rich.console import Console

from qreward_plugins.simulation import run


@pytest.mark.parametrize(("says", "workers"), [("Retry-After", 32), ("neither", 8), ("headers", 8)])
def test_workers_learn_an_undeclared_limit_with_hardly_more_429s_than_one(says, workers):
    one, several = (run(bench.play(says, count, minutes=5)) for count in (1, workers))
    assert sum(several.rejected) <= 1.5 * max(4, sum(one.rejected))
    assert several.rate >= 0.9 * bench.PER_MINUTE


def test_once_it_is_learned_one_worker_at_a_time_probes_it():
    played = run(bench.play("Retry-After", 8, minutes=6))
    assert all(rejected <= 3 for rejected in played.rejected[2:])


def test_the_table_compares_with_one_worker():
    results = [
        bench.Result("headers", 1, False, 0, (10, 0, 0, 0), (600, 600, 600, 600)),
        bench.Result("headers", 8, False, 0, (10, 0, 0, 2), (600, 600, 600, 570)),
        bench.Result("headers", 8, True, 0, (90, 0, 0, 10), (600, 600, 600, 600)),
    ]
    console = Console(width=140, record=True)
    console.print(bench.table(results))
    rows = [
        [cell.strip() for cell in line.split("│")][1:-1] for line in console.export_text().splitlines() if "│" in line
    ]
    assert rows == [
        ["headers", "1", "10", "1.00", "0", "100.0%"],
        ["headers", "8", "12", "1.20", "2", "95.0%"],
        ["headers", "8, each alone", "100", "10.00", "10", "100.0%"],
    ]
