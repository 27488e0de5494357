"""Trainings with a real verl trainer on the CPU, and what each left behind."""

from __future__ import annotations

import importlib
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CPU = Path(__file__).parents[3] / "recipes" / "verl" / "cpu"
RECORDER = Path(__file__).with_name("recorder")
CONFIGURATIONS = Path(__file__).with_name("config")

EXPERIMENTAL = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}
"""verl's experimental trainers, which are made of the legacy one, and the programs that run them."""

NEEDS_VERL = [
    pytest.mark.trainer,
    pytest.mark.skipif(not os.environ.get("QREWARD_VERL"), reason="set QREWARD_VERL=1 to train with the real verl"),
]


@dataclass(frozen=True)
class Outcome:
    """What a training left behind. `rows`: every sample that was trained. `records`: what the tracker got."""

    rows: list[dict]
    records: list[dict]
    log: str
    error: str = ""
    """What ended it, if anything did."""

    @property
    def metrics(self) -> dict[int, dict]:
        """One mapping a step; the fully asynchronous trainer writes several lines."""
        metrics: dict[int, dict] = {}
        for record in self.records:
            metrics.setdefault(record["step"], {}).update(record["data"])
        return metrics

    @property
    def table(self) -> dict[tuple, dict]:
        """The rows by what the model wrote, where that is never the same twice."""
        table = {tuple(row["responses"]): row for row in self.rows}
        assert len(table) == len(self.rows)
        return table

    def told(self, name: str) -> list[Any]:
        """A metric, in the order in which the tracker got it."""
        return [record["data"][name] for record in self.records if name in record["data"]]


def recipe() -> SimpleNamespace:
    """The recipe's modules, which are scripts beside each other."""
    pytest.importorskip("verl", reason="verl is not installed (pip install 'qreward-plugins[demo]')")
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (pip install 'qreward-plugins[demo]')")
    sys.path.insert(0, str(CPU))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in ("scorer", "tasks", "training")})
    finally:
        sys.path.remove(str(CPU))


def prepared(folder: Path, **sizes: int) -> Any:
    """The recipe's data and its model, which has learned little."""
    tasks = recipe().tasks
    return tasks.prepare(folder / "assets", tasks.Sizes(**{"learning_steps": 5, "habit_steps": 2, **sizes}))


def train(
    assets: Any,
    out: Path,
    configuration: str,
    *overrides: str,
    steps: int,
    trainer: str = "",
    **environment: str,
) -> Outcome:
    """Train with GRPO. `trainer`: one of verl's experimental ones."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "judges.yaml").write_text(configuration)
    record = out / "rows.jsonl"
    record.write_text("")
    named = {"program": EXPERIMENTAL[trainer], "configurations": CONFIGURATIONS} if trainer else {}
    algorithm, training, error = trainer or "grpo", recipe().training, ""
    try:
        training.train(
            assets,
            out,
            algorithm=algorithm,
            steps=steps,
            environment={
                "QREWARD_CONFIG": str(out / "judges.yaml"),
                "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_scripted",
                "VERL_RECORD": str(record),
                **environment,
            },
            on_step=lambda step: None,
            overrides=overrides,
            **named,
        )
    except training.TrainingFailed as failure:
        error = str(failure)
    tracked, log = out / f"{algorithm}.jsonl", (out / f"{algorithm}.log").read_text(errors="replace")
    records = tracked.read_text().splitlines() if tracked.exists() else []
    rows = record.read_text().splitlines()
    return Outcome([*map(json.loads, rows)], [*map(json.loads, records)], log, error and f"{error}\n{log}")
