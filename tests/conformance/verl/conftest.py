"""Trainings that two players play."""

from __future__ import annotations

import pytest

from .players import Players


@pytest.fixture(scope="session")
def players(tmp_path_factory):
    return Players(tmp_path_factory.mktemp("players"))


@pytest.fixture
def outcome(players, player, scenario):
    """What came of the scenario of a test (`played`)."""
    return players.play(player, scenario)
