"""verl, slime, ROLL and `qreward score` with a reward server as their engine: no other setting changes."""

from __future__ import annotations

import pytest

from ..kit import FRAMEWORKS, play

WORDS = ["so: 0.25", "so: 0.5", "so: break", "so: 0.75"]


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_trainer(serving, framework):
    with serving(judge={"correct_at": 0.5}) as there:
        step = play(framework, WORDS, there.remote())
        assert sorted(sample.response for sample in there.source.samples) == sorted(WORDS)
    assert [reward for number, reward in enumerate(step.rewards) if number != 2] == [0.25, 0.5, 0.75]
    assert [number for number, advantage in enumerate(step.advantages) if not advantage] == [1, 2]
    assert not step.poisoned
