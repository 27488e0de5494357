"""Workers that share an undeclared limit learn it together: the figures of bench/learned_limits.py, in virtual time."""

from __future__ import annotations

import learned_limits as bench
import pytest

from qreward_plugins.simulation import run


@pytest.mark.parametrize(("says", "workers"), [("Retry-After", 8), ("neither", 4)])
def test_workers_learn_an_undeclared_limit_with_hardly_more_429s_than_one(says, workers):
    one, several = (run(bench.play(says, count, minutes=4)) for count in (1, workers))
    assert sum(several.rejected) <= 1.5 * max(4, sum(one.rejected))
    assert several.rate >= 0.9 * bench.PER_MINUTE
    if says == "Retry-After":
        assert all(rejected <= 3 for rejected in several.rejected[2:]), "one worker at a time probes what is learned"
