"""One process of ROLL for all tests: starting it takes longer than playing most of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..played import once
from ..processes import Restarted, checkout
from .trainers import Player, play


@pytest.fixture(scope="session")
def roll_source() -> Path:
    """The checkout of ROLL; skips where there is none, or none of its packages."""
    remedy = "point it to a checkout of ROLL and run tests/conformance/roll/environment.sh"
    needs = ("gem", "dacite", "hydra", "ray")
    return checkout("ROLL", "QREWARD_ROLL_SRC", "roll/pipeline/rlvr/rlvr_pipeline.py", needs, remedy)


@pytest.fixture(scope="session")
def _players(roll_source, tmp_path_factory):
    players = Restarted(lambda: Player(roll_source, tmp_path_factory.mktemp("roll")))
    yield players
    players.close()


@pytest.fixture
def player(_players) -> Player:
    """The process of ROLL that all tests share; a new one after a test that brought it down."""
    return _players()


@pytest.fixture(scope="session")
def play_once(_players):
    """What ROLL made of a scenario."""
    return once(lambda scenario: play(scenario, _players()))
