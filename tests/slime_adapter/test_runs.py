"""The start of a run, with all mistakes at once before slime loads a model, and its aborts: pending rewards end at once
and nothing is lost that slime keeps.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins import ConfigurationError
from qreward_plugins.testing import slime_stand_in
from tests.kit import each_of

FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"

SLIMES_OWN = "slime.rollout.sglang_rollout.generate_rollout"


@pytest.fixture
def mistakes(make_args):
    """`mistakes(**arguments)`: the mistakes of a run with these of slime's arguments, each as (key, text)."""

    def found(**arguments):
        arguments.setdefault("custom_rm_path", "slime_adapter.reward")
        slime_adapter.close()  # each is a run of its own
        try:
            slime_adapter.check(make_args(**arguments))
        except ConfigurationError as error:
            return [(mistake.path, str(mistake)) for mistake in error.mistakes]
        return []

    return found


def test_a_run_without_mistakes_gets_slimes_own_data_source(make_args, monkeypatch):
    given = make_args(custom_rm_path="slime_adapter.reward")
    slimes = ModuleType("slime.rollout.data_source")
    slimes.RolloutDataSourceWithBuffer = lambda args: ("slime's", args)
    for name, module in (("slime", ModuleType("slime")), ("slime.rollout", ModuleType("slime.rollout"))):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "slime.rollout.data_source", slimes)
    assert slime_adapter.DataSource(given) == ("slime's", given)
    # The stand-in's own, also beside an installed slime, whose data source reads flags that the stand-in has not.
    given.qreward_data_source = lambda args: ("the stand-in's", args)
    assert slime_adapter.DataSource(given) == ("the stand-in's", given)
    assert list(inspect.signature(slime_adapter.DataSource.__init__).parameters) == ["self", "args"]


def test_all_mistakes_are_told_at_once(mistakes):
    found = mistakes(
        custom_rm_path="slime_adapter:reward",
        dynamic_sampling_filter_path="slime_adapter.drop_failed_group",
        group_rm=True,
        eval_interval=20,
        eval_function_path=SLIMES_OWN,
        tree={"judges": {"quality": {"kind": "llm", "score_range": [10, 0]}}},
    )
    told = {
        "--custom-rm-path": "Write package.module.function",
        "--dynamic-sampling-filter-path": "it has drop_failed_and_flat_groups, drop_failed_groups,",
        "--group-rm": "--eval-function-path slime_adapter.eval_rollout",
        "judges.quality.score_range": "",
    }
    assert [key for key, _ in found] == [*told]
    assert all(told[key] in text for key, text in found)


ELSEWHERE = {"custom_rm_path": None, "rm_type": "math"}
NO_HOOK = {"advantage_estimator": "reinforce_plus_plus", "custom_reward_post_process_path": None}
EVALUATED = {"eval_interval": 1, "group_rm": True, "eval_function_path": SLIMES_OWN}
RIGOR = {"judges": {"quality": {"kind": "llm", "criteria": {"rigor": "is it?", "tone": "is it?"}}}}
ANY_KEY = {"sources": {"f": {"kind": "function", "function": "json:loads"}}, "judges": {"f": {"kind": "function"}}}


@each_of(
    ("arguments", "key", "told"),
    [
        (ELSEWHERE, "--custom-rm-path", "--rm-type"),
        # Functions of one's own may ask qreward.
        ({"custom_rm_path": "json.loads"}, "", ""),
        ({**ELSEWHERE, "eval_custom_rm_path": "slime_adapter.reward"}, "", ""),
        ({**ELSEWHERE, **EVALUATED, "debug_train_only": True}, "", ""),
        (NO_HOOK, "--advantage-estimator", "--custom-reward-post-process-path slime_adapter.post_process"),
        ({**NO_HOOK, "tree": {"on_failure": "raise"}}, "", ""),
        (EVALUATED, "--group-rm", "--eval-function-path slime_adapter.eval_rollout"),
        ({**EVALUATED, "eval_function_path": None, "rollout_function_path": SLIMES_OWN}, "--group-rm", ""),
        ({**EVALUATED, "eval_function_path": "slime_adapter.eval_rollout"}, "", ""),
        ({"eval_interval": 1, "rollout_function_path": FULLY_ASYNC}, "--eval-interval", "cannot evaluate"),
        (
            {"tree": RIGOR, "reward_key": "rigour", "eval_reward_key": "rigour"},
            "--reward-key",
            "Did you mean `rigor`? It is one of ('score', 'rigor', 'tone').",
        ),
        ({"tree": RIGOR, "reward_key": "tone", "eval_reward_key": "score"}, "", ""),
        ({"tree": RIGOR, "reward_key": "tone", "eval_reward_key": "points"}, "--eval-reward-key", ""),
        # A function may give any.
        ({"tree": ANY_KEY, "reward_key": "whatever"}, "", ""),
    ],
)
def test_what_is_a_mistake_of_a_run(mistakes, arguments, key, told):
    found = mistakes(**arguments)
    assert [path for path, _ in found] == ([key] if key else [])
    assert not told or told in found[0][1]


def test_a_run_without_a_configuration_is_told_where_to_put_one(make_args, monkeypatch):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    args = make_args(custom_rm_path="slime_adapter.reward")
    del args.qreward
    with pytest.raises(ConfigurationError, match=r"Give slime `--custom-config-path FILE` with .* the key `qreward`"):
        slime_adapter.check(args)


def test_a_key_in_the_tree_that_slime_prints_is_warned_of(make_args, judge, caplog):
    source = {"kind": "openai", "base_url": judge.base_url, "model": "judge", "api_key": "sk-4711"}
    with caplog.at_level(logging.WARNING):
        slime_adapter.check(make_args(custom_rm_path="slime_adapter.reward", tree={"sources": {"judge": source}}))
    (record,) = [record for record in caplog.records if "api_key" in record.getMessage()]
    assert "slime prints and uploads" in record.getMessage()
    assert "QREWARD_CONFIG" in record.getMessage()
    assert "4711" not in caplog.text


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
