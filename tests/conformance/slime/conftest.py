"""One process of slime for all scenarios: importing it takes longer than playing them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ..played import once
from ..processes import checkout
from .trainers import Player, play


@pytest.fixture(scope="session")
def slime_source() -> Path:
    """The checkout of slime; skips where there is none."""
    needs = ("torch", "ray", "transformers", "tokenizers", "wandb", "tensorboard", "httpx", "pylatexenc", "omegaconf")
    file, remedy = "slime/rollout/sglang_rollout.py", "point it to a checkout of slime (git tag v0.3.1)"
    return checkout("slime", "QREWARD_SLIME_SRC", file, needs, remedy)


@pytest.fixture(scope="session")
def player(slime_source, tmp_path_factory) -> Iterator[Player]:
    """The process of slime that all tests share."""
    with Player(slime_source, tmp_path_factory.mktemp("slime")) as player:
        yield player


@pytest.fixture(scope="session")
def play_once(player):
    """What slime made of a scenario."""
    return once(lambda scenario: play(scenario, player))


@pytest.fixture
def new_player(slime_source, tmp_path):
    """A process of slime for one test: for what happens once in a process."""
    with Player(slime_source, tmp_path) as player:
        yield player
