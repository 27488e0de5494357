"""The fake slime trainer as a whole: flags, evaluation, samples, and that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import importlib
import importlib.util
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import qreward_plugins.testing
from qreward_plugins.testing import FakeSlimeTrainer, SlimeSample, slime_stand_in


async def one(args: Any, sample: SlimeSample) -> float:
    return 1.0


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("fake-slime")]


@pytest.mark.parametrize(
    ("flag", "nearest"),
    [
        ("custom_rm", "custom_rm_path"),
        ("reward_post_process_path", "custom_reward_post_process_path"),
        ("n_sample_per_prompt", "n_samples_per_prompt"),
    ],
)
def test_an_unknown_flag_names_the_nearest(flag: str, nearest: str) -> None:
    with pytest.raises(TypeError, match=f"no {flag!r}: did you mean {nearest!r}"):
        FakeSlimeTrainer(**{flag: 1})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"advantage_estimator": "gpro"}, "grpo"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "normalize_advantages"),
        ({"over_sampling_batch_size": 2}, "below rollout_batch_size 4"),
        ({"rollout_batch_size": 0}, "1 or more"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 3}, "global_batch_size 3"),
        ({"prompts": []}, "prompts is empty"),
    ],
)
def test_what_slime_would_not_start_with_is_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FakeSlimeTrainer(**flags)


def test_args_have_slimes_defaults_and_what_slime_derives() -> None:
    args = FakeSlimeTrainer(reward_key="score", n_samples_per_prompt=1).args
    assert (args.eval_reward_key, args.grpo_std_normalization, args.over_sampling_batch_size) == ("score", False, 4)
    assert args.eval_function_path == args.rollout_function_path == "slime.rollout.sglang_rollout.generate_rollout"
    assert (args.custom_reward_post_process_path, args.partial_rollout, args.rm_url) == (None, False, None)
    assert not hasattr(args, "qreward")


def test_the_custom_config_becomes_attributes_over_all_others(tmp_path: Path) -> None:
    tree = {"qreward": {"sources": {"a": {"kind": "openai"}}}, "reward_key": "score"}
    args = FakeSlimeTrainer(custom_config_path=tree, reward_key="other").args
    assert (args.qreward, args.reward_key) == (tree["qreward"], "score")
    file = tmp_path / "custom.yaml"
    file.write_text("qreward:\n  judges: {}\n")
    assert FakeSlimeTrainer(custom_config_path=str(file)).args.qreward == {"judges": {}}
    assert FakeSlimeTrainer(qreward="config.yaml").args.qreward == "config.yaml"


@pytest.mark.parametrize("row", [{"prompt": "x", "labels": "1"}, {"label": "1"}])
def test_a_row_has_a_prompt_and_nothing_unknown(row: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="a row of prompts"):
        FakeSlimeTrainer(prompts=[row])


def test_a_sample_may_be_a_row() -> None:
    sample = SlimeSample(prompt="x", metadata={"a": [1]})
    with FakeSlimeTrainer(custom_rm_path=one, prompts=[sample]) as trainer:
        step = trainer.rollout()
    assert step.samples[0].metadata == {"a": [1]}
    assert sample.index is None


def test_an_evaluation_scores_each_data_set_by_its_own_reward() -> None:
    seen: list[tuple[str, Any, Any, Any]] = []

    async def two(args: Any, sample: SlimeSample) -> float:
        seen.append((sample.prompt, sample.index, sample.group_index, sample.metadata))
        return 2.0 if sample.index else 4.0

    datasets = {
        "plain": ["p", "q"],
        "special": {
            "rows": [{"prompt": "r", "label": "1", "metadata": {"k": 1}}],
            "custom_rm_path": two,
            "n_samples_per_eval_prompt": 3,
            "rm_type": "math",
            "metadata_overrides": {"split": "test"},
            "max_response_len": 2,
        },
    }
    with FakeSlimeTrainer(custom_rm_path=one, eval_datasets=datasets, respond=lambda sample, rng: "a b c") as trainer:
        result = trainer.evaluate(5)
    assert result.rewards == {"plain": [1.0, 1.0], "special": [4.0, 2.0, 2.0]}
    assert sorted(seen) == [("r", index, None, {"k": 1, "rm_type": "math", "split": "test"}) for index in range(3)]
    assert result.metrics["eval/plain"] == 1.0
    assert result.metrics["eval/special"] == pytest.approx(8 / 3)
    assert result.metrics["eval/special-truncated_ratio"] == 1.0
    assert result.metrics["eval/plain/response_len/mean"] == 4.0
    assert result.metrics["eval/step"] == 5
    assert [sample.index for sample in result.samples["special"]] == [0, 1, 2]


def test_evaluation_has_a_reward_key_of_its_own() -> None:
    async def reward(args: Any, sample: SlimeSample) -> dict[str, float]:
        return {"score": 1.0, "strict": 0.0}

    flags = {"custom_rm_path": reward, "eval_datasets": {"e": ["p"]}, "reward_key": "score"}
    with FakeSlimeTrainer(**flags, eval_reward_key="strict") as trainer:
        assert trainer.evaluate().rewards == {"e": [0.0]}
        assert trainer.rollout().raw_rewards == [1.0] * 16
    with FakeSlimeTrainer(**flags) as trainer:
        assert trainer.evaluate().rewards == {"e": [1.0]}


def test_evaluation_with_group_rm_is_refused_unless_another_function_does_it() -> None:
    async def polymorphic(args: Any, sample: Any) -> Any:
        return [1.0] * len(sample) if isinstance(sample, list) else 1.0

    flags = {"custom_rm_path": polymorphic, "group_rm": True, "eval_datasets": {"e": ["p"]}}
    with FakeSlimeTrainer(**flags) as trainer, pytest.raises(AssertionError, match="group_rm"):
        trainer.evaluate()

    def one_by_one(args: Any, rollout_id: int, data_source: Any, evaluation: bool) -> Any:
        single = type(args)(**{**vars(args), "group_rm": False})
        return args.qreward_generate_rollout(single, rollout_id, data_source, evaluation=evaluation)

    with FakeSlimeTrainer(**flags, eval_function_path=one_by_one) as trainer:
        assert trainer.evaluate().rewards == {"e": [1.0]}
        assert trainer.rollout().reward_calls == 4


def test_the_eval_log_hook_changes_what_is_averaged() -> None:
    def log(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
        assert extra_metrics is None
        data["e"]["rewards"] = data["e"]["rewards"][:1]
        args.qreward_log(args, {"eval/e/qreward/failed": 1, "eval/step": rollout_id}, step_key="eval/step")
        return False

    async def reward(args: Any, sample: SlimeSample) -> float:
        return float(sample.index)

    with FakeSlimeTrainer(
        custom_rm_path=reward, eval_datasets={"e": ["p", "q"]}, custom_eval_rollout_log_function_path=log
    ) as trainer:
        result = trainer.evaluate(2)
    assert (result.metrics["eval/e"], result.metrics["eval/e/qreward/failed"]) == (0.0, 1)
    assert result.rewards == {"e": [0.0]}


def test_an_eval_log_hook_that_returns_true_takes_over() -> None:
    with FakeSlimeTrainer(
        custom_rm_path=one,
        eval_datasets={"e": ["p"]},
        custom_eval_rollout_log_function_path=lambda rollout_id, args, data, extra: True,
    ) as trainer:
        assert trainer.evaluate().metrics == {}


def test_pass_rates_are_logged_on_demand() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        return float(sample.index % 2)

    with FakeSlimeTrainer(
        custom_rm_path=reward, eval_datasets={"e": ["p", "q"]}, log_passrate=True, n_samples_per_eval_prompt=2
    ) as trainer:
        metrics = trainer.evaluate().metrics
    assert (metrics["eval/e-pass@1"], metrics["eval/e-pass@2"]) == (0.5, 1.0)


def test_an_error_in_an_evaluation_comes_out_and_cancels_the_rest() -> None:
    cancelled = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        if sample.prompt == "bad":
            raise ConnectionError("down")
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.append(sample.prompt)
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, eval_datasets={"a": ["p", "q"], "b": ["r", "bad"]}) as trainer:
        with pytest.raises(ConnectionError, match="down"):
            trainer.evaluate()
        assert sorted(cancelled) == ["p", "q", "r"]


@pytest.mark.parametrize("settings", [{"rows": [], "custom_rm": one}, {"row": []}])
def test_an_unknown_setting_of_an_eval_data_set_names_the_nearest(settings: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="did you mean"):
        FakeSlimeTrainer(eval_datasets={"e": settings})


def test_nothing_is_left_behind() -> None:
    left = []

    async def background() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            left.append("cancelled")

    tasks = []

    async def reward(args: Any, sample: SlimeSample) -> float:
        tasks.append(asyncio.ensure_future(background()))
        return 1.0

    with FakeSlimeTrainer(custom_rm_path=reward, rollout_batch_size=1) as trainer:
        assert threads() == []
        trainer.start_rollout().result(20)
        assert sorted(name[:18] for name in threads()) == ["fake-slime-manager", "fake-slime-rollout"]
    assert threads() == []
    assert left == ["cancelled"] * 4
    trainer.close()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.rollout()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.start_rollout()


def test_closing_ends_a_rollout_that_waits() -> None:
    trainer = FakeSlimeTrainer(custom_rm_path=one, hold=lambda sample: True)
    running = trainer.start_rollout()
    trainer.wait_until_held(16)
    trainer.close()
    with pytest.raises(concurrent.futures.CancelledError):
        running.result(20)
    assert threads() == []


def test_a_trainer_that_is_dropped_closes_itself() -> None:
    trainer = FakeSlimeTrainer(custom_rm_path=one)
    trainer.rollout()
    assert threads() == ["fake-slime-rollout"]
    del trainer
    gc.collect()
    assert threads() == []


def test_samples_survive_pickling_and_the_way_through_plain_data() -> None:
    with FakeSlimeTrainer(custom_rm_path=one) as trainer:
        sample = trainer.rollout().samples[0]
    sample.extra = "of a hook"  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(sample)) == sample
    data = sample.to_dict()
    assert (data["status"], data["spec_info"]["spec_verify_ct"], data["extra"]) == ("completed", 0, "of a hook")
    back = SlimeSample.from_dict(data)
    assert back == sample
    assert back.extra == "of a hook"  # type: ignore[attr-defined]


def test_tokens_of_a_tool_are_not_trained() -> None:
    sample = SlimeSample()
    sample.append_response_tokens(tokens=[1, 2], log_probs=[-1.0, -2.0], text="ab")
    sample.append_response_tokens(tokens=[3], trainable=False, text="tool")
    sample.append_response_tokens(
        tokens=[4],
        log_probs=[-3.0],
        text="c",
        meta_info={
            "finish_reason": {"type": "length"},
            "cached_tokens": 2,
            "prompt_tokens": 4,
            "weight_version": "7",
        },
    )
    assert (sample.response, sample.tokens, sample.loss_mask) == ("abtoolc", [1, 2, 3, 4], [1, 1, 0, 1])
    assert sample.rollout_log_probs == [-1.0, -2.0, 0.0, -3.0]
    assert (sample.status, sample.effective_response_length) == (SlimeSample.Status.TRUNCATED, 3)
    assert (sample.prefix_cache_info.cached_tokens, sample.weight_versions) == (2, ["7"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": [1]}, "need rollout log-probs"),
        ({"tokens": [1], "log_probs": []}, "0 log_probs for 1 tokens"),
        ({"tokens": [1], "log_probs": [0.0], "trainable": False}, "have no rollout log-probs"),
    ],
)
def test_tokens_and_log_probs_must_agree(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SlimeSample().append_response_tokens(**options)


def test_log_probs_cannot_start_in_the_middle() -> None:
    sample = SlimeSample(tokens=[1], response_length=1)
    with pytest.raises(ValueError, match="without rollout_log_probs"):
        sample.append_response_tokens(tokens=[2], log_probs=[0.0])


HOOKS = """
from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


async def score(args, sample: Sample) -> float:
    assert isinstance(sample, Sample)
    return float(sample.index % 8 // 4)


def keep_ones(args, group: list[Sample]) -> DynamicFilterOutput:
    return DynamicFilterOutput(keep=group[0].reward == 1.0, reason="zeros")
"""


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="is for where slime is not installed")
def test_hooks_that_import_from_slime_can_be_tested_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks_that_import_slime.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    flags = {
        "custom_rm_path": "hooks_that_import_slime.score",
        "dynamic_sampling_filter_path": "hooks_that_import_slime.keep_ones",
    }
    with FakeSlimeTrainer(**flags) as trainer, pytest.raises(ModuleNotFoundError, match="slime"):
        trainer.rollout()
    with slime_stand_in() as needed, FakeSlimeTrainer(**flags) as trainer:
        assert needed
        step = trainer.rollout()
        with pytest.raises(ModuleNotFoundError, match=r"slime\.ray"):
            importlib.import_module("slime.ray")
    assert step.raw_rewards == [1.0] * 16
    assert step.metrics["rollout/dynamic_filter/drop_zeros"] == 4
    assert not [name for name in sys.modules if name.split(".")[0] == "slime"]


LOG_HOOKS = """
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.logging_utils import log
from slime.utils.metric_utils import compute_rollout_step


def log_eval(rollout_id, args, data, extra_metrics):
    log(args, {"eval/mine": 3, "eval/step": compute_rollout_step(args, rollout_id)}, step_key="eval/step")


def evaluate(args, rollout_id, data_source, evaluation=True):
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)
"""


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="is for where slime is not installed")
def test_what_hooks_call_in_slime_reaches_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hooks_that_call_slime.py").write_text(LOG_HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    flags = {
        "custom_rm_path": one,
        "custom_eval_rollout_log_function_path": "hooks_that_call_slime.log_eval",
        "eval_function_path": "hooks_that_call_slime.evaluate",
        "eval_datasets": {"e": ["p"]},
    }
    with slime_stand_in(), FakeSlimeTrainer(**flags) as trainer:
        result = trainer.evaluate(4)
    assert (result.rewards, result.metrics["eval/mine"], result.metrics["eval/step"]) == ({"e": [1.0]}, 3, 4)


@pytest.mark.skipif(importlib.util.find_spec("slime") is not None, reason="is for where slime is not installed")
def test_slimes_own_filter_drops_groups_without_spread() -> None:
    async def reward(args: Any, sample: SlimeSample) -> float:
        return 0.5 if sample.group_index % 2 else float(sample.index % 2)

    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    with slime_stand_in(), FakeSlimeTrainer(custom_rm_path=reward, dynamic_sampling_filter_path=path) as trainer:
        step = trainer.rollout()
    assert [group[0].group_index for group in step.groups] == [0, 2, 4, 6]
    assert step.metrics["rollout/dynamic_filter/drop_zero_std_0.5"] == 4


def test_an_installed_slime_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("slime", "slime/utils"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "__init__.py").touch()
    (tmp_path / "slime" / "utils" / "types.py").write_text("Sample = 'of slime'")
    monkeypatch.syspath_prepend(tmp_path)
    with slime_stand_in() as needed:
        from slime.utils.types import Sample
    for name in ("slime", "slime.utils", "slime.utils.types"):
        sys.modules.pop(name)
    assert (needed, Sample) == (False, "of slime")


def test_importing_the_package_does_not_import_the_trainer() -> None:
    program = (
        "import sys, qreward_plugins.testing as t; before = [m for m in sys.modules if '.slime_' in m]; "
        "t.FakeSlimeTrainer; print(before, sorted({'torch', 'slime', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[] []"


def test_every_exported_name_is_there() -> None:
    pytest.importorskip("torch", reason="torch is not installed: the stand-ins for ROLL hold tensors")
    for name in qreward_plugins.testing.__all__:
        assert getattr(qreward_plugins.testing, name) is not None
    with pytest.raises(AttributeError, match="FakeSlimeTrainr"):
        _ = qreward_plugins.testing.FakeSlimeTrainr


def test_a_hook_that_needs_torch_is_refused_at_the_start_where_torch_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with slime_stand_in(), pytest.raises(ImportError, match=r"custom_reward_post_process_path: .* needs torch"):
        FakeSlimeTrainer(
            custom_rm_path="slime_adapter.reward",
            custom_reward_post_process_path="slime_adapter.post_process",
            qreward={"sources": {}, "judges": {}},
        )
