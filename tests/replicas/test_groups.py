"""`affinity: group`: one version of the weights judges a group, also while they are updated."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from pools import comes
from test_weights import said, states, tree

from qreward_plugins import ReplicasNotChanged, RewardEngine, Sample
from qreward_plugins.replicas.gate import Gate
from qreward_plugins.replicas.group_weights import GroupWeights
from qreward_plugins.replicas.replica_state import ReplicaState

pytestmark = pytest.mark.anyio

UP = (ReplicaState(0, "up", "a"), ReplicaState(1, "up", "b"))
FIRST_DRAINS = (replace(UP[0], state="draining", ticket=1), UP[1])
FIRST_IS_NEW = (replace(UP[0], ticket=1, version="v", identity="1f"), UP[1])
LAST_DRAINS = (FIRST_IS_NEW[0], replace(UP[1], state="draining", ticket=1, last=True))


def gate_with(*groups: str) -> Gate:
    """A gate where a sample of each of these groups is under way, whose call ended at the replica `b`."""
    gate = Gate(GroupWeights("own"))
    gate.take(UP)
    for group in groups:
        gate.submitted(group)
        assert gate.enter("b", group)
        gate.leave("b")
    return gate


def test_the_last_replica_drains_when_no_sample_of_its_groups_is_under_way() -> None:
    gate = gate_with("g", "h")
    gate.submitted("g")
    gate.submitted("new")
    assert gate.take(FIRST_DRAINS) == [(0, 1)]  # the other one goes on with its groups
    assert gate.take(FIRST_IS_NEW) == []
    assert gate.take(LAST_DRAINS) == []
    assert gate.enter("b", "g")
    assert not gate.enter("b", "new")
    assert not gate.enter("b", "")
    assert gate.enter("a", "new")
    assert gate.ended("h") == []
    assert gate.ended("g") == []
    assert gate.ended("g") == []  # a call is still under way, of a hedge for example
    # As long as the replica drains, a later sibling finds it.
    gate.submitted("h")
    assert gate.leave("b") == []
    assert gate.enter("b", "h")
    assert gate.leave("b") == []
    assert gate.ended("h") == [(1, 1)]
    # The word is given: nothing enters any more.
    gate.submitted("h")
    assert not gate.enter("b", "h")
    assert gate.take(LAST_DRAINS) == [(1, 1)]
    # The update was given up: all may enter again.
    assert gate.take(FIRST_IS_NEW) == []
    assert gate.enter("b", "new")


def test_groups_of_equal_weights_that_begin_later_are_not_awaited() -> None:
    gate = gate_with("g")
    equal = replace(UP[0], ticket=1)
    gate.take((equal, replace(UP[1], state="draining", ticket=1, last=True)))
    gate.submitted("later")
    assert gate.enter("a", "later")
    assert not gate.enter("b", "later")
    assert gate.ended("g") == [(1, 1)]


def test_all_replicas_that_drain_together_wait_for_all_groups() -> None:
    gate = gate_with("g", "h")
    assert gate.take([replace(state, state="draining", ticket=3, last=True) for state in UP]) == []
    assert gate.awaits_groups()
    assert gate.may_begin("g")
    assert not gate.may_begin("new")
    assert gate.ended("g") == []
    assert gate.ended("h") == [(0, 3), (1, 3)]
    assert not gate.awaits_groups()
    assert gate.may_begin("g") is False
    # Their event loop was closed: nobody will end these samples.
    gate = gate_with("g")
    gate.restart()
    assert gate.take([replace(UP[1], state="draining", ticket=3, last=True)]) == [(1, 3)]


async def test_every_group_is_judged_by_one_version(stand_ins):
    limits = {"concurrency": 4}
    judges = {
        "quality": {"kind": "sum", "weights": {"one": 1, "two": 1}},
        "one": {"kind": "llm", "score_range": [0, 10], "max_tokens": 64},
        "two": {"kind": "llm", "score_range": [0, 10], "max_tokens": 64, "instructions": "Another one."},
    }
    config = {**tree(stand_ins, "delay=0.02", affinity="group", limits=limits), "judges": judges}
    config["routes"] = {"*": "quality"}
    versions = defaultdict(set)
    running, steps = True, 0

    async def load(engine):
        nonlocal steps
        while running:
            steps += 1
            step = steps
            group = [
                Sample([{"role": "user", "content": f"Why {step}?"}], f"{n}", id=str(n), group_id="g", step=step)
                for n in range(6)
            ]
            outcomes = await engine.score_all(group, deadline_s=30)
            versions[step] |= {line.split(": ")[1] for text in said(outcomes) for line in text.splitlines()}

    async with RewardEngine(config) as engine:
        loads = [asyncio.ensure_future(load(engine)) for _ in range(3)]
        await comes(lambda: len(versions) >= 2)
        for number, mode in enumerate(("rolling", "together")):
            version = f"step-{number}"
            await engine.update_weights("own", path=stand_ins.weights(version), version=version, mode=mode)
            assert states(engine) == ["up", "up"]
            before = len(versions)
            await comes(lambda before=before: len(versions) >= before + 4)
        running = False
        await asyncio.gather(*loads)
        assert [group for group, of in versions.items() if len(of) > 1] == []
        assert set().union(*versions.values()) == {"first", "step-0", "step-1"}
        assert engine.statistics().sources["own"].mixed_groups == 0


def one(group, text="Because."):
    return Sample([{"role": "user", "content": f"Why {group}?"}], text, group_id=group)


def words_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


async def test_an_update_waits_for_groups_and_calls_of_other_groups_for_the_update(stand_ins, caplog):
    caplog.set_level(logging.WARNING)
    async with RewardEngine(tree(stand_ins, affinity="group")) as engine:
        source = engine.upstreams["own"].source

        async def answer(group):
            return said([await engine.score(one(group), deadline_s=20)])[0]

        async def drains():
            await comes(lambda: any(state.last and state.state == "draining" for state in source.replicas))

        assert await answer("g") == "first"
        # Of this sample nothing is asked: it waits, or its judge does something else.
        source.submitted(one("g"))
        why = r"the groups .* did not end within 0.5 s; .* earlier weights"
        with pytest.raises(ReplicasNotChanged, match=why) as no:
            await engine.update_weights("own", path=stand_ins.weights("second"), version="v", within_s=0.5)
        assert len(no.value.replicas) == 1
        assert states(engine) == ["up", "up"]
        assert {state.version for state in source.replicas} == {"", "v"}
        assert [await answer("g") for _ in range(3)] == ["first"] * 3
        update = asyncio.ensure_future(engine.update_weights("own", path=stand_ins.weights("second"), version="v"))
        await drains()
        assert [await answer(group) for group in ("new", "g", "newer", "g")] == ["second", "first", "second", "first"]
        assert not update.done()
        source.ended(one("g"))
        await update
        # Its siblings had ended, and the weights are gone.
        assert await answer("g") == "second"
        assert engine.statistics().sources["own"].mixed_groups == 1
        assert caplog.text.count("was judged by two versions") == 1

        source.submitted(one("new"))
        update = asyncio.ensure_future(
            engine.update_weights("own", path=stand_ins.weights("third"), version="w", mode="together", drain="abort")
        )
        await drains()
        waiting = asyncio.ensure_future(answer("newest"))
        assert [await answer("new") for _ in range(3)] == ["second"] * 3
        late = await engine.score(one("later"), deadline_s=0.05)
        assert late.failure is not None
        assert late.failure.reason == "deadline"
        assert not waiting.done()
        assert not update.done()
        source.ended(one("new"))
        await update
        assert await waiting == "third"
        assert {upstream.requests for upstream in engine.upstreams.values()} == {13}

        # A server that dies is awaited by nobody. Its group goes on where there is a server.
        source.submitted(one("newest"))
        update = asyncio.ensure_future(engine.update_weights("own", path=stand_ins.weights("fourth"), version="x"))
        await drains()
        (port,) = [state.url.rpartition(":")[2] for state in source.replicas if state.state == "draining"]
        (last,) = [pid for pid in stand_ins.living() if port in words_of(pid)]
        os.kill(last, signal.SIGKILL)
        with pytest.raises(ReplicasNotChanged, match="the others serve version x, and it is started again"):
            await update
        assert await answer("newest") == "fourth"
        await comes(lambda: {(state.state, state.version) for state in source.replicas} == {("up", "x")})
