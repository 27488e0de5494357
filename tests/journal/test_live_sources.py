"""A run that goes on: how its sources are, and one that is held by hand, here or from another process."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.errors import EngineError, InputError
from qreward_plugins.journal import writer
from qreward_plugins.journal.live_sources import STALE_S, hold_source, live_sources
from qreward_plugins.testing import JudgeServer

from ..kit import make_config, make_samples, wait_until

pytestmark = pytest.mark.anyio


def of(path, name):
    """A source of the run that is first by its id."""
    return next((each for each in live_sources([str(path)], time.time()) if each.name == name), None)


def states(path, name):
    return {each.state for each in live_sources([str(path)], time.time()) if each.name == name}


async def until(found):
    """Wait until `found` returns something, while the engines of this loop go on."""
    await asyncio.to_thread(wait_until, found)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.02)


@pytest.fixture
def two_sources(tmp_path):
    """The configuration of a run over two judge servers, its journal, and the servers."""
    path = tmp_path / "verdicts.sqlite"
    with JudgeServer(lambda call: 1.0) as a, JudgeServer(lambda call: 1.0) as b:
        limits = {"a": {"concurrency": 4, "requests_per_minute": 6000}}
        tree = make_config({"a": a, "b": b}, limits=limits, engine={"journal": {"path": str(path), "reuse": False}})
        yield tree, path, {"a": a, "b": b}


async def test_engines_of_one_process_and_run_are_added_up(two_sources, quick, monkeypatch):
    monkeypatch.setenv("QREWARD_RUN_ID", "run")
    tree, path, _ = two_sources

    async with RewardEngine(tree) as engine, RewardEngine(tree) as other:
        await engine.score_all(make_samples(8))
        await other.score_all(make_samples(8))
        await until(lambda: sum(each.answered for each in live_sources([str(path)], time.time())) == 16)


async def test_a_source_that_is_held_from_outside_gets_no_calls_until_it_is_released(two_sources, quick):
    tree, path, servers = two_sources

    def arrived():
        return {name: server.report().requests for name, server in servers.items()}

    async with RewardEngine(tree) as engine, RewardEngine(tree) as other:
        await engine.score_all(make_samples(8))
        await other.score_all(make_samples(8))
        # Each engine is a run, and only runs that are under way are held. What they write is up to a second old.
        await until(
            lambda: [each.in_flight + each.waiting for each in live_sources([str(path)], time.time())] == [0] * 4
        )
        assert (of(path, "a").state, of(path, "a").held) == ("up", False)
        hold_source([str(path)], "a", time.time(), held=True)
        await until(lambda: states(path, "a") == {"held"})
        assert engine.statistics().sources["a"].state == "held"
        assert "by hand" in of(path, "a").problem
        changed = json.loads(json.dumps(tree))
        changed["sources"]["a"]["parameters"] = {"top_p": 0.5}
        await engine.reload(changed)
        before = arrived()
        await engine.score_all(make_samples(8))
        assert arrived() == {"a": before["a"], "b": before["b"] + 8}
        hold_source([str(path)], "a", time.time(), held=False)
        await until(lambda: states(path, "a") == {"up"})
        hold_source([str(path)], "b", time.time(), held=True)
        await until(lambda: states(path, "b") == {"held"})
        await engine.score_all(make_samples(8))
        assert arrived()["a"] == before["a"] + 8


async def test_what_is_seen_is_the_sum_of_the_processes_and_only_of_those_under_way(two_sources, quick, monkeypatch):
    tree, path, _ = two_sources
    monkeypatch.setenv("QREWARD_RUN_ID", "job")

    async with RewardEngine(tree) as engine:
        await engine.score_all(make_samples(6))
        await until(lambda: (seen := of(path, "a")) and of(path, "b") and seen.requests + of(path, "b").requests == 6)
    a = of(path, "a")
    assert (a.run_id, a.processes, a.concurrency, a.learned) == ("job", 1, 4, "")
    assert a.requests_per_minute == pytest.approx(6000, rel=0.01)
    assert of(path, "b").requests_per_minute == float("inf")
    assert live_sources([str(path)], time.time() + STALE_S + 5) == []


async def test_where_nothing_can_be_held_it_is_said_why(two_sources, quick):
    tree, path, _ = two_sources

    async with RewardEngine(tree) as engine:
        await engine.score(make_samples(1)[0])
        await until(lambda: of(path, "a"))
        with pytest.raises(InputError, match=r"the run has no source 'c'; sources: a, b"):
            hold_source([str(path)], "c", time.time(), held=True)
        with pytest.raises(EngineError, match="unknown source 'c'"):
            engine.hold("c")
    with pytest.raises(InputError, match="no run is under way that writes to"):
        hold_source([str(path)], "a", time.time() + STALE_S + 5, held=True)
