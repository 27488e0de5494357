"""One process of slime for all scenarios: importing it takes longer than playing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..played import once
from ..processes import Restarted, checkout
from .trainers import Player, play


@pytest.fixture(scope="session")
def slime_source() -> Path:
    """The checkout of slime; skips where there is none."""
    needs = ("torch", "ray", "transformers", "tokenizers", "wandb", "tensorboard", "httpx", "pylatexenc", "omegaconf")
    file, remedy = "slime/rollout/sglang_rollout.py", "point it to a checkout of slime (git tag v0.3.1)"
    return checkout("slime", "QREWARD_SLIME_SRC", file, needs, remedy)


@pytest.fixture(scope="session")
def _players(slime_source, tmp_path_factory):
    players = Restarted(lambda: Player(slime_source, tmp_path_factory.mktemp("slime")))
    yield players
    players.close()


@pytest.fixture
def player(_players) -> Player:
    """The process of slime that all tests share; a new one after a test that brought it down."""
    return _players()


@pytest.fixture(scope="session")
def play_once(_players):
    """What slime made of a scenario."""
    return once(lambda scenario: play(scenario, _players()))


@pytest.fixture
def new_player(slime_source, tmp_path):
    """A process of slime for one test: for what happens once in a process."""
    with Player(slime_source, tmp_path) as player:
        yield player
