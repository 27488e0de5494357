"""What a run is, how its sources are while it goes on, and sources that are held by hand."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace

import pytest

from qreward_plugins import RewardEngine
from qreward_plugins.journal import writer
from qreward_plugins.journal.journal import VARIABLE, current_run
from qreward_plugins.journal.live_sources import STALE_S, hold_source, live_sources
from qreward_plugins.testing import JudgeServer

from ..kit import Program, comes, make_config, make_samples

LAUNCHER = """
import os
from qreward_plugins.journal.journal import current_run
for _ in range(2):
    if not os.fork():
        print(current_run(), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(autouse=True)
def nothing_is_shared(monkeypatch):
    for name in (VARIABLE, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def test_the_environment_names_a_run_and_without_anything_shared_each_call_is_one(monkeypatch):
    found = {current_run() for _ in range(3)}
    assert [len(run) for run in found] == [8] * 3
    monkeypatch.setenv(VARIABLE, " job-7 ")
    assert current_run() == "job-7"
    monkeypatch.setenv(VARIABLE, " ")
    assert current_run() != current_run()


def test_a_job_of_ray_is_a_run_and_the_first_job_of_another_cluster_is_another(monkeypatch):
    found = []
    for session, number in (("a", "01"), ("a", "01"), ("a", "02"), ("b", "01")):
        told = {"get_session_name": session, "get_job_id": number}
        context = SimpleNamespace(**{name: lambda said=said: said for name, said in told.items()})
        ray = SimpleNamespace(is_initialized=lambda: True, get_runtime_context=lambda context=context: context)
        monkeypatch.setitem(sys.modules, "ray", ray)
        found.append(current_run())
    assert found[0] == found[1]
    assert len(set(found)) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_workers_of_one_launcher_are_a_run_until_it_starts_them_again(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with Program("-c", LAUNCHER) as launcher:
        one, same = launcher.end(0)[1].split()
    here = current_run()  # of another launcher
    assert one == same != here == current_run()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert current_run() != here


pytestmark = pytest.mark.anyio


def seen(path, *names):
    """The sources of these names, or all, of the runs that are under way."""
    return [each for each in live_sources([str(path)], time.time()) if not names or each.name in names]


@pytest.fixture
def two_sources(tmp_path, monkeypatch):
    """The configuration of a run over two judge servers, its journal, and the servers."""
    monkeypatch.setattr(writer, "LOOK_EVERY_S", 0.02)
    path = tmp_path / "verdicts.sqlite"
    with JudgeServer(lambda call: 1.0) as a, JudgeServer(lambda call: 1.0) as b:
        limits = {"a": {"concurrency": 4, "requests_per_minute": 6000}}
        tree = make_config({"a": a, "b": b}, limits=limits, engine={"journal": {"path": str(path), "reuse": False}})
        yield tree, path, {"a": a, "b": b}


async def test_a_source_that_is_held_from_outside_gets_no_calls_until_it_is_released(two_sources):
    tree, path, servers = two_sources

    def arrived():
        return {name: server.report().requests for name, server in servers.items()}

    async with RewardEngine(tree) as engine, RewardEngine(tree) as other:
        await engine.score_all(make_samples(8))
        await other.score_all(make_samples(8))
        # Each engine is a run, and only runs that are under way are held. What they write is up to a second old.
        await comes(lambda: [each.in_flight + each.waiting for each in seen(path)] == [0] * 4)
        assert (seen(path, "a")[0].state, seen(path, "a")[0].held) == ("up", False)
        hold_source([str(path)], "a", time.time(), held=True)
        await comes(lambda: {each.state for each in seen(path, "a")} == {"held"})
        assert engine.statistics().sources["a"].state == "held"
        assert "by hand" in seen(path, "a")[0].problem
        before = arrived()
        await engine.score_all(make_samples(8))
        assert arrived() == {"a": before["a"], "b": before["b"] + 8}
        hold_source([str(path)], "a", time.time(), held=False)
        await comes(lambda: {each.state for each in seen(path, "a")} == {"up"})


async def test_what_is_seen_is_the_sum_of_the_engines_of_a_run_under_way(two_sources, monkeypatch):
    tree, path, _ = two_sources
    monkeypatch.setenv("QREWARD_RUN_ID", "job")

    def answered():
        return sum(each.answered for each in seen(path))

    async with RewardEngine(tree) as engine:
        await engine.score_all(make_samples(8))
        await comes(lambda: answered() == 8 and seen(path, "b"))
    (a,), (b,) = seen(path, "a"), seen(path, "b")
    assert (a.run_id, a.processes, a.concurrency, a.learned) == ("job", 1, 4, "")
    assert a.requests_per_minute == pytest.approx(6000, rel=0.01)
    assert b.requests_per_minute == float("inf")
    async with RewardEngine(tree) as other:
        await other.score_all(make_samples(8))
        await comes(lambda: answered() == 16)
    assert live_sources([str(path)], time.time() + STALE_S + 5) == []
