"""The check at the start of a run: all mistakes at once, before slime loads a model, and each with its remedy."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType

import pytest

import slime_adapter
from qreward_plugins import ConfigurationError
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
