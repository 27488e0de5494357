"""slime's hooks: filters of groups, logs of a step and of an evaluation, and the post-process hook, whose numbers are
slime's over the scored samples of each group; and aborts: pending rewards end at once, and nothing is lost that slime
keeps.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins import JudgeUnavailable
from qreward_plugins.journal.stories import Stories, Wanted
from qreward_plugins.testing import FakeSlimeTrainer, slime_stand_in
from slime_adapter import settings
from tests.kit import each_of


@pytest.fixture
def groups(make_group):
    """A group with a reward for each 1, and a failed sample for each 0; slime's few names are there."""
    with slime_stand_in():
        yield lambda *scored: batch(make_group, [0.5 if is_scored else None for is_scored in scored])


@pytest.fixture
def scored(make_args, make_group):
    """Samples with rewards, scored by the real adapter; "break" fails."""

    def make(*responses, group=0, metadata=None, **arguments):
        args, samples = make_args(**arguments), make_group(*responses, group=group, metadata=metadata or {})
        for sample, reward in zip(samples, asyncio.run(slime_adapter.reward(args, samples)), strict=True):
            sample.reward = reward
        return args, samples

    return make


@each_of(("min_scored", "keep"), [("all", False), (3, True)])
def test_a_group_with_too_few_rewards_is_dropped_under_its_reason(make_args, groups, min_scored, keep):
    args = make_args(tree={"groups": {"min_scored": min_scored}})
    output = slime_adapter.drop_failed_groups(args, groups(1, 1, 0, 1))
    expected = (keep, None if keep else "qreward_failed", False)
    assert (output.keep, output.reason, output.keep_when_insufficient) == expected
    # A rollout may have become several samples.
    assert slime_adapter.drop_failed_groups(args, [groups(1, 1), groups(0, 1)]).keep is keep


def test_the_reward_of_another_function_counts_if_it_is_a_number(make_args, groups):
    group = groups(1, 1)
    group[0].metadata = group[1].metadata = {}
    group[1].reward = None
    assert not slime_adapter.drop_failed_groups(make_args(), group).keep
    group[1].reward = 0.0
    assert slime_adapter.drop_failed_groups(make_args(), group).keep


def test_a_judge_that_is_down_ends_in_one_error_with_what_became_of_its_calls(make_args, judge):
    judge.stop()
    engine = {"max_attempts": 1, "deadline_s": 1.0}
    tree = make_args(tree={"engine": engine, "groups": {"give_up_after": 1}}).qreward
    flags = {
        "custom_rm_path": "slime_adapter.reward",
        "dynamic_sampling_filter_path": "slime_adapter.drop_failed_groups",
    }
    with (
        slime_stand_in(),
        FakeSlimeTrainer(**flags, qreward=tree) as trainer,
        pytest.raises(JudgeUnavailable, match=r"The last failure: .*could not connect"),
    ):
        trainer.rollout()


def test_slimes_filter_of_flat_groups_sees_the_scored_samples(make_args, groups):
    args = make_args(tree={"groups": {"min_scored": 2}}, reward_key=None)
    assert slime_adapter.drop_failed_and_flat_groups(args, groups(1, 0)).reason == "qreward_failed"
    group = groups(1, 0, 1)
    assert slime_adapter.drop_failed_and_flat_groups(args, group).reason == "zero_std_0.5"
    group[2].reward = 1.0
    assert slime_adapter.drop_failed_and_flat_groups(args, group).keep


def test_the_step_is_summed_up_in_slimes_own_dict(scored):
    args, samples = scored("2", "4", "break", "6", metadata={"data_source": "sums"})
    metrics = {"rollout/other": 1}
    assert slime_adapter.log_rollout(3, args, samples, metrics, 0.5) is False
    told = {name.removeprefix("rollout/qreward/"): value for name, value in metrics.items() if "qreward" in name}
    assert metrics["rollout/other"] == 1
    assert (told["samples"], told["failed"], told["failed_rate"]) == (4.0, 1.0, 0.25)
    assert (told["reward/mean"], told["flat_rate"], told["data/sums/failed_rate"]) == (pytest.approx(0.4), 0.0, 0.25)
    assert sum(value for name, value in told.items() if name.startswith("blame_s/")) > 0


def test_a_sample_that_slime_never_asked_for_gets_a_stand_in_before_slime_reads_it(scored, make_group):
    args, samples = scored("2", "4", reward_key="score")
    (aborted,) = make_group("unfinished")
    metrics = {}
    slime_adapter.log_rollout(3, args, [*samples, aborted], metrics, 0.5)
    assert aborted.reward["score"] == pytest.approx(0.3)
    assert aborted.remove_sample
    assert metrics["rollout/qreward/failed"] == 1.0


RATES = ("rollout/qreward/failed_rate", "eval/a/qreward/failed_rate")


def test_where_slime_has_no_dict_the_hooks_log_by_themselves(scored):
    args, samples = scored("2", "break")
    logged = []
    args.qreward_log = lambda args, metrics, step_key: logged.append((step_key, metrics))
    with slime_stand_in():
        assert slime_adapter.log_rollout(3, args, samples, None, 0.5) is False
        slime_adapter.log_eval(2, args, {"a": {"samples": samples}}, None)
    told = [(step, metrics[step], metrics[rate]) for (step, metrics), rate in zip(logged, RATES, strict=True)]
    assert told == [("rollout/step", 3, 0.5), ("eval/step", 2, 0.5)]


def test_pass_rates_need_whole_groups(scored):
    args, samples = scored("2", "4", "break", "6", group=None, log_passrate=True, n_samples_per_eval_prompt=2)
    data = {"a": {"rewards": [0.2, 0.4, 0.4, 0.6], "truncated": [False] * 4, "samples": samples}}
    slime_adapter.log_eval(2, args, data, {})
    assert data["a"]["rewards"] == [0.2, 0.4]


def test_samples_of_another_reward_function_are_left_alone(make_args, make_group):
    samples = make_group("a", "b", group=None)
    data = {"a": {"rewards": [0.1, 0.2], "truncated": [False] * 2, "samples": samples}, "b": {"rewards": [1.0]}}
    before, metrics = dict(data), {}
    assert slime_adapter.log_eval(2, make_args(), data, metrics) is False
    assert slime_adapter.log_rollout(2, make_args(), samples, metrics, 1.0) is False
    assert (data, metrics) == (before, {})


# The post-process hook


FLOAT32_MAX = 3.4028234663852886e38
ESTIMATORS = ["grpo", "gspo", "cispo", "reinforce_plus_plus_baseline", "reinforce_plus_plus", "ppo"]


def batch(make_group, *groups):
    """Samples with these rewards; None: failed, with a stand-in that must not count."""
    samples = []
    for number, rewards in enumerate(groups):
        for sample, reward in zip(make_group(*map(str, rewards), group=number), rewards, strict=True):
            sample.reward = 99.0 if reward is None else reward
            sample.metadata = {"qreward": {"excluded": reward is None}}
            samples.append(sample)
    return samples


def normalized(rewards, *, std=True):
    """slime's formula (slime/ray/rollout.py) over the rewards that are there."""
    there = [reward for reward in rewards if reward is not None]
    if len(there) < 2:
        return [0.0] * len(rewards)
    middle = sum(there) / len(there)
    spread = math.sqrt(sum((r - middle) ** 2 for r in there) / (len(there) - 1))
    return [0.0 if r is None else (r - middle) / ((spread + 1e-6) if std else 1.0) for r in rewards]


@each_of(("estimator", "normalize", "std"), itertools.product(ESTIMATORS, [True, False], [True, False]))
def test_failed_samples_stay_out_of_every_estimators_statistics(make_args, make_group, estimator, normalize, std):
    groups = [[0.1, None, 0.7, 0.4], [1.0, 0.5, 0.25, 0.0], [None, None, None, None], [None, 0.3, None, None]]
    samples = batch(make_group, *groups)
    settings = {"rewards_normalization": normalize, "grpo_std_normalization": std}
    args = make_args(advantage_estimator=estimator, rollout_batch_size=4, **settings)
    raw, rewards = slime_adapter.post_process(args, samples)
    everything = [r for group in groups for r in group if r is not None]
    whole = sum(everything) / len(everything)
    means = [0.4, 0.4375, whole, 0.3]
    assert raw == pytest.approx([m if r is None else r for group, m in zip(groups, means, strict=True) for r in group])
    if estimator == "reinforce_plus_plus":
        assert rewards == pytest.approx([whole if r is None else r for group in groups for r in group])
    elif normalize and estimator != "ppo":
        scaled = std and estimator != "reinforce_plus_plus_baseline"
        assert rewards == pytest.approx([number for group in groups for number in normalized(group, std=scaled)])
    else:
        assert rewards == raw
    masked = [sample.remove_sample or sample.loss_mask == [0, 0, 1] for sample in samples]
    assert masked == [reward is None for group in groups for reward in group]


def test_where_rollouts_became_several_samples_the_batch_is_one_group_as_in_slime(make_args, make_group):
    samples = batch(make_group, [0.1, None, 0.3, 0.4, 0.9], [0.5, 0.6])
    args = make_args(n_samples_per_prompt=2, rollout_batch_size=2)
    _, rewards = slime_adapter.post_process(args, samples)
    assert rewards == pytest.approx(normalized([0.1, None, 0.3, 0.4, 0.9, 0.5, 0.6]))


@each_of("broken", [None, math.nan, math.inf, -math.inf, "0.5x", 1e39, {"other": 1.0}])
def test_a_broken_reward_of_any_function_is_a_failed_sample(make_args, make_group, broken):
    samples = batch(make_group, [0.2, 0.4, 0.6, 0.0])
    samples[3].reward = broken
    samples[3].metadata = {}
    raw, rewards = slime_adapter.post_process(make_args(), samples)
    assert raw == pytest.approx([0.2, 0.4, 0.6, 0.4])
    assert rewards == pytest.approx([-1.0, 0.0, 1.0, 0.0], abs=1e-4)
    assert [sample.remove_sample for sample in samples] == [False, False, False, True]


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_the_token_that_reinforce_plus_plus_keeps_of_a_failed_sample_has_the_mean_return(make_args, make_group, gamma):
    samples = batch(make_group, [1.0, 0.2, None])
    samples[1].loss_mask = [1, 0, 0]
    args = make_args(advantage_estimator="reinforce_plus_plus", n_samples_per_prompt=3, gamma=gamma)
    _, rewards = slime_adapter.post_process(args, samples)
    # Three tokens of the first response, one of the second.
    returns = [gamma**2 * 1.0, gamma * 1.0, 1.0, 0.2]
    assert rewards == pytest.approx([1.0, 0.2, sum(returns) / 4])
    assert [sample.loss_mask for sample in samples] == [None, [1, 0, 0], [0, 0, 1]]
    assert not any(sample.remove_sample for sample in samples)


@pytest.mark.parametrize("estimator", ["grpo", "ppo"])
def test_the_journal_has_what_slime_trains_on(make_args, tmp_path, estimator):
    said, path = ["1", "4", "break", "9"], tmp_path / "journal.sqlite"
    with FakeSlimeTrainer(
        qreward=make_args(tree={"engine": {"journal": {"path": str(path)}, "max_attempts": 1}}).qreward,
        respond=lambda sample, rng: said[sample.index % 4],
        custom_rm_path="slime_adapter.reward",
        custom_reward_post_process_path="slime_adapter.post_process",
        advantage_estimator=estimator,
        rollout_batch_size=2,
    ) as trainer:
        step = trainer.rollout()
        settings._adapters[0][1].training.flush()
        settings.close()
    with Stories([str(path)]) as stories:
        found, _ = stories.find(Wanted(), 99)
    trained = [story.trained[story.entries[0].sample_id] for story in found]
    trained.sort(key=lambda each: int(each.sample_id))
    assert [each.masked for each in trained] == [False, False, True, False] * 2
    assert [each.reward for each in trained] == pytest.approx(step.raw_rewards)
    advantages = [None] * 8 if estimator == "ppo" else pytest.approx(step.rewards)
    assert [each.advantage for each in trained] == advantages


@each_of("estimator", ESTIMATORS)
def test_what_overflows_in_32_bits_on_the_way_is_finite_in_the_end(make_args, make_group, estimator):
    samples = batch(make_group, [3.4e38, 3.4e38, -3.4e38, 1.0], [0.1, None, 0.7, 0.4])
    args = make_args(advantage_estimator=estimator, rollout_batch_size=2)
    raw, trained = slime_adapter.post_process(args, samples)
    assert max(map(abs, [*raw, *trained])) <= FLOAT32_MAX


# Aborts


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
