"""Which way to a keeper `engine.shared` leads to, with and without Ray; and what the engine makes of it."""

from __future__ import annotations

import asyncio
import sys
import types

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.sharing import membership
from qreward_plugins.simulation import run
from qreward_plugins.system.ray_actors import ray_is_up
from tests.kit import make_config


@pytest.fixture(params=[True, False], ids=["ray_is_up", "without_ray"])
def up(request, monkeypatch):
    monkeypatch.setattr(membership, "ray_is_up", lambda: request.param)
    return request.param


def engine(shared, limits=None, **fields):
    return RewardEngine(
        make_config("a", limits={"a": limits or {"concurrency": 8}}, engine={"shared": shared}), **fields
    )


def is_shared(engine):
    return isinstance(engine.upstreams["a"].quota, SharedQuota)


@pytest.mark.parametrize("limits", [{"concurrency": 8}, {"requests_per_minute": 60}, {"tokens_per_minute": 6000}])
def test_auto_shares_wherever_ray_is_initialised_and_elsewhere_declared_rates(up, limits):
    assert is_shared(engine("auto", limits)) is (up or "concurrency" not in limits)
    # Whoever counts the processes may have them on several machines.
    assert is_shared(engine("auto", limits, processes=2)) is up


def a_function(**keys):
    function = {"kind": "function", "function": "operator:length_hint", "arguments": "sample"}
    return {"sources": {"a": {**function, **keys}}, "judges": {"j": {"kind": "function"}}}


def test_functions_without_limits_need_no_keeper(up):
    assert not is_shared(RewardEngine(a_function()))
    assert is_shared(RewardEngine(a_function(limits={"concurrency": 4}))) is up


def test_the_first_declared_rate_needs_a_restart_because_sharing_begins_with_it():
    async def main():
        made = engine("auto")
        with pytest.raises(ConfigurationError, match="first limit of all sources needs a restart"):
            await made.reload(engine("auto", {"requests_per_minute": 60}).config)
        await made.aclose()

    asyncio.run(main())


def test_a_reload_that_is_refused_starts_no_keeper(monkeypatch):
    started = []
    monkeypatch.setattr(membership, "ray_is_up", lambda: True)
    monkeypatch.setattr(membership, "start_ahead", lambda *keeper: started.append(keeper))

    async def main():
        async with RewardEngine(a_function()) as made:
            with pytest.raises(ConfigurationError, match="needs a restart"):
                await made.reload(a_function(limits={"concurrency": 4}))

    asyncio.run(main())
    assert started == []


def test_simulated_time_needs_no_keeper_of_the_machine():
    async def main():
        return is_shared(engine("auto", {"requests_per_minute": 60}))

    assert run(main()) is False


def test_what_is_called_ray_may_be_anything(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    assert ray_is_up() is False


def test_ray_shares_or_says_why_it_cannot(up):
    if up:
        assert is_shared(engine("ray"))
        return
    with pytest.raises(ConfigurationError, match=r"(?s)engine\.shared.*not initialised.*ray\.init\(\)"):
        engine("ray")


@pytest.mark.parametrize(("shared", "part"), [("local", 2), ("off", 8)])
def test_local_divides_the_limit_among_its_processes_and_off_gives_each_the_whole(up, shared, part):
    made = engine(shared, processes=4)
    assert not is_shared(made)
    assert made.upstreams["a"].quota.concurrency == part
