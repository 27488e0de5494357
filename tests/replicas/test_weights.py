"""Weights that are updated while replicas serve, and replicas that sleep: stand-ins for vLLM, in an engine; and changes
of a pool whose servers are stand-ins in this process, cancelled at every await, and one after the other.

A stand-in for vLLM names in each reply all weights that took part in it, so that a mixed reply is seen.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import aiohttp
import pytest

from qreward_plugins import EngineError, ReplicaChanged, ReplicasNotChanged, RewardEngine, WeightTransfer
from qreward_plugins.replicas import Pool, PoolSpec, Topology
from qreward_plugins.replicas.changes import Changes
from qreward_plugins.replicas.pool import ChangeFailed, Update
from qreward_plugins.replicas.server import LocalServer
from qreward_plugins.sources.replicas import Replicas
from tests.kit import comes, make_samples

from .conftest import Server, kill, replicas, said, states

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("early_restarts")]


async def asked(engine, count):
    """What the replicas say to so many samples."""
    return set(said(await engine.score_all(make_samples(count))))


def failures(engine):
    return sum(replica.failures for replica in engine.statistics().sources["own"].replicas)


async def under_load(engine, change):
    """Change something while samples are scored, before and after; return what they said and what the change gave."""
    running, outcomes = True, []

    async def load():
        number = 0
        while running:
            number += 1
            outcomes.extend(await engine.score_all(make_samples(8, step=number), deadline_s=30))

    loads = [asyncio.ensure_future(load()) for _ in range(2)]
    await comes(lambda: len(outcomes) >= 16)
    try:
        result = await change
    finally:
        running = False
        await asyncio.gather(*loads)
    return outcomes, result


@pytest.mark.parametrize("mode", ["rolling", "together"])
async def test_weights_are_updated_in_place_under_load(stand_ins, mode):
    async with RewardEngine(stand_ins.tree("delay=0.01")) as engine:
        update = engine.update_weights("own", path=stand_ins.weights("second"), version="step-1", mode=mode)
        outcomes, weights = await under_load(engine, update)
        assert weights.version == "step-1"
        assert set(said(outcomes)) == {"first", "second"}  # and no mixed one
        named = {"first": "", "second": "step-1"}
        assert all(outcome.verdict.weight_version == named[outcome.verdict.rationale] for outcome in outcomes)
        assert mode == "rolling" or await asked(engine, 8) == {"second"}
        assert states(engine) == ["up", "up"]
        assert engine.upstreams["own"].state(0.0) == "up"
        assert [replica.version for replica in engine.statistics().sources["own"].replicas] == ["step-1"] * 2
        assert failures(engine) == 0
        orders = [note.split()[1] for note in stand_ins.notes() if "own-0-" in note]
        for earlier, later in [("/pause?mode=wait", "/collective_rpc"), ("/collective_rpc", "/reset_prefix_cache")]:
            assert orders.index(earlier) < orders.index(later) < orders.index("/resume")
    assert stand_ins.living() == []


async def test_servers_that_are_started_again_with_other_weights(stand_ins):
    """The general way, which needs no route of the server."""
    async with RewardEngine(stand_ins.tree(weight_updates="restart")) as engine:
        update = engine.update_weights("own", path=stand_ins.weights("second"))
        outcomes, weights = await under_load(engine, update)
        assert set(said(outcomes)) == {"first", "second"}
        assert weights.version == weights.identity[:12]
        # Requests go on naming the model of the configuration.
        assert engine.upstreams["own"].source.model.endswith("weights-first")
    assert stand_ins.notes() == []


@pytest.mark.parametrize("mode", ["rolling", "together"])
async def test_an_update_that_fails_leaves_no_replica_half_new(stand_ins, mode):
    arguments = {"program": tuple(stand_ins.program()), "model": str(stand_ins.weights("first"))}
    spec = replace(stand_ins.spec(replicas=2, restarts=9, in_place=True), server="vllm", command=(), **arguments)
    pool = Pool(spec, lambda number: LocalServer(spec, number))
    changes = Changes(pool)
    await pool.start()
    now = "first"
    for fault in ("fail", "die", "stuck", "no-pause", "hang"):
        stand_ins.fault(fault)
        if fault == "hang":
            for server in pool.servers.values():
                server._spec = replace(spec, start_within_s=0.5)
        before = [state.restarts for state in pool.states]
        with pytest.raises(ChangeFailed) as caught:
            await changes.update(Update(fault, str(stand_ins.weights(fault)), mode=mode))
        (number,) = caught.value.replicas
        assert str(caught.value).startswith(f"replica {number}: ")
        # The first failure ends a rolling update. Of those that are updated together, the other one has it.
        now = now if mode == "rolling" else fault
        assert {await weights_of(state.url) for state in pool.states if state.state == "up"} == {now}
        await comes(lambda: [state.state for state in pool.states] == ["up", "up"])
        assert {await weights_of(state.url) for state in pool.states} == {now}
        assert pool.states[number].restarts == before[number] + 1
    await pool.stop()


async def weights_of(url):
    async with aiohttp.ClientSession() as session, session.post(f"{url}/weight_checker", json={}) as reply:
        return (await reply.json())["checksums"]["all"]


async def test_what_is_wrong_with_an_update_is_found_before_a_replica_is_touched(stand_ins, monkeypatch):
    # A shell sets it. It is no password, so the messages have whole paths.
    monkeypatch.setenv("PWD", str(stand_ins.folder))
    empty = stand_ins.folder / "empty"
    empty.mkdir()
    file = stand_ins.weights("second") / "weights.bin"
    async with RewardEngine(stand_ins.tree()) as engine:
        for path, why in [
            (empty, "holds no weights"),
            (stand_ins.folder / "none", "does not exist"),
            (file, f"is a file, and folders are loaded in place; name its folder, {file.parent}"),
        ]:
            with pytest.raises(ReplicasNotChanged, match=f"{path} {why}.*nothing was changed"):
                await engine.update_weights("own", path=path)
        assert stand_ins.notes() == []
        assert states(engine) == ["up", "up"]
        for wrong, why in [
            ({}, "update_weights"),
            ({"path": empty, "mode": "all"}, "mode"),
            ({"path": empty, "within_s": -1}, "within_s"),
            ({"path": empty, "version": "a\nb"}, "version is a printable text"),
            ({"transfer": WeightTransfer([])}, "receive of the WeightTransfer is empty"),
            ({"transfer": WeightTransfer("ab")}, "receive of a WeightTransfer is a list of mappings, not 'ab'"),
        ]:
            with pytest.raises(ValueError, match=why):
                await engine.update_weights("own", **{"version": "v", **wrong} if wrong else {})
        with pytest.raises(EngineError, match="such sources: own"):
            await engine.sleep(["own"])
        with pytest.raises(EngineError, match="'other' is no source of kind replicas; such sources: own"):
            await engine.update_weights("other", path=empty)


async def test_a_replica_that_is_started_again_has_the_weights_of_the_pool(stand_ins):
    second = stand_ins.weights("second")
    async with RewardEngine(stand_ins.tree(restarts=1)) as engine:
        await engine.update_weights("own", path=second, version="step-1")
        kill(stand_ins.living()[0])
        await comes(lambda: sum(each.restarts for each in replicas(engine)) == 1 and states(engine) == ["up", "up"])
        assert await asked(engine, 16) == {"second"}
        # The trainer writes the next checkpoint to the same place, and a replica dies before it is announced.
        (second / "weights.bin").write_text("third")
        kill(stand_ins.living()[0])
        await comes(lambda: "failed" in states(engine))
        assert await asked(engine, 16) == {"second"}
        await engine.update_weights("own", path=second, version="step-2")
        await comes(lambda: states(engine) == ["up", "up"])
        assert await asked(engine, 16) == {"third"}


@pytest.mark.parametrize("sleep_mode", [True, False])
async def test_servers_sleep_and_wake_under_load(stand_ins, sleep_mode):
    second = stand_ins.weights("second")
    config = stand_ins.tree("delay=0.01", sleep_mode=sleep_mode, limits={"concurrency": 4})
    async with RewardEngine(config) as engine:
        await engine.score_all(make_samples(2))
        scoring = asyncio.ensure_future(engine.score_all(make_samples(40), deadline_s=30))
        # Some are answered, and most not sent, whatever becomes of those under way.
        await comes(lambda: engine.statistics().scored > 4)
        await engine.sleep("own")
        await engine.sleep("own")
        assert states(engine) == ["asleep", "asleep"]
        assert len(stand_ins.living()) == (2 if sleep_mode else 0)
        assert engine.upstreams["own"].state(0.0) == "held"
        with pytest.raises(ReplicasNotChanged, match="wake them first"):
            await engine.update_weights("own", path=second)
        assert not scoring.done()
        if sleep_mode:
            kill(stand_ins.living()[0])
            await asyncio.sleep(0.2)
            assert len(stand_ins.living()) == 1  # its device belongs to somebody else
        await engine.wake_up("own")
        await engine.wake_up("own")
        assert states(engine) == ["up", "up"]
        assert set(said(await scoring)) == {"first"}
        assert engine.upstreams["own"].breaker.closed
        assert failures(engine) == 0
    assert stand_ins.living() == []


async def test_calls_that_do_not_end_in_time_are_sent_again(stand_ins):
    hold = stand_ins.folder / "hold"
    hold.touch()

    def questions():
        return sum(note.endswith("/ask") for note in stand_ins.notes())

    async with RewardEngine(stand_ins.tree(f"hold={hold}", "questions", sleep_mode=True)) as engine:
        scoring = asyncio.ensure_future(engine.score_all(make_samples(4), deadline_s=60))
        await comes(lambda: questions() == 4)
        await engine.sleep("own", within_s=0)
        hold.unlink()
        await engine.wake_up("own")
        assert said(await scoring) == ["first"] * 4
        assert (questions(), failures(engine)) == (8, 0)


async def test_weights_come_from_memory(stand_ins):
    received, failing = [], False

    async def send(numbers):
        received.append(numbers)
        if failing:
            raise RuntimeError("the trainer is out of memory")

    async def update(name, **how):
        joins = [{"rank_offset": number} for number in range(2)]
        transfer = WeightTransfer([{"weights": name}], begin=joins, send=send)
        return await engine.update_weights("own", transfer=transfer, version=name, **how)

    async with RewardEngine(stand_ins.tree(sleep_mode=True)) as engine:
        assert (await update("second", mode="together")).identity
        assert received == [[0, 1]]
        assert await asked(engine, 16) == {"second"}
        # One that is started again cannot have them.
        kill(stand_ins.living()[0])
        await comes(lambda: sorted(states(engine)) == ["stale", "up"])
        await engine.sleep("own")
        await engine.wake_up("own")
        assert sorted(states(engine)) == ["stale", "up"]
        assert await asked(engine, 16) == {"second"}
        failing = True
        with pytest.raises(RuntimeError, match="out of memory"):
            await update("third", mode="together")
        failing = False
        await comes(lambda: set(states(engine)) <= {"stale", "up"})
        await update("fourth")
        assert states(engine) == ["up", "up"]
        assert await asked(engine, 16) == {"fourth"}


async def test_the_journal_tells_weights_apart(stand_ins, tmp_path):
    journal, second = {"journal": {"path": str(tmp_path / "journal.db")}}, stand_ins.weights("second")
    async with RewardEngine(stand_ins.tree(engine=journal, data_parallel=1)) as engine:
        await engine.score_all(make_samples(4))
        # Equal weights are equal, whatever they are called; an answer of the journal names the version that gave it.
        for version in ("step-1", "step-2"):
            await engine.update_weights("own", path=second, version=version)
            outcomes = await engine.score_all(make_samples(4))
            assert set(said(outcomes)) == {"second"}
            assert {outcome.verdict.weight_version for outcome in outcomes} == {"step-1"}
            assert engine.upstreams["own"].requests == 8


async def test_every_change_is_an_event(stand_ins):
    seen = []

    def changes():
        return [(event.state, event.version) for event in seen if isinstance(event, ReplicaChanged)]

    async with RewardEngine(stand_ins.tree(data_parallel=1), observers=[seen.append]) as engine:
        await engine.score_all(make_samples(2))
        # With one replica, calls wait for the end of its update.
        update = engine.update_weights("own", path=stand_ins.weights("second"), version="v")
        assert set(said((await under_load(engine, update))[0])) == {"first", "second"}
        await comes(lambda: changes()[-1] == ("up", "v"))
        assert {"draining", "updating"} & {state for state, _ in changes()}


# Changes of a pool whose servers are stand-ins in this process


async def started(**settings):
    async def idle(state):
        await asyncio.sleep(0)

    spec = PoolSpec("own", "vllm", "first", Topology(2), restarts=99, **settings)
    pool = Pool(spec, partial(Server, spec), idle=idle)
    await pool.start()
    return pool, Changes(pool)


async def settled(pool):
    for _ in range(200):
        if {state.state for state in pool.states} <= {"up", "stale", "asleep"}:
            return
        await asyncio.sleep(0)
    raise AssertionError(pool.states)


async def test_a_user_that_hangs_keeps_no_pool_from_sleeping(monkeypatch):
    """First it may end its calls, then it is told to cancel them, and then it is not waited for."""
    monkeypatch.setattr("qreward_plugins.replicas.pool._ABORTED_S", 0.0)
    seen = []

    async def never(state):
        await asyncio.sleep(3600)

    spec = PoolSpec("own", "vllm", "first", Topology(1))
    pool = Pool(spec, partial(Server, spec), lambda: seen.append(pool.states[0]), idle=never)
    await pool.start()
    await Changes(pool).sleep(within_s=0.01)
    shown = [(state.state, state.abort) for state in seen]
    assert shown[1:] == [("draining", False), ("draining", True), ("asleep", True)]
    await pool.stop()


def loaded(path, **more):
    return Update(path, path, **more)


async def asleep_and_awake(changes):
    await changes.sleep()
    await changes.wake()


CHANGES = {
    "rolling": lambda changes: changes.update(loaded("a")),
    "together": lambda changes: changes.update(loaded("a", mode="together")),
    "sleep": lambda changes: changes.sleep(),
    "wake": asleep_and_awake,
}
FROM_MEMORY = {
    "memory": lambda changes: changes.update(Update("a", receive=({},))),
    "memory together": lambda changes: changes.update(Update("a", mode="together", receive=({},))),
}


@pytest.mark.parametrize(
    ("change", "in_place"),
    [
        *(pytest.param(change, True, id=name) for name, change in {**CHANGES, **FROM_MEMORY}.items()),
        *(pytest.param(change, False, id=f"{name} by restarts") for name, change in CHANGES.items()),
    ],
)
async def test_a_change_that_is_cancelled_anywhere_leaves_a_pool_that_works(change, in_place):
    at = 0
    while True:
        before = asyncio.all_tasks()
        pool, changes = await started(in_place=in_place, sleep_mode=in_place)
        task = asyncio.ensure_future(change(changes))
        for _ in range(at):
            await asyncio.sleep(0)
        is_over = task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await changes.wake()
        await settled(pool)
        # No replica that takes calls has other weights than it says, is half new, paused, or without supervision.
        for state in pool.states:
            server = pool.servers[state.number]
            if state.state == "up":
                had = pool.has[state.number]
                assert (server.has, server.paused) == (had.path or had.version, False), at
            server.stopped.set()
        for _ in range(20):
            await asyncio.sleep(0)
        await settled(pool)
        assert all(not pool.servers[state.number].stopped.is_set() for state in pool.states), at
        await changes.update(loaded("last"))
        assert [(state.state, state.version) for state in pool.states] == [("up", "last")] * 2, at
        assert {server.has for server in pool.servers.values()} == {"last"}
        await pool.stop()
        assert asyncio.all_tasks() == before
        if is_over:
            break
        at += 1
    assert at > 5


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tasks do not count who cancels them")
@pytest.mark.parametrize("cancelled", [True, False])
async def test_a_call_that_is_aborted_and_cancelled_at_once_is_cancelled(cancelled):
    asked = Replicas(["http://a"])
    asked.gate = SimpleNamespace(look=lambda: None, enter=lambda url: True, leave=lambda url: None)

    async def call():
        with asked.acquire(0.0) as lease:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                return lease.end_abort()

    task = asyncio.ensure_future(call())
    await asyncio.sleep(0)
    asked.abort(asked.all[0])
    if cancelled:
        task.cancel()
    assert await task is not cancelled


@pytest.mark.parametrize("mode", ["rolling", "together"])
async def test_a_replica_that_is_started_again_during_an_update_gets_the_new_weights(mode):
    for steps in range(25):
        pool, changes = await started(in_place=True)
        pool.servers[1].stopped.set()
        for _ in range(steps):
            await asyncio.sleep(0)
        with suppress(ChangeFailed):  # it may have been up still
            await changes.update(loaded("a", mode=mode))
        await settled(pool)
        assert [(state.state, state.version) for state in pool.states] == [("up", "a")] * 2, steps
        await pool.stop()
