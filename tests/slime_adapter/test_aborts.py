"""When slime aborts a rollout, pending rewards end at once and nothing is lost that slime keeps."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins.testing import slime_stand_in


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


@pytest.fixture
def abort(judge, generation, make_group):
    """Abort the rollout of these samples while they are judged; `verdicts` waits for their verdicts."""

    def aborting(args, samples, *, group=False):
        async def main():
            calls = await pending(judge, args, samples, group=group)
            generation.aborted = True
            await asyncio.gather(*calls)

        judge.hold()
        asyncio.run(main())
        generation.aborted = False
        assert [(sample.reward, sample.remove_sample) for sample in samples] == [(0.0, True)] * len(samples)

    def verdicts(args, count):
        judge.release()
        judge.wait_for(lambda report: report.answered == count)
        # The engine works in order: what was answered before this is in by now.
        asyncio.run(slime_adapter.reward(args, make_group("6", group=99)[0]))

    return SimpleNamespace(of=aborting, verdicts=verdicts)


@slime_stand_in()
def filtered(args, samples):
    return slime_adapter.drop_failed_groups(args, samples)


@pytest.mark.parametrize(("hook", "group"), [(slime_adapter.post_process, True), (filtered, False)])
def test_with_partial_rollout_a_verdict_that_comes_before_a_hook_counts(abort, make_args, make_group, hook, group):
    """slime keeps complete samples and does not score them again."""
    args, samples = make_args(partial_rollout=True, n_samples_per_prompt=2), make_group("2", "4")
    abort.of(args, samples, group=group)
    abort.verdicts(args, 2)
    hook(args, samples)
    assert [(sample.reward, sample.remove_sample) for sample in samples] == [(0.2, False), (0.4, False)]


def test_one_that_comes_later_does_not(abort, make_args, make_group):
    args, samples = make_args(partial_rollout=True), make_group("2", "4")
    abort.of(args, samples)
    slime_adapter.post_process(args, samples)
    abort.verdicts(args, 2)
    slime_adapter.post_process(args, samples)
    assert [(sample.reward, sample.remove_sample) for sample in samples] == [(0.0, True)] * 2


def test_whoever_asks_again_wants_the_newer_verdict(abort, make_args, make_group):
    args, (sample,) = make_args(partial_rollout=True), make_group("2")
    abort.of(args, [sample])
    abort.verdicts(args, 1)
    sample.response = "8"
    sample.reward = asyncio.run(slime_adapter.reward(args, sample))
    slime_adapter.post_process(args, [sample])
    assert (sample.reward, sample.remove_sample) == (0.8, False)


def test_a_sample_that_was_asked_for_after_the_abort_is_judged(abort, generation, make_args, make_group):
    generation.aborted = True
    args, (sample,) = make_args(partial_rollout=True), make_group("7")
    sample.reward = asyncio.run(slime_adapter.reward(args, sample))
    assert sample.reward == 0.0, "the stand-in, whether the verdict is in by now or not"
    generation.aborted = False
    abort.verdicts(args, 1)
    slime_adapter.post_process(args, [sample])
    assert (sample.reward, sample.remove_sample) == (0.7, False)
