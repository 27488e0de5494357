"""One process of slime for all scenarios: importing it takes longer than playing them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..played import Played
from ..scenarios import Scenario
from .real import Player, play, why_not


@pytest.fixture(scope="session")
def slime_source() -> Path:
    """The checkout of slime; skips where there is none."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return Path(os.environ["QREWARD_SLIME_SRC"]).resolve()


@pytest.fixture(scope="session")
def _players(slime_source, tmp_path_factory):
    players = []

    def current() -> Player:
        if not players or not players[-1].alive:
            players.append(Player(slime_source, tmp_path_factory.mktemp("slime")))
            players[-1].__enter__()
        return players[-1]

    yield current
    for player in players:
        player.__exit__(None, None, None)


@pytest.fixture
def player(_players) -> Player:
    """The process of slime that all tests share; a new one after a test that brought it down."""
    return _players()


@pytest.fixture(scope="session")
def _outcomes() -> dict[str, Played]:
    return {}


@pytest.fixture
def play_once(player, _outcomes):
    """`play_once(scenario)` plays a scenario on slime, and remembers what came out of it for the other tests."""

    def recall(scenario: Scenario) -> Played:
        if scenario.name not in _outcomes:
            _outcomes[scenario.name] = play(scenario, player)
        return _outcomes[scenario.name]

    return recall


@pytest.fixture
def new_player(slime_source, tmp_path):
    """A process of slime for one test: for what happens once in a process."""
    with Player(slime_source, tmp_path) as player:
        yield player
