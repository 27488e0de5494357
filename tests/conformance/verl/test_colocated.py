"""A judge on the GPUs of a real verl trainer sleeps whenever the trainer uses them, and is awake for every reward."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import yaml

from .agreement import NEEDS_VERL
from .runs import CPU, RECORDER, recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "replicas"))
from pools import StandIns

pytestmark = [*NEEDS_VERL, pytest.mark.usefixtures("verl_and_tasks")]

STEPS = 2
MODES = {
    "sync": [],
    "colocate_async": ["trainer.v1.trainer_mode=colocate_async"],
    "legacy": ["trainer.use_v1=False"],
}


@pytest.mark.parametrize("mode", MODES)
def test_the_judge_sleeps_while_verl_trains(mode, tmp_path):
    stand_ins, modules = StandIns(tmp_path), recipe()
    assets = modules.tasks.prepare(
        tmp_path / "assets", modules.tasks.Sizes(learning_steps=5, habit_steps=2, val_questions=8)
    )
    own = {
        "kind": "replicas",
        "server": "vllm",
        "program": stand_ins.program(),
        "model": str(stand_ins.weights("first")),
        "platform": "cpu",
        "colocated": True,
        "sleep_mode": True,
    }
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64, "correct_at": 0.5}
    file = tmp_path / "judges.yaml"
    file.write_text(yaml.safe_dump({"sources": {"own": own}, "judges": {"sums": judge}}))
    out = tmp_path / "out"
    modules.training.train(
        assets,
        out,
        algorithm="grpo",
        steps=STEPS,
        environment={
            "QREWARD_CONFIG": str(file),
            "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
            "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_phases",
            "VERL_PHASES": str(tmp_path / "notes"),
        },
        on_step=lambda step: None,
        overrides=tuple(MODES[mode]),
    )
    events = [line.split()[1].partition("?")[0] for line in stand_ins.notes()]
    events = [event for event in events if event in ("/sleep", "/wake_up", "/_compute_old_log_prob", "/_update_actor")]
    assert events == ["/sleep", "/_compute_old_log_prob", "/_update_actor", "/wake_up"] * STEPS
    records = [json.loads(line)["data"] for line in (out / "grpo.jsonl").read_text().splitlines()]
    rates = [record["qreward/failed_rate"] for record in records if "qreward/failed_rate" in record]
    assert rates == [0.0] * STEPS
    validated = [record["qreward/val/failed_rate"] for record in records if "qreward/val/failed_rate" in record]
    assert validated
    assert set(validated) == {0.0}
    assert stand_ins.living() == [], "the servers end with the training"
