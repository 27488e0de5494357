"""Judges on the trainer's devices: they take calls in reward phases only. Stand-ins for vLLM, in engines."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from pools import comes
from test_weights import said, samples, states, tree

from qreward_plugins import ConfigurationError, ReplicasNotChanged, ReplicasNotStarted, RewardEngine
from qreward_plugins.engine.reward_phases import RewardPhases

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def early_restarts(monkeypatch):
    monkeypatch.setattr("qreward_plugins.replicas.pool._BACKOFF_S", (0.05, 0.1))


def colocated(stand_ins, *options, **more):
    return tree(stand_ins, *options, colocated=True, **more)


@pytest.mark.parametrize("sleep_mode", [True, False])
async def test_servers_run_in_reward_phases_only(stand_ins, sleep_mode):
    async with RewardEngine(colocated(stand_ins, sleep_mode=sleep_mode)) as engine:
        assert engine.colocated == ("own",)
        await engine.end_rewards()
        assert stand_ins.living() == [], "nothing was started, so nothing sleeps"
        for step in range(2):
            await engine.begin_rewards()
            await engine.begin_rewards()
            assert states(engine) == ["up", "up"]
            said(await engine.score_all(samples(4, step=step)))
            await engine.end_rewards()
            await engine.end_rewards()
            assert states(engine) == ["asleep", "asleep"]
            assert len(stand_ins.living()) == (2 if sleep_mode else 0)
        # What comes meanwhile waits for the next phase, and its deadline goes on.
        waiting = asyncio.ensure_future(engine.score_all(samples(4), deadline_s=300))
        (late,) = await engine.score_all(samples(1), deadline_s=0.05)
        assert late.reason == "deadline"
        assert late.detail.endswith(" s: no source could take it in time; own: it sleeps")
        assert not waiting.done()
        assert states(engine) == ["asleep", "asleep"]
        await engine.begin_rewards()
        said(await waiting)
        assert engine.upstreams["own"].breaker.closed
    assert stand_ins.living() == []


async def test_the_end_waits_for_what_is_under_way(stand_ins):
    async with RewardEngine(colocated(stand_ins, "delay=0.05", sleep_mode=True, limits={"concurrency": 1})) as engine:
        await engine.begin_rewards()
        scoring = asyncio.ensure_future(engine.score_all(samples(4), deadline_s=300))
        await comes(lambda: engine.statistics().scored >= 1)
        await engine.end_rewards()
        assert states(engine) == ["asleep", "asleep"]
        assert engine.statistics().scored == 4
        said(await scoring)


async def test_the_end_waits_no_longer_once_another_process_has_ended_the_phase(stand_ins):
    config = colocated(stand_ins, "delay=0.05", sleep_mode=True, limits={"concurrency": 1})
    async with RewardEngine(config) as engine, RewardEngine(config) as other:
        await engine.begin_rewards()
        await other.begin_rewards()
        scoring = asyncio.ensure_future(other.score_all(samples(40), deadline_s=300))
        await comes(lambda: other.statistics().scored >= 1)
        await engine.end_rewards()
        await asyncio.wait_for(other.end_rewards(), 120)
        assert states(other) == ["asleep", "asleep"]
        assert not scoring.done()
        await other.begin_rewards()
        said(await scoring)


async def test_a_cancelled_sample_is_not_waited_for(stand_ins):
    async with RewardEngine(colocated(stand_ins, "delay=600", sleep_mode=True)) as engine:
        await engine.begin_rewards()
        scoring = asyncio.ensure_future(engine.score_all(samples(4), deadline_s=600))
        await comes(lambda: engine.statistics().submitted == 4)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        await asyncio.wait_for(engine.end_rewards(), 120)
        assert states(engine) == ["asleep", "asleep"]


async def test_servers_that_do_not_start_or_wake_are_errors(stand_ins):
    async with RewardEngine(colocated(stand_ins, "exit=3", "only=1")) as engine:
        with pytest.raises(ReplicasNotStarted, match="no memory for the weights"):
            await engine.begin_rewards()
    async with RewardEngine(colocated(stand_ins, sleep_mode=False)) as engine:
        await engine.begin_rewards()
        await engine.end_rewards()
        weights = stand_ins.weights("first") / "weights.bin"
        weights.rename(weights.with_name("gone"))
        with pytest.raises(ReplicasNotChanged, match="source 'own'"):
            await engine.begin_rewards()


@pytest.mark.parametrize("cancelled", [True, False])
async def test_the_end_waits_for_a_start_that_is_under_way(stand_ins, cancelled):
    async with RewardEngine(colocated(stand_ins, "ready_after=1", sleep_mode=True)) as engine:
        beginning = asyncio.ensure_future(engine.begin_rewards())
        await comes(stand_ins.living)
        if cancelled:
            beginning.cancel()
        await engine.end_rewards()
        assert states(engine) == ["asleep", "asleep"]
        assert (await asyncio.gather(beginning, return_exceptions=True) == [None]) is not cancelled
        await engine.begin_rewards()
        said(await engine.score_all(samples(2)))


async def test_other_sources_notice_nothing(stand_ins):
    async with RewardEngine(tree(stand_ins, sleep_mode=True)) as engine:
        assert engine.colocated == ()
        await engine.begin_rewards()
        await engine.settle_rewards()
        assert stand_ins.living() == []
        said(await engine.score_all(samples(2)))
        await engine.end_rewards()
        assert states(engine) == ["up", "up"]


async def test_no_reload_adds_or_removes_such_servers(stand_ins):
    hosted = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "judge"}
    own = colocated(stand_ins, sleep_mode=True)
    other = {**own, "sources": {"hosted": hosted}}
    async with RewardEngine(own) as engine:
        await engine.begin_rewards()
        # Its servers would end at some time after the phase.
        with pytest.raises(ConfigurationError, match=r"sources\.own: this change needs a restart"):
            await engine.reload(other)
        await engine.end_rewards()
        assert states(engine) == ["asleep", "asleep"]
    async with RewardEngine(other) as engine:
        # Its servers would start with the next sample, also while the trainer trains.
        with pytest.raises(ConfigurationError, match=r"sources\.own: this change needs a restart"):
            await engine.reload(own)
    async with RewardEngine(tree(stand_ins)) as engine:
        assert [change.effect for change in (await engine.reload(other)).changes] == ["drains", "at once"]


def test_ray_gives_no_devices_of_the_trainer(stand_ins):
    with pytest.raises(ConfigurationError, match="Ray gives the trainer's GPUs to nobody else"):
        RewardEngine(colocated(stand_ins, placement="ray"))


class Servers:
    """A source whose servers wake up in these states, and which notes what it is told."""

    colocated = begun = True
    asleep = False

    def __init__(self, *states, fails=""):
        self.replicas = [SimpleNamespace(state=state) for state in states]
        self.fails = fails
        self.told = []

    async def wake_up(self):
        self.told.append("wake_up")
        if self.fails:
            raise ReplicasNotChanged(self.fails, replicas=[0])

    async def sleep(self, **options):
        self.told.append(options)
        if self.fails:
            raise ReplicasNotChanged(self.fails, replicas=[0])


def phases_of(*sources):
    async def settled():
        await asyncio.sleep(0)

    return RewardPhases(lambda: [SimpleNamespace(source=source) for source in sources], settled)


async def test_one_replica_that_wakes_is_enough(caplog):
    some, none = Servers("down", "up", fails="replica 0: no memory"), Servers("down", fails="replica 0: no memory")
    await phases_of(some).begin()
    assert caplog.messages == ["replica 0: no memory; the other replicas take the calls"]
    with pytest.raises(ReplicasNotChanged, match="no memory"):
        await phases_of(none, some).begin()
    assert some.told == ["wake_up"] * 2, "the others were waited for"


async def test_servers_that_may_hold_their_devices_end_the_run():
    stuck, fine = Servers("up", fails="replica 0: it is lost"), Servers("up")
    with pytest.raises(ReplicasNotChanged, match="it is lost"):
        await phases_of(stuck, fine).end()
    assert fine.told == [{"within_s": 0.0}]
