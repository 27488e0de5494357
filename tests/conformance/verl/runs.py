"""Trainings with a real verl trainer on the CPU whose judges and reward functions misbehave, and what came of them."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

from qreward_plugins.testing import Faults, JudgeServer

CPU = Path(__file__).parents[3] / "recipes" / "verl" / "cpu"
RECORDER = Path(__file__).with_name("recorder")
CONFIGURATIONS = Path(__file__).with_name("config")

STEPS = 7
PROMPTS = 8
GROUP = 4
HELD_OUT = 16

ALL_FAIL = range(HELD_OUT + 40, HELD_OUT + 120)
"""The requests that all fail: more than two steps of them. An empty response is scored without a request, so where a
step begins is not known."""
DIES = HELD_OUT + 150
"""The request in the middle of which the judge goes down."""
DOWN_S = 3.0

MINUTE_S = 60.0
"""How long the judge of a bad minute is down."""
DOWN_AT = HELD_OUT + 70
"""The request in the middle of which it goes down, once. No request after it needs the number of any other."""
PROSE_EVERY = 10
HANG_EVERY = 50
"""One response in so many hangs the reward function of a bad minute, on every try."""

CONFIGURATION = """
sources:
  only: {kind: openai, base_url: "${oc.env:JUDGE_URL}", model: judge}
judges:
  sums: {kind: llm, invalid_retries: 0, correct_at: 1.0, instructions: "Is the answer right?"}
engine: {deadline_s: 20, seed: 0, max_attempts: 1}
"""

BAD_MINUTE = f"""
sources:
  only: {{kind: openai, base_url: "${{oc.env:JUDGE_URL}}", model: judge}}
  rules:
    kind: function
    function: verl_hanging:score
    kwargs: {{every: {HANG_EVERY}}}
    timeouts: {{total_s: 2}}
judges:
  sums: {{kind: llm, instructions: "Is the answer right?"}}
  length: {{kind: function, sources: [rules]}}
  both: {{kind: sum, weights: {{sums: 0.9, length: 0.1}}}}
engine: {{seed: 0}}
"""
"""Every default, but for the time after which a call of the function is killed."""


@dataclass(frozen=True)
class Outcome:
    """What a training left behind: every sample that was trained, the metrics by step, and the validations."""

    rows: list[dict]
    metrics: dict[int, dict]
    told: list[dict]
    """What the tracker got, line by line."""
    validations: list[list[dict]]
    log: str
    hung: int
    """Calls of the reward function that hung."""

    def failed(self, cause: str, *, split: str = "train") -> int:
        """How many samples of a split the metrics count as failed for this cause."""
        name = f"qreward/{'val/' if split == 'val' else ''}failed/{cause}"
        return int(sum(metrics.get(name, 0) for metrics in self.told))

    @property
    def groups(self) -> dict[str, list[dict]]:
        groups = defaultdict(list)
        for row in self.rows:
            groups[row["uid"]].append(row)
        return groups


class Judge:
    """A judge that goes down in the middle of request `down_at` and comes back `down_s` seconds later. A subclass says
    what becomes of its other requests.
    """

    down_at: int
    down_s: float

    def __init__(self, score):
        self._server = JudgeServer(score, faults=Faults(script=self._fault))
        self._ups_and_downs = None
        self._ending = threading.Event()

    def __enter__(self):
        self._server.start()
        return self._server

    def __exit__(self, *_):
        self._ending.set()
        if self._ups_and_downs is not None:
            self._ups_and_downs.join()
        self._server.stop()

    def fault(self, number):
        """The fault of request `number`, or None."""
        raise NotImplementedError

    def _fault(self, number):
        if number == self.down_at:
            self._ups_and_downs = threading.Thread(target=self._go_down)
            self._ups_and_downs.start()
            return "hang"
        return self.fault(number)

    def _go_down(self):
        self._server.stop()
        self._ending.wait(self.down_s)
        self._server.start()


def _by_step(records: list[dict]) -> dict[int, dict]:
    """One mapping a step; the fully asynchronous trainer writes several lines."""
    metrics: dict[int, dict] = {}
    for record in records:
        metrics.setdefault(record["step"], {}).update(record["data"])
    return metrics


class BadDay(Judge):
    """Fails three of ten requests, then all, dies and comes back; then it fails three of ten again."""

    down_at = DIES
    down_s = DOWN_S

    def fault(self, number):
        return "error_422" if number in ALL_FAIL or number % 10 in (2, 5, 8) else None


class BadMinute(Judge):
    """Answers one request in ten with prose, and is down for a minute."""

    down_at = DOWN_AT
    down_s = MINUTE_S

    def fault(self, number):
        return "prose" if number % PROSE_EVERY == 3 else None


def recipe() -> SimpleNamespace:
    """The recipe's modules, which are scripts beside each other."""
    sys.path.insert(0, str(CPU))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in ("scorer", "tasks", "training")})
    finally:
        sys.path.remove(str(CPU))


EXPERIMENTAL = {
    "one_step_off": "verl.experimental.one_step_off_policy.main_ppo",
    "fully_async": "verl.experimental.fully_async_policy.fully_async_main",
}
"""verl's experimental trainers, which are made of the legacy one, and the programs that run them."""
TRAINERS = ("v1", "legacy", *EXPERIMENTAL)


def train(out: Path, trainer: str, *, judge: type[Judge] = BadDay, configuration: str = CONFIGURATION) -> Outcome:
    """Train `STEPS` steps with GRPO and one of `TRAINERS`, validating before and after."""
    modules = recipe()
    sizes = modules.tasks.Sizes(learning_steps=20, habit_steps=5, val_questions=HELD_OUT)
    assets = modules.tasks.prepare(out / "assets", sizes)
    file = out / "judges.yaml"
    file.write_text(configuration)
    record = out / "rows.jsonl"
    record.touch()
    dumped = out / "validations"
    algorithm = trainer if trainer in EXPERIMENTAL else "grpo"
    overrides = [] if trainer in EXPERIMENTAL else [f"trainer.use_v1={trainer == 'v1'}"]
    if trainer != "one_step_off":
        # With a folder for it, validation ends verl's one-step-off trainer: its class never makes `_dump_executor`.
        overrides.append(f"trainer.validation_data_dir={dumped}")
    with judge(modules.scorer.score) as server:
        modules.training.train(
            assets,
            out,
            algorithm=algorithm,
            steps=STEPS,
            **({"program": EXPERIMENTAL[trainer], "configurations": CONFIGURATIONS} if trainer in EXPERIMENTAL else {}),
            environment={
                "QREWARD_CONFIG": str(file),
                "JUDGE_URL": server.base_url,
                "PYTHONPATH": os.pathsep.join((str(CPU), str(RECORDER), os.environ.get("PYTHONPATH", ""))),
                "VERL_USE_EXTERNAL_MODULES": "verl_cpu,verl_recorder",
                "VERL_RECORD": str(record),
                "VERL_HUNG": str(out / "hung.txt"),
            },
            on_step=lambda step: None,
            overrides=tuple(overrides),
        )
    records = [json.loads(line) for line in (out / f"{algorithm}.jsonl").read_text().splitlines()]
    dumps = sorted(dumped.glob("*.jsonl"), key=lambda path: int(path.stem))
    return Outcome(
        [json.loads(line) for line in record.read_text().splitlines()],
        _by_step(records),
        [record["data"] for record in records],
        [[json.loads(line) for line in dump.read_text().splitlines()] for dump in dumps],
        (out / f"{algorithm}.log").read_text(errors="replace"),
        len((out / "hung.txt").read_text().splitlines()) if (out / "hung.txt").exists() else 0,
    )
