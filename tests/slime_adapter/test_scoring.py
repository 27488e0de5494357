"""slime's samples in the core's words; the reward function: shapes, failures, and loops that come and go; and the start
of a run, with all mistakes at once before slime loads a model.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import slime_adapter
from qreward_plugins import ConfigurationError, RewardMissing
from qreward_plugins.samples.check import Rejected, read_sample
from qreward_plugins.samples.images import Image
from qreward_plugins.testing import JudgeServer
from slime_adapter.samples import to_sample
from slime_adapter.settings import adapter_of
from tests.kit import each_of, tasks_left

CHATML = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\n"
LLAMA = (
    "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\n1 + 2?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
)
GLM = "[gMASK]<sop><|system|>\nBe brief.<|user|>\n1 + 2?<|assistant|>\n"


@each_of("prompt", [CHATML, LLAMA, GLM])
def test_a_templated_prompt_is_read_back_into_messages(make_group, prompt):
    messages = to_sample(make_group("42", prompt=prompt)[0]).messages
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1 + 2?"}]


def test_the_step_is_the_rollout_that_slime_counts(make_group, monkeypatch):
    (sample,) = make_group("42")
    assert to_sample(sample).step is None
    monkeypatch.setitem(sys.modules, "slime.rollout.sample_hooks", SimpleNamespace(_current_rollout_id=7))
    assert to_sample(sample).step == 7


def test_every_field_finds_its_place(make_group):
    (sample,) = make_group("It is 42.", group=7)
    sample.metadata = {"source_name": "add", "difficulty": 3, "qreward": {"excluded": True}}
    told = to_sample(sample)
    assert (told.response, told.ground_truth, told.data_source) == ("It is 42.", "42", "add")
    assert (told.group_id, told.split, told.id) == ("7", "train", "0")
    assert told.extras == {"source_name": "add", "difficulty": 3}
    assert to_sample(make_group("42", group=None)[0]).split == "val"
    for metadata, source in (({"data_source": "a", "source_name": "b"}, "a"), ({"rm_type": "c"}, "c"), (None, "")):
        assert to_sample(make_group("42", metadata=metadata)[0]).data_source == source
    bare = to_sample(object())
    assert (bare.response, bare.messages) == ("", [{"role": "user", "content": ""}])


@each_of(
    ("attribute", "value", "field"),
    [
        ("response", None, "response"),
        ("prompt", None, "messages"),
        ("prompt", [{"role": "user", "content": {"text": "17 + 25?"}}], "messages"),
        ("metadata", ["add"], "extras"),
        ("metadata", {"data_source": ["add"]}, "data_source"),
        ("group_index", [1], "group_id"),
    ],
)
def test_a_broken_sample_is_its_own_failure_by_the_name_of_the_field(make_group, attribute, value, field):
    (sample,) = make_group("42")
    setattr(sample, attribute, value)
    read = read_sample(to_sample(sample))
    assert isinstance(read, Rejected)
    assert read.problem.startswith(field)


def test_images_take_their_places_in_the_prompt_and_the_rest_is_of_the_response(make_group):
    pillow = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    images = [pillow.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    prompt = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n"
    told = to_sample(make_group("it is", prompt=prompt, multimodal_inputs={"images": images})[0])
    assert [part["type"] for part in told.messages[0]["content"]] == ["image", "text"]
    assert told.response_images == [Image.of(images[1])]


# The reward function


def run(args, sample):
    return asyncio.run(slime_adapter.reward(args, sample))


async def one_by_one(args, samples):
    """As slime does without `--group-rm`: each sample by itself, its reward assigned when it comes."""

    async def one(sample):
        sample.reward = await slime_adapter.reward(args, sample)

    await asyncio.gather(*map(one, samples))


def test_the_record_of_a_sample_says_what_happened(make_args, make_group):
    scored, failed = make_group("7", "break")
    shared = scored.metadata = failed.metadata = {"source_name": "add"}
    asyncio.run(one_by_one(make_args(), [scored, failed]))
    assert shared == {"source_name": "add"}
    record = scored.metadata["qreward"]
    assert (record["cause"], record["excluded"], record["source"], record["attempts"]) == ("", False, "judge", 1.0)
    assert (failed.metadata["qreward"]["failed"], failed.metadata["qreward"]["excluded"]) == (1.0, True)
    assert failed.metadata["qreward"]["cause"].startswith("infra/")


def test_a_group_and_a_fan_out_get_a_list(make_args, make_group):
    (sample,) = make_group("7")
    assert (run(make_args(), sample), sample.remove_sample) == (0.7, False)
    assert run(make_args(group_rm=True), make_group("1", "2", "3", "4")) == [0.1, 0.2, 0.3, 0.4]
    assert run(make_args(), make_group("5", "6")) == [0.5, 0.6]
    assert run(make_args(), []) == []


def test_a_sample_that_failed_first_follows_the_mean_of_those_that_come_later(make_args, make_group):
    args, group = make_args(), make_group("break", "2", "4", "9")
    seen = []
    for sample in group:
        sample.reward = run(args, sample)
        seen.append(group[0].reward)
    assert seen == pytest.approx([0.0, 0.2, 0.3, 0.5])


@pytest.mark.parametrize("removed", [False, True])
def test_a_sample_that_is_scored_after_all_trains_again_unless_others_removed_it(make_args, make_group, removed):
    args, (sample,) = make_args(), make_group("break", remove_sample=removed)
    for _ in range(2):
        run(args, sample)
        assert sample.remove_sample
    sample.response = "4"
    assert run(args, sample) == 0.4
    assert sample.remove_sample is removed


def test_an_evaluation_sample_gets_the_mean_of_its_data_set(make_args, make_group):
    args = make_args(n_samples_per_prompt=2)
    samples = make_group("2", "4", "9", "break", group=None)
    for sample in samples:
        sample.metadata = {"data_source": "held-out"}
        sample.reward = run(args, sample)
    assert [sample.reward for sample in samples] == pytest.approx([0.2, 0.4, 0.9, 0.5])


WITH_TONE = {"judges": {"quality": {"kind": "llm", "criteria": {"tone": "is it kind?"}, "reward_range": [0, 10]}}}


@pytest.mark.parametrize(
    ("group", "kept"), [(0, 2.0), (None, None)], ids=["reward_key in training", "eval_reward_key in evaluation"]
)
def test_rewards_with_a_key_are_dicts_whose_keys_are_always_there(make_args, make_group, group, kept):
    args = make_args(reward_key="tone", eval_reward_key="score", tree=WITH_TONE)
    scored, failed = run(args, make_group("7/2", "break", group=group))
    assert scored == {"tone": 2.0, "score": 7.0, "failed": 0.0, "cause": ""}
    assert failed.pop("cause").startswith("infra/")
    # The mean of the siblings by the key that slime reads.
    assert failed == {"tone": kept, "score": 2.0 if kept else 7.0, "failed": 1.0}
    # slime trains on the reward itself where only evaluations have a key.
    (sample,) = make_group("7/2", group=group)
    assert isinstance(run(make_args(eval_reward_key="score", tree=WITH_TONE), sample), dict) is (group is None)


def test_a_constant_trains_and_raise_ends_the_job_knowingly(make_args, make_group):
    (sample,) = make_group("break")
    assert run(make_args(tree={"on_failure": {"constant": -1}}), sample) == -1.0
    assert (sample.remove_sample, sample.metadata["qreward"]["failed"]) == (False, 1.0)
    with pytest.raises(RewardMissing, match="infra"):
        run(make_args(tree={"on_failure": "raise"}), sample)


def test_what_slime_aborted_is_not_judged(judge, make_args, make_group):
    group = make_group("2", "unfinished", "4", "6")
    group[1].status = type(group[1].status).ABORTED
    assert run(make_args(group_rm=True), group) == pytest.approx([0.2, 0.4, 0.4, 0.6])
    assert [sample.remove_sample for sample in group] == [False, True, False, False]
    assert judge.report().requests == 3


def test_without_the_post_process_hook_it_says_once_which_flag_to_add(make_args, make_group, caplog):
    args = make_args(custom_reward_post_process_path=None)
    with caplog.at_level(logging.WARNING, logger="slime_adapter"):
        asyncio.run(one_by_one(args, make_group("break", "break", "3")))
    (told,) = [record.message for record in caplog.records if record.name == "slime_adapter"]
    assert "--custom-reward-post-process-path slime_adapter.post_process" in told


def test_loops_come_and_go_and_share_one_engine(make_args, make_group):
    args = make_args()
    rewards = [run(args, make_group(str(n))[0]) for n in range(5)]
    assert rewards == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4])
    assert adapter_of(args).portal.statistics().scored == 5
    # Equal arguments, as every Ray actor or test makes them anew, mean the same engine.
    assert adapter_of(make_args()) is adapter_of(args)
    assert adapter_of(make_args(tree={"engine": {"deadline_s": 5}})) is not adapter_of(args)


@pytest.mark.anyio
async def test_a_cancelled_call_cancels_its_attempts_and_leaves_nothing_on_the_loop(judge, make_args, make_group):
    judge.hold()
    call = asyncio.ensure_future(slime_adapter.reward(make_args(), make_group("5")[0]))
    await asyncio.to_thread(judge.wait_for, lambda report: report.in_flight == 1)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert tasks_left() == []
    judge.wait_for(lambda report: report.in_flight == 0)
    judge.release()


def test_the_environment_may_name_the_file(make_args, make_group, monkeypatch, tmp_path):
    args = make_args()
    (tmp_path / "judges.yaml").write_text(json.dumps(args.qreward))
    del args.qreward
    monkeypatch.setenv("QREWARD_CONFIG", str(tmp_path / "judges.yaml"))
    assert run(args, make_group("7")[0]) == 0.7


def test_the_models_that_slime_serves_are_found_by_name(make_args, make_group, judge):
    """Also the one that is trained, which judges itself."""
    host, port = judge.base_url.removeprefix("http://").removesuffix("/v1").split(":")
    routers = {"default": ("127.0.0.1", 9), "reward": (host, int(port))}
    rollout = {"sglang_router_ip": host, "sglang_router_port": int(port)}
    for name, servers in (("reward", {"sglang_model_routers": routers}), ("rollout", rollout)):
        args = make_args(**servers)
        args.qreward["sources"]["judge"]["base_url"] = f"framework://{name}/v1"
        assert run(args, make_group("7")[0]) == pytest.approx(0.7)
    args.sglang_router_port = None
    with pytest.raises(ConfigurationError, match="--sglang-config"):
        run(args, make_group("7")[0])


@pytest.mark.parametrize(
    "prompt", ["<|im_start|>user\n17 + 25?<|im_end|>\n", [{"role": "user", "content": "17 + 25?"}]]
)
def test_a_user_of_rm_url_changes_one_flag_and_his_server_is_asked_as_before(make_group, monkeypatch, prompt):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    asked = []

    def score(call):
        asked.append((list(call.messages), call.response, call.label))
        return 0.75

    with JudgeServer(score) as server:
        args = SimpleNamespace(rm_url=server.score_url, custom_rm_path="slime_adapter.reward")
        assert run(args, make_group("It is 42.", prompt=prompt)[0]) == 0.75
        slime_adapter.close()
    as_sent = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    assert asked == [(as_sent, "It is 42.", "42")]


# The start of a run


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
ANY_KEY = {"sources": {"f": {"kind": "function", "function": "builtins:dict"}}, "judges": {"f": {"kind": "function"}}}


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
