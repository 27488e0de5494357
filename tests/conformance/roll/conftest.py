"""One process of ROLL for all tests: starting it takes longer than playing most of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ..played import Played
from ..scenarios import Scenario
from .real import Companies, Player, play, why_not
from .scenarios import EVERY


@pytest.fixture(scope="session")
def roll_source() -> Path:
    """The checkout of ROLL; skips where there is none, or none of its packages."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return Path(os.environ["QREWARD_ROLL_SRC"]).resolve()


@pytest.fixture(scope="session")
def _companies(roll_source, tmp_path_factory):
    open_companies = []

    def leave():
        for companies in open_companies:
            companies.__exit__()
            companies.player.__exit__()
        open_companies.clear()

    def current() -> Companies:
        if not open_companies or not open_companies[-1].player.alive:
            leave()
            player = Player(roll_source, tmp_path_factory.mktemp("roll")).__enter__()
            open_companies.append(Companies(player, EVERY).__enter__())
        return open_companies[-1]

    yield current
    leave()


@pytest.fixture
def companies(_companies) -> Companies:
    """The reward workers that scenarios share, in a process of ROLL; a new one after a test that brought it down."""
    return _companies()


@pytest.fixture
def player(companies) -> Player:
    """The process of ROLL that all tests share."""
    return companies.player


@pytest.fixture(scope="session")
def play_once(_companies):
    """What ROLL made of a scenario, played once for all tests that ask."""
    outcomes: dict[str, Played] = {}

    def of(scenario: Scenario) -> Played:
        if scenario.name not in outcomes:
            outcomes[scenario.name] = play(scenario, _companies())
        return outcomes[scenario.name]

    return of
