"""Trainings that two players play, and the table of how long each took."""

from __future__ import annotations

import pytest

from .agreement import seconds
from .players import Players


@pytest.fixture(scope="session")
def verl_and_tasks():
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")


@pytest.fixture(scope="session")
def players(tmp_path_factory):
    return Players(tmp_path_factory.mktemp("players"))


def pytest_terminal_summary(terminalreporter):
    if not seconds:
        return
    terminalreporter.section("verl and its stand-in")
    terminalreporter.write_line("| scenario | real verl, seconds | fake, seconds |")
    terminalreporter.write_line("|---|---:|---:|")
    for name, took in seconds.items():
        cells = [f"{took[player]:.3g}" if player in took else "" for player in ("verl", "fake")]
        terminalreporter.write_line(f"| {name} | {cells[0]} | {cells[1]} |")
