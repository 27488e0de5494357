"""The check at the start of a run: all mistakes at once, before slime loads a model, and each with its remedy."""

from __future__ import annotations

import inspect
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins import ConfigurationError
from qreward_plugins.testing import FakeSlimeTrainer, slime_stand_in

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


def test_the_stand_in_makes_the_data_source_as_slime_does(make_args):
    args = make_args()
    paths = {"custom_rm_path": "slime_adapter.reward", "data_source_path": "slime_adapter.DataSource"}
    with slime_stand_in(), FakeSlimeTrainer(qreward=args.qreward, respond=lambda *_: "7", **paths) as trainer:
        assert {sample.reward for sample in trainer.rollout().samples} == {0.7}
    broken = {**args.qreward, "sources": {"judge": {"kind": "openai", "base_url": "http://j/v1", "modell": "m"}}}
    with slime_stand_in(), pytest.raises(ConfigurationError, match=r"sources\.judge\.modell"):
        FakeSlimeTrainer(qreward=broken, **paths)


def test_all_mistakes_are_told_at_once(mistakes):
    found = mistakes(
        custom_rm_path="slime_adapter:reward",
        dynamic_sampling_filter_path="slime_adapter.drop_failed_group",
        group_rm=True,
        eval_interval=20,
        eval_function_path=SLIMES_OWN,
        tree={"judges": {"quality": {"kind": "llm", "score_range": [10, 0]}}},
    )
    assert [key for key, _ in found] == [
        "--custom-rm-path",
        "--dynamic-sampling-filter-path",
        "--group-rm",
        "judges.quality.score_range",
    ]
    texts = dict(found)
    assert "Write package.module.function" in texts["--custom-rm-path"]
    assert "Did you mean `drop_failed_groups`?" in texts["--dynamic-sampling-filter-path"]
    assert "--eval-function-path slime_adapter.eval_rollout" in texts["--group-rm"]


def test_a_run_that_would_not_ask_qreward_is_refused(mistakes):
    ((key, text),) = mistakes(custom_rm_path=None, rm_type="math")
    assert key == "--custom-rm-path"
    assert "--rm-type" in text
    assert mistakes(custom_rm_path="json.loads") == [], "a function of one's own may call qreward"


@pytest.mark.parametrize(
    "arguments",
    [
        {"custom_generate_function_path": "json.loads"},
        {"rollout_function_path": "my_package.rollout"},
        {"rollout_sample_hook_path": ["my_package.hook"]},
        {"eval_custom_rm_path": "slime_adapter.reward"},
        {
            "eval_datasets": [
                SimpleNamespace(custom_rm_path=None),
                SimpleNamespace(custom_rm_path="slime_adapter.reward"),
            ]
        },
        {"debug_train_only": True},
    ],
    ids=lambda arguments: next(iter(arguments)),
)
def test_a_run_in_which_others_may_ask_qreward_is_not_refused(mistakes, arguments):
    assert mistakes(custom_rm_path=None, rm_type="math", **arguments) == []


def test_reinforce_plus_plus_needs_the_hook_that_makes_failed_samples_neutral(mistakes):
    flags = {"advantage_estimator": "reinforce_plus_plus", "custom_reward_post_process_path": None}
    ((key, text),) = mistakes(**flags)
    assert key == "--advantage-estimator"
    assert "--custom-reward-post-process-path slime_adapter.post_process" in text
    assert mistakes(tree={"on_failure": "raise"}, **flags) == []


def test_saved_rollouts_are_neither_scored_nor_evaluated(mistakes):
    evaluation = {"group_rm": True, "eval_interval": 20, "eval_function_path": SLIMES_OWN}
    assert mistakes(**evaluation) != []
    assert mistakes(debug_train_only=True, **evaluation) == []


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ({"group_rm": True, "eval_function_path": SLIMES_OWN}, "--group-rm"),
        ({"group_rm": True, "eval_function_path": None, "rollout_function_path": SLIMES_OWN}, "--group-rm"),
        ({"group_rm": True, "eval_function_path": "slime_adapter.eval_rollout"}, None),
        (
            {"rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async"},
            "--eval-interval",
        ),
    ],
)
def test_an_evaluation_that_slime_would_refuse_is_refused_at_the_start(mistakes, arguments, key):
    assert [found for found, _ in mistakes(eval_interval=1, **arguments)] == ([key] if key else [])
    assert mistakes(eval_interval=None, **arguments) == [], "nothing is evaluated"


def test_a_misspelt_criterion_is_no_key_of_ones_own(mistakes):
    judges = {"quality": {"kind": "llm", "criteria": {"rigor": "is it?", "tone": "is it?"}}}
    ((key, text),) = mistakes(tree={"judges": judges}, reward_key="rigour", eval_reward_key="rigour")
    assert key == "--reward-key"
    assert "Did you mean `rigor`? Keys: score, rigor, tone." in text
    assert mistakes(tree={"judges": judges}, reward_key="tone", eval_reward_key="score") == []
    ((key, _),) = mistakes(tree={"judges": judges}, reward_key="tone", eval_reward_key="tones")
    assert key == "--eval-reward-key"
    assert mistakes(tree={"judges": judges}, reward_key="points") == [], "a key of one's own holds the score"
    function = {"sources": {"f": {"kind": "function", "function": "json:loads"}}, "judges": {"f": {"kind": "function"}}}
    assert mistakes(tree=function, reward_key="whatever") == [], "a function may give any"


@pytest.mark.parametrize(
    ("attributes", "told"),
    [
        ({"sources": {}, "judges": {}}, "has no key `qreward`. Indent `sources` and `judges` below it"),
        ({"qrewards": {"judges": {}}}, "qrewards: unknown key in the file of --custom-config-path. Did you mean"),
        ({"custom_config_path": "/my.yaml"}, "/my.yaml) has no key `qreward`"),
        ({}, "Give slime `--custom-config-path FILE`"),
    ],
)
def test_a_configuration_in_the_wrong_place_is_found_there(make_args, attributes, told, monkeypatch):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    args = make_args(custom_rm_path="slime_adapter.reward", **attributes)
    del args.qreward
    with pytest.raises(ConfigurationError) as raised:
        slime_adapter.check(args)
    assert told in str(raised.value)


def test_a_key_in_the_tree_that_slime_prints_is_warned_of(make_args, judge, caplog):
    source = {"kind": "openai", "base_url": judge.base_url, "model": "judge", "api_key": "sk-4711"}
    with caplog.at_level(logging.WARNING):
        slime_adapter.check(make_args(custom_rm_path="slime_adapter.reward", tree={"sources": {"judge": source}}))
    (record,) = [record for record in caplog.records if "api_key" in record.getMessage()]
    assert "slime prints and uploads" in record.getMessage()
    assert "QREWARD_CONFIG" in record.getMessage()
    assert "4711" not in caplog.text
