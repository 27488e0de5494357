"""A validation in whatever verl is installed: our reward manager, verl's own means and files, and our hook."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import math
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

from qreward_plugins import load_config
from qreward_plugins.testing import JudgeServer
from verl_adapter import trainer_hooks
from verl_adapter.rollouts import VALIDATION

TRAINERS = {"v1": ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", True)}
TRAINERS["legacy"] = ("verl.trainer.ppo.ray_trainer", "RayPPOTrainer", False)

SETTINGS = load_config(
    {"sources": {"f": {"kind": "function", "function": "math:fsum"}}, "judges": {"j": {"kind": "function"}}}
)
FUNCTION = """
def rule(data_source, solution_str, ground_truth, extra_info):
    if "break" in solution_str:
        raise ValueError("no such answer")
    if solution_str == "10":
        return 1.0
    return {"score": 0.0, "acc": False, "why": "wrong", "input": "?", "nothing": None}
"""
CORRECT_AT = "+qreward.judges.quality.correct_at=0.5"
STYLE = "+qreward.judges.quality.criteria.style='is it well written?'"


def verdict(call):
    return "no verdict" if "break" in call.blocks["response"] else float(call.blocks["response"])


@pytest.fixture(params=list(TRAINERS))
def trainer(request, monkeypatch):
    """A trainer of the installed verl that is only good for the end of a validation, with our hook."""
    place, name, is_v1 = TRAINERS[request.param]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(place)
        cls = getattr(module, name)
    for owner, hooked in ((module, "process_validation_metrics"), (cls, "_validate")):
        monkeypatch.setattr(owner, hooked, inspect.unwrap(getattr(owner, hooked)))
    other = [place for place, *_ in TRAINERS.values() if place != module.__name__]
    monkeypatch.setitem(sys.modules, other[0], None)
    trainer_hooks._attached.clear()
    trainer_hooks.attach(SETTINGS)
    return SimpleNamespace(cls=cls, is_v1=is_v1, name=request.param)


@pytest.fixture
def validate(trainer, compose, tokenizer, make_data, tmp_path):
    """The metrics and the lines of the file of one validation: two answers to each prompt."""

    def validate(answers, *overrides):
        from verl.trainer.ppo.reward import load_reward_manager

        config = compose(
            *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "reward.num_workers=1"),
            f"+qreward_trainer={{name: {trainer.name}, tells_phases: false}}",
            *overrides,
        )

        async def score():
            manager = load_reward_manager(config, tokenizer)
            marked = {"extra_info": [{VALIDATION: True}]}
            try:
                return [await manager.run_single(make_data([text], columns=marked)) for text in answers]
            finally:
                await manager.aclose()

        results = asyncio.run(score())
        rows = [result["reward_extra_info"] for result in results]
        scores = [result["reward_score"] for result in results]
        keys = list(dict.fromkeys(key for row in rows for key in row)) if trainer.is_v1 else list(rows[0])
        # V1 fills up with None what a row lacks; the legacy trainer reads the keys of the first row in all of them.
        infos = {"reward": scores} | {
            key: [row.get(key) if trainer.is_v1 else row[key] for row in rows] for key in keys
        }
        uids = [f"u{number // 2}" for number in range(len(answers))]
        turns = [2] * len(answers) if trainer.is_v1 else [np.array([2] * len(answers))]
        trainer.cls._write_generations(uids, answers, uids, scores, infos, str(tmp_path / "files"), 3)
        lines = [json.loads(line) for line in (tmp_path / "files" / "3.jsonl").read_text().splitlines()]
        return trainer.cls._val_metrics_update(None, ["math"] * len(answers), uids, infos, turns), rows, lines

    return validate


@pytest.mark.parametrize("failing", [False, True], ids=["sound", "failing"])
@pytest.mark.parametrize("correct", [False, True], ids=["no correct_at", "correct_at"])
def test_a_validation_of_judged_samples(validate, judge_overrides, correct, failing):
    answers = ["10", "break" if failing else "0", "10", "4"]
    with JudgeServer(verdict) as server:
        more = [STYLE, "+qreward.judges.quality.invalid_retries=0", *([CORRECT_AT] if correct else [])]
        metrics, rows, _ = validate(answers, *judge_overrides(a=server), *more)
    assert all(math.isfinite(value) for value in metrics.values())
    assert [row["qreward/missing"] for row in rows] == [0.0, float(failing), 0.0, 0.0]
    for row in rows:
        assert row.keys() == rows[0].keys()
        assert all(isinstance(value, (float, str)) for value in row.values())
    core = "acc" if correct else "reward"
    # The failed one takes the mean of its prompt, so it stays a prompt of two answers.
    expected = {("acc", True): [1, 0.5], ("acc", False): [0.5, 0.5], ("reward", True): [1.0, 0.7]}
    by_prompt = expected.get((core, failing), [0.5, 0.7])
    assert metrics[f"val-core/math/{core}/mean@2"] == pytest.approx(sum(by_prompt) / 2)
    assert not any("mean@1" in name for name in metrics)
    assert metrics["val-aux/math/qreward/missing/mean@2"] == failing / 4
    assert correct or not any("/acc/" in name for name in metrics)


def test_a_prompt_of_which_every_sample_failed_is_left_out_and_counted(validate, judge_overrides):
    with JudgeServer(verdict) as server:
        more = ["+qreward.judges.quality.invalid_retries=0", CORRECT_AT]
        metrics, _, _ = validate(["10", "0", "break", "break", "10", "10"], *judge_overrides(a=server), *more)
    assert metrics["val-core/math/acc/mean@2"] == 0.75
    assert metrics["val-aux/math/reward/mean@2"] == 0.75
    assert metrics["val-aux/math/qreward/missing/mean@2"] == pytest.approx(1 / 3)
    counted = trainer_hooks._attached[0][0].since_last()
    assert (counted["qreward/val/unscored_prompts"], counted["qreward/val/samples"]) == (1, 6)


def test_votes_and_what_a_prompt_is_not_asked_for(trainer):
    """A failed row votes as the others do in turn; a key that a prompt does not have is no key of its rows."""
    infos = {
        "acc": [1.0, True, 0.0, math.nan, 1.0, 1.0],
        "pred": ["a", "a", "b", math.nan, "c", "c"],
        "only": [0.5, None, None, math.nan, None, None],
        "qreward/missing": [0.0, 0.0, 0.0, 1.0, 0.0, 0.0],
        "qreward/latency_s": [1.0, 1.0, 1.0, 5.0, 2.0, 2.0],
    }
    process = sys.modules[TRAINERS[trainer.name][0]].process_validation_metrics
    found = process(["s"] * 6, ["u"] * 4 + ["w"] * 2, infos)["s"]
    assert found["acc"]["mean@4"] == pytest.approx(2 / 3)
    assert found["acc"]["mean@2"] == 1.0
    assert found["acc"]["maj@4/mean"] > found["acc"]["mean@4"]
    assert found["only"] == pytest.approx({"mean@4": 0.5, "std@4": 0.0} | found["only"])
    assert "mean@2" not in found["only"]
    assert found["qreward/latency_s"]["mean@4"] == 2.0


def test_a_validation_of_what_a_function_returns(validate, tmp_path):
    (tmp_path / "rule.py").write_text(FUNCTION)
    custom = "reward.custom_reward_function"
    metrics, rows, lines = validate(
        ["10", "0", "break", "10"],
        *("reward.reward_manager.name=qreward", f"{custom}.path={tmp_path / 'rule.py'}", f"{custom}.name=rule"),
        *("+qreward.sources.compute_score.mode=thread", "+qreward.engine.max_attempts=1"),
    )
    assert not any(value is None for row in rows for value in row.values())
    assert [(line["input"], line["score"], line["step"]) for line in lines] == [
        *(("u0", 1.0, 3), ("u0", 0.0, 3), ("u1", 0.5, 3), ("u1", 1.0, 3))
    ]
    assert metrics["val-core/math/acc/mean@2"] == 0.75, "of the failed one's prompt 1"
    assert "val-aux/math/acc/mean@1" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())
