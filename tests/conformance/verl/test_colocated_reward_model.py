"""Beside a reward model of verl on the rollout's GPUs, the V1 trainer passes no ground truth and no data source with a
sample: a reward function is refused at the first one, and a judge that would see a reference says that it does not.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from qreward_plugins.testing import JudgeServer

from .agreement import NEEDS_VERL
from .runs import CPU, RECORDER, recipe

pytestmark = [*NEEDS_VERL, pytest.mark.usefixtures("verl_and_tasks")]

STEPS = 2
MODULE = RECORDER / "verl_reward_model.py"
FUNCTION = f"""
sources:
  rule: {{kind: function, function: "{MODULE}:score"}}
judges:
  right: {{kind: function}}
"""
LLM = """
sources:
  only: {kind: openai, base_url: "${oc.env:JUDGE_URL}", model: judge}
judges:
  sums: {kind: llm, instructions: "Is the answer right?"}
"""
NOT_PASSED = "passes no ground truth"


def train(out: Path, configuration: str, *, use_v1: bool) -> tuple[str | None, list[dict], str]:
    """Train `STEPS` steps. Returns what ended the training before that, what the tracker got, and verl's log."""
    modules = recipe()
    sizes = modules.tasks.Sizes(learning_steps=5, habit_steps=2, val_questions=8)
    assets = modules.tasks.prepare(out / "assets", sizes)
    reward_model = shutil.copytree(assets.tokenizer, out / "reward_model")
    shutil.copytree(assets.model, reward_model, dirs_exist_ok=True)
    file = out / "judges.yaml"
    file.write_text(configuration)
    ended = None
    with JudgeServer(lambda call: 0.5) as server:
        try:
            modules.training.train(
                assets,
                out,
                algorithm="grpo",
                steps=STEPS,
                environment={
                    "QREWARD_CONFIG": str(file),
                    "JUDGE_URL": server.base_url,
                    "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
                    "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_reward_model",
                },
                on_step=lambda step: None,
                overrides=(
                    f"trainer.use_v1={use_v1}",
                    # The reward model scores a batch at once, and a validation with it fails in verl 0.9.0 already.
                    "trainer.val_before_train=False",
                    "reward.reward_model.enable=True",
                    f"reward.reward_model.model_path={reward_model}",
                    "reward.reward_model.rollout.name=idle",
                    "reward.reward_model.rollout.tensor_model_parallel_size=1",
                    f"reward.custom_reward_function.path={MODULE}",
                    "reward.custom_reward_function.name=score",
                ),
            )
        except modules.training.TrainingFailed as error:
            ended = str(error)
    tracked = out / "grpo.jsonl"
    records = [json.loads(line)["data"] for line in tracked.read_text().splitlines()] if tracked.exists() else []
    return ended, records, (out / "grpo.log").read_text(errors="replace")


def test_a_function_is_refused_at_the_first_sample_of_v1(tmp_path):
    ended, records, log = train(tmp_path, FUNCTION, use_v1=True)
    assert ended is not None
    assert records == []
    assert NOT_PASSED in log
    assert "Set reward.reward_model.enable_resource_pool=True, or trainer.use_v1=False" in log


def test_a_function_scores_in_the_legacy_trainer(tmp_path):
    ended, records, log = train(tmp_path, FUNCTION, use_v1=False)
    assert ended is None
    assert [record["qreward/failed_rate"] for record in records if "qreward/failed_rate" in record] == [0.0] * STEPS
    assert NOT_PASSED not in log


def test_a_judge_without_a_reference_warns_and_scores_in_v1(tmp_path):
    ended, records, log = train(tmp_path, LLM, use_v1=True)
    assert ended is None
    assert [record["qreward/failed_rate"] for record in records if "qreward/failed_rate" in record] == [0.0] * STEPS
    assert "no judge sees a reference answer" in log
