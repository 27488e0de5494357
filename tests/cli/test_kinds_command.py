"""`qreward kinds`: what there is, where it comes from, and what cannot be used."""

from __future__ import annotations

import json

import pytest

import qreward_plugins

GOOD = '''
    from qreward_plugins.sources import VALUE, SourceKind

    class Coin(SourceKind):
        """Tosses a coin. Whoever asks
        twice gets two answers.
        """
        answers = (VALUE,)
        async def send(self, request, *, on_sent): ...

    class Lacking(SourceKind):
        """Cannot be asked."""
'''
OURS = f"qreward-plugins {qreward_plugins.__version__}"


@pytest.fixture
def packages(install):
    group = "qreward_plugins.sources"
    install("coin-kind", "coin_kind", GOOD, {group: {"coin": "coin_kind:Coin", "lacking": "coin_kind:Lacking"}})


def test_ours_can_be_used(run_cli):
    result = run_cli("kinds")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    kinds = [line.split()[0] for line in lines if OURS in line]
    assert kinds == ["openai", "reward_model", "http", "function", "replicas", "llm", "reward_model", "function", "sum"]
    assert "A Python function that scores" in result.stdout
    assert "kind: package.module:Class" in lines[-1]


def test_others_are_listed_with_their_package_and_their_problem(run_cli, packages):
    result = run_cli("kinds")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "coin coin-kind 1.2 Tosses a coin " in said
    assert "coin_kind:Lacking" in said
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_list_as_json(run_cli, packages):
    rows = {row["kind"]: row for row in json.loads(run_cli("kinds", "--json").stdout) if row["room"] == "sources"}
    assert set(rows) == {"openai", "reward_model", "http", "function", "replicas", "coin", "lacking"}
    assert rows["coin"] == {
        "room": "sources",
        "kind": "coin",
        "package": "coin-kind",
        "version": "1.2",
        "class": "coin_kind:Coin",
        "description": "Tosses a coin",
        "problem": "",
    }
    assert "lacks answers, send" in rows["lacking"]["problem"]


def test_a_name_that_is_registered_twice_is_listed_for_each_package(run_cli, install):
    install("second", "second_kind", "", {"qreward_plugins.sources": {"http": "second_kind:X"}})
    rows = [row for row in json.loads(run_cli("kinds", "--json").stdout) if row["kind"] == "http"]
    assert [row["package"] for row in rows] == ["qreward-plugins", "second"]
    assert all("several packages register" in row["problem"] for row in rows)
