"""One process of ROLL for all tests: starting it takes longer than playing most of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..played import once
from ..processes import checkout
from .trainers import Player, play


@pytest.fixture(scope="session")
def roll_source() -> Path:
    """The checkout of ROLL; skips where there is none, or none of its packages."""
    remedy = "point it to a checkout of ROLL and run tests/conformance/roll/environment.sh"
    needs = ("gem", "dacite", "hydra", "ray")
    return checkout("ROLL", "QREWARD_ROLL_SRC", "roll/pipeline/rlvr/rlvr_pipeline.py", needs, remedy)


@pytest.fixture(scope="session")
def player(roll_source, tmp_path_factory) -> Iterator[Player]:
    """The process of ROLL that all tests share."""
    with Player(roll_source, tmp_path_factory.mktemp("roll")) as player:
        yield player


@pytest.fixture(scope="session")
def play_once(player):
    """What ROLL made of a scenario."""
    return once(lambda scenario: play(scenario, player))
