"""When slime aborts a rollout, pending rewards end at once, unless slime keeps their samples."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter


@pytest.fixture
def generation(monkeypatch):
    """slime's singleton with the flag, in the modules where slime keeps it."""

    class GenerateState:
        aborted = False

    state = GenerateState()
    rollout, misc = ModuleType("slime.rollout.sglang_rollout"), ModuleType("slime.utils.misc")
    rollout.GenerateState = GenerateState
    misc.SingletonMeta = SimpleNamespace(_instances={GenerateState: state})
    monkeypatch.setitem(sys.modules, rollout.__name__, rollout)
    monkeypatch.setitem(sys.modules, misc.__name__, misc)
    return state


async def pending(judge, args, samples, *, group=False):
    """The calls for these samples, all of them waiting at the judge."""

    async def one(sample):
        sample.reward = await slime_adapter.reward(args, sample)

    async def whole():
        for sample, reward in zip(samples, await slime_adapter.reward(args, samples), strict=True):
            sample.reward = reward

    calls = [asyncio.ensure_future(whole())] if group else [asyncio.ensure_future(one(sample)) for sample in samples]
    await asyncio.to_thread(judge.wait_for, lambda report: report.in_flight == len(samples))
    return calls


@pytest.mark.parametrize("group", [False, True])
def test_pending_rewards_end_while_the_judge_still_thinks(generation, judge, make_args, make_group, group):
    async def main():
        samples = make_group("2", "4", "6")
        calls = await pending(judge, make_args(), samples, group=group)
        generation.aborted = True
        await asyncio.gather(*calls)
        return samples, [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    judge.hold()
    samples, left = asyncio.run(main())
    assert left == []
    assert judge.wait_for(lambda report: report.in_flight == 0).abandoned == 3
    assert all(sample.remove_sample for sample in samples)
    assert [sample.reward for sample in samples] == [0.0] * 3
    assert {sample.metadata["qreward"]["cause"] for sample in samples} == {"infra/aborted"}
    (late,) = make_group("7", group=1)
    assert asyncio.run(slime_adapter.reward(make_args(), late)) == 0.0
    assert judge.report().requests == 3, "what is aborted already is not sent"
    judge.release()


def test_with_partial_rollout_a_pending_reward_is_waited_for(generation, judge, make_args, make_group):
    """slime keeps complete samples for a later rollout, and does not score them again."""

    async def main():
        samples = make_group("2", "4")
        calls = await pending(judge, make_args(partial_rollout=True), samples)
        generation.aborted = True
        judge.release()
        await asyncio.gather(*calls)
        return samples

    judge.hold()
    samples = asyncio.run(main())
    (late,) = make_group("7", group=1)
    late.reward = asyncio.run(slime_adapter.reward(make_args(partial_rollout=True), late))
    told = [(sample.reward, sample.remove_sample) for sample in (*samples, late)]
    assert told == [(0.2, False), (0.4, False), (0.7, False)]
