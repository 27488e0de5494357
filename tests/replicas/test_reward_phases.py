"""Judges on the trainer's devices: they take calls in reward phases only. Stand-ins for vLLM, in engines."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from tests.kit import comes, make_samples

from .pools import said, states

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def early_restarts(monkeypatch):
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.05, 0.1))


@pytest.fixture
def colocated(stand_ins):
    def colocated(*options, **more):
        return stand_ins.tree(*options, **{"colocated": True, "sleep_mode": True, **more})

    return colocated


def is_asleep(engine):
    return states(engine) == ["asleep", "asleep"]


@pytest.mark.parametrize("sleep_mode", [True, False])
async def test_servers_run_in_reward_phases_only(colocated, stand_ins, sleep_mode):
    async with RewardEngine(colocated(sleep_mode=sleep_mode)) as engine:
        assert engine.colocated == ("own",)
        await engine.end_rewards()
        assert stand_ins.living() == [], "nothing was started, so nothing sleeps"
        for step in range(2):
            await engine.begin_rewards()
            await engine.begin_rewards()
            assert states(engine) == ["up", "up"]
            said(await engine.score_all(make_samples(4, step=step)))
            await engine.end_rewards()
            await engine.end_rewards()
            assert is_asleep(engine)
            assert len(stand_ins.living()) == (2 if sleep_mode else 0)
        # What comes meanwhile waits for the next phase, and its deadline goes on.
        waiting = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        (late,) = await engine.score_all(make_samples(1), deadline_s=0.05)
        assert late.reason == "deadline"
        assert late.detail.endswith(" s: no source could take it in time; own: it sleeps")
        assert not waiting.done()
        assert is_asleep(engine)
        await engine.begin_rewards()
        said(await waiting)
        assert engine.upstreams["own"].breaker.closed
    assert stand_ins.living() == []


async def test_the_end_waits_for_what_is_under_way_but_no_longer_once_another_process_has_ended_the_phase(colocated):
    config = colocated("delay=0.05", limits={"concurrency": 1})
    async with RewardEngine(config) as engine, RewardEngine(config) as other:
        await engine.begin_rewards()
        scoring = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        await comes(lambda: engine.statistics().scored >= 1)
        await engine.end_rewards()
        assert is_asleep(engine)
        assert engine.statistics().scored == 4
        said(await scoring)
        await engine.begin_rewards()
        await other.begin_rewards()
        scoring = asyncio.ensure_future(other.score_all(make_samples(40), deadline_s=300))
        await comes(lambda: other.statistics().scored >= 1)
        await engine.end_rewards()
        await asyncio.wait_for(other.end_rewards(), 120)
        assert is_asleep(other)
        assert not scoring.done()
        await other.begin_rewards()
        said(await scoring)


async def test_the_end_waits_for_samples_that_wait_until_the_servers_have_started(colocated):
    async with RewardEngine(colocated()) as engine:
        scoring = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=300))
        await comes(lambda: {"starting", "up"} & set(states(engine)))
        await engine.end_rewards()
        assert is_asleep(engine)
        assert engine.statistics().scored == 4
        said(await asyncio.wait_for(scoring, 120))


async def test_no_reload_adds_or_removes_such_servers(colocated, stand_ins):
    own = colocated()
    other = {**own, "sources": {"hosted": {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}}}
    # Its servers would end at some time after the phase, or start with the next sample, while the trainer trains.
    for before, after in ((own, other), (other, own)):
        async with RewardEngine(before) as engine:
            await engine.begin_rewards()
            with pytest.raises(ConfigurationError, match=r"sources\.own: this change needs a restart"):
                await engine.reload(after)
    async with RewardEngine(stand_ins.tree()) as engine:
        assert [change.restart for change in (await engine.reload(other)).changes] == [False, False]
