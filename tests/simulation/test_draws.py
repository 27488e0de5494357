"""Luck: the same for everybody, whatever they do."""

from __future__ import annotations

import statistics

from qreward_plugins.simulation import Luck
from qreward_plugins.simulation.draws import share


def test_luck_depends_on_seed_sample_and_number_alone():
    first, second = Luck(7), Luck(7)
    mine = {(sample, number): first.draw(sample) for sample in ("x", "y", "z") for number in range(4)}
    for number in range(4):
        for sample in ("z", "x", "y"):
            assert second.draw(sample) == mine[sample, number]
    assert len(set(mine.values())) == len(mine)
    assert Luck(8).draw("x") != mine["x", 0]
    assert first.requests("x") == 4
    assert first.requests("unheard of") == 0


PINNED = [0.26959576, 0.253743822, 0.064234532, 0.722820175, 0.524559962]


def test_luck_is_the_same_on_every_machine():
    draw = Luck(0).draw("sample")
    assert [round(value, 9) for value in draw] == PINNED


def test_luck_is_spread_as_it_says():
    luck = Luck(1)
    draws = [luck.draw(str(number)) for number in range(4000)]
    assert abs(statistics.mean(draw.normal for draw in draws)) < 0.05
    assert abs(statistics.stdev(draw.normal for draw in draws) - 1) < 0.05
    for name in ("straggler", "error", "invalid", "network"):
        values = [getattr(draw, name) for draw in draws]
        assert all(0 <= value < 1 for value in values)
        assert abs(statistics.mean(values) - 0.5) < 0.03
        assert abs(sum(value < 0.1 for value in values) / 4000 - 0.1) < 0.02
    assert abs(statistics.correlation([d.error for d in draws], [d.straggler for d in draws])) < 0.05


def test_a_share_is_a_pure_function_of_its_text():
    shares = [share(str(number)) for number in range(1000)]
    assert shares == [share(str(number)) for number in range(1000)]
    assert len(set(shares)) == 1000
    assert abs(statistics.mean(shares) - 0.5) < 0.05
