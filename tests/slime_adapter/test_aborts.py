"""When slime aborts a rollout, pending rewards end at once and nothing is lost that slime keeps."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from slime_adapter.aborts import aborted


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

    before = judge.report().in_flight
    calls = [asyncio.ensure_future(whole())] if group else [asyncio.ensure_future(one(sample)) for sample in samples]
    await asyncio.to_thread(judge.wait_for, lambda report: report.in_flight == before + len(samples))
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
    judge.release()


def test_what_is_aborted_already_is_not_sent(generation, judge, make_args, make_group):
    generation.aborted = True
    (sample,) = make_group("7")
    assert asyncio.run(slime_adapter.reward(make_args(), sample)) == 0.0
    assert sample.remove_sample
    assert judge.report().requests == 0


def test_a_rollout_function_of_ones_own_can_tell(judge, make_args, make_group):
    told = []

    async def main():
        args = make_args(qreward_aborted=lambda: bool(told))
        (sample,) = make_group("7")
        (call,) = await pending(judge, args, [sample])
        told.append(True)
        await call
        return sample

    judge.hold()
    assert asyncio.run(main()).remove_sample
    judge.release()


def test_without_slime_nothing_is_aborted():
    assert not aborted(SimpleNamespace())


class TestPartialRollout:
    """slime keeps the samples and does not score complete ones again."""

    def abort(self, judge, args, samples, generation):
        async def main():
            calls = await pending(judge, args, samples)
            generation.aborted = True
            await asyncio.gather(*calls)

        judge.hold()
        asyncio.run(main())
        generation.aborted = False

    def test_a_verdict_that_comes_later_is_written_into_its_sample(self, generation, judge, make_args, make_group):
        args, samples = make_args(partial_rollout=True), make_group("2", "4")
        self.abort(judge, args, samples, generation)
        assert [(sample.reward, sample.remove_sample) for sample in samples] == [(0.0, True)] * 2
        judge.release()
        slime_adapter.close()  # waits for the engine's thread, which writes
        # Closing may overtake an answer on its way: each sample has its verdict, or stays as it was.
        for sample, reward in zip(samples, (0.2, 0.4), strict=True):
            assert (sample.reward, sample.remove_sample) in ((reward, False), (0.0, True))

    def test_it_counts_when_it_came_in_time(self, generation, judge, make_args, make_group):
        args, samples = make_args(partial_rollout=True), make_group("2", "4", "6", "8")
        self.abort(judge, args, samples[:2], generation)
        judge.release()
        judge.wait_for(lambda report: report.answered == 2)
        for sample in samples[2:]:
            sample.reward = asyncio.run(slime_adapter.reward(args, sample))
        # The engine's thread works in order: what was answered first is written by now.
        raw, _ = slime_adapter.post_process(args, samples)
        assert raw == pytest.approx([0.2, 0.4, 0.6, 0.8])
        assert not any(sample.remove_sample for sample in samples)

    def test_it_gives_back_the_loss_mask_that_a_failure_took(self, generation, judge, make_args, make_group):
        args = make_args(partial_rollout=True, advantage_estimator="reinforce_plus_plus")
        (sample,) = make_group("2", loss_mask=[1, 0, 1])
        self.abort(judge, args, [sample], generation)
        assert sample.loss_mask == [0, 0, 1]
        judge.release()
        judge.wait_for(lambda report: report.answered == 1)
        asyncio.run(slime_adapter.reward(args, make_group("6", group=1)[0]))
        assert (sample.reward, sample.remove_sample, sample.loss_mask) == (0.2, False, [1, 0, 1])

    def test_it_leaves_the_mask_that_slime_has_set_since(self, generation, judge, make_args, make_group):
        args = make_args(partial_rollout=True, advantage_estimator="reinforce_plus_plus")
        (sample,) = make_group("2", loss_mask=[1, 1, 1])
        self.abort(judge, args, [sample], generation)
        sample.loss_mask = [0, 0, 0]
        judge.release()
        judge.wait_for(lambda report: report.answered == 1)
        asyncio.run(slime_adapter.reward(args, make_group("6", group=1)[0]))
        assert (sample.reward, sample.remove_sample, sample.loss_mask) == (0.2, False, [0, 0, 0])

    def test_a_sample_whose_rollout_was_over_before_it_was_asked_for_is_judged(
        self, generation, judge, make_args, make_group
    ):
        """slime trains it in a later rollout and never asks again."""
        generation.aborted = True
        args, (sample,) = make_args(partial_rollout=True), make_group("7")
        sample.reward = asyncio.run(slime_adapter.reward(args, sample))
        assert sample.reward == 0.0, "the stand-in, whether the verdict is in by now or not"
        judge.wait_for(lambda report: report.answered == 1)
        generation.aborted = False
        asyncio.run(slime_adapter.reward(args, make_group("6", group=1)[0]))
        slime_adapter.post_process(args, [sample])
        assert (sample.reward, sample.remove_sample) == (0.7, False)

    @pytest.mark.parametrize("hook", ["post_process", "log_rollout", "drop_failed_groups"])
    def test_a_verdict_that_slime_overwrites_with_the_stand_in_it_was_handed_before_counts(
        self, generation, judge, make_args, make_group, hook
    ):
        """slime assigns what the call returned, and a wrapper of the reward function may take its time with that."""
        args, (sample,) = make_args(partial_rollout=True), make_group("2")
        held = []

        async def main():
            call = asyncio.ensure_future(slime_adapter.reward(args, sample))
            await asyncio.to_thread(judge.wait_for, lambda report: report.in_flight == 1)
            generation.aborted = True
            held.append(await call)

        judge.hold()
        asyncio.run(main())
        generation.aborted = False
        judge.release()
        judge.wait_for(lambda report: report.answered == 1)
        asyncio.run(slime_adapter.reward(args, make_group("6", group=1)[0]))
        (sample.reward,) = held
        calls = {
            "post_process": lambda: slime_adapter.post_process(args, [sample]),
            "log_rollout": lambda: slime_adapter.log_rollout(0, args, [sample], {}, 0.0),
            "drop_failed_groups": lambda: slime_adapter.drop_failed_groups(args, [sample]),
        }
        calls[hook]()
        assert (sample.reward, sample.remove_sample) == (0.2, False)

    def test_it_is_written_in_the_thread_in_which_slime_writes(self, generation, judge, make_args, make_group):
        """Between a call's return and the assignment of its reward nothing is written."""
        args, (sample,) = make_args(partial_rollout=True), make_group("2")
        written_by, written = [], asyncio.Event()

        class Watched(type(sample)):
            def __setattr__(self, name, value):
                super().__setattr__(name, value)
                if name == "reward":
                    written_by.append(threading.get_ident())
                    if value == 0.2:
                        written.set()

        sample.__class__ = Watched

        async def main():
            (call,) = await pending(judge, args, [sample])
            generation.aborted = True
            await call
            generation.aborted = False
            judge.release()
            await written.wait()

        judge.hold()
        asyncio.run(main())
        assert set(written_by) == {threading.get_ident()}
        assert sample.reward == 0.2

    def test_it_does_not_change_a_sample_that_is_in_use(self, generation, judge, make_args, make_group):
        args, samples = make_args(partial_rollout=True), make_group("2", "4")
        self.abort(judge, args, samples, generation)
        raw, _ = slime_adapter.post_process(args, samples)
        judge.release()
        judge.wait_for(lambda report: report.answered == 2)
        asyncio.run(slime_adapter.reward(args, make_group("6", group=1)[0]))
        assert raw == [0.0, 0.0]
        assert [(sample.reward, sample.remove_sample) for sample in samples] == [(0.0, True)] * 2
