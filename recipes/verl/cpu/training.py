"""Runs the real trainer (`verl.trainer.main_ppo`) on the CPU as a subprocess, and reports each step."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tasks import Assets

HERE = Path(__file__).resolve().parent
_LOOK_EVERY_S = 0.25
_END_WITHIN_S = 20.0
_REWARD = "critic/rewards/mean"
_ACCURACY = "acc/mean@1"
_SECONDS = "timing_s/step"


class TrainingFailed(RuntimeError):
    """The trainer ended with an error. The message has the last lines of its log, and the log's path."""


@dataclass(frozen=True)
class Training:
    """The results of a training: its steps, and the share of right answers to held-out questions before and after."""

    steps: list[Step]
    accuracy_before: float
    accuracy_after: float


@dataclass(frozen=True)
class Step:
    """One step: its number from 1, the mean reward of its responses, and its seconds."""

    number: int
    reward: float
    seconds: float


def train(
    assets: Assets,
    out: Path,
    *,
    algorithm: str,
    steps: int,
    environment: Mapping[str, str],
    on_step: Callable[[Step], None],
    overrides: tuple[str, ...] = (),
    program: str = "verl.trainer.main_ppo",
    configurations: Path = HERE,
) -> Training:
    """Train for `steps` steps with the recipe `algorithm` ("grpo" or "ppo", or another in the folder `configurations`),
    with the trainer that the module `program` runs.

    `on_step` is called after each step. The trainer's log and metrics go to the folder `out`. Raises `TrainingFailed`.
    However this call ends, no process of the trainer is left, unless this process is killed.
    """
    out.mkdir(parents=True, exist_ok=True)
    log, metrics = out / f"{algorithm}.log", out / f"{algorithm}.jsonl"
    metrics.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", program, "--config-dir", str(configurations), "--config-name", algorithm),
        f"hydra.searchpath=[pkg://verl.trainer.config,file://{HERE}]",
        f"data.train_files={assets.train}",
        f"data.val_files={assets.val}",
        f"actor_rollout_ref.model.path={assets.model}",
        f"actor_rollout_ref.model.tokenizer_path={assets.tokenizer}",
        f"trainer.total_training_steps={steps}",
        *overrides,
    ]
    done: list[Step] = []
    with log.open("wb") as sink, _running(command, out, _environment(environment, metrics), sink) as process:
        ended = False
        while not ended:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_EVERY_S)
                ended = True
            for step in _steps(metrics, done[-1].number if done else 0):
                done.append(step)
                on_step(step)
    if process.returncode != 0 or not done or done[-1].number < steps:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise TrainingFailed(f"{tail}\n\nverl ended with code {process.returncode} after {len(done)} steps; log: {log}")
    accuracies = _accuracies(metrics) or [math.nan]
    return Training(done, accuracies[0], accuracies[-1])


def _environment(extra: Mapping[str, str], metrics: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH")))),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
        **extra,
    }


@contextmanager
def _running(
    command: list[str], folder: Path, environment: Mapping[str, str], sink: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        # Ray ends its own processes when the trainer gets this signal; the rest of its group is killed.
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_WITHIN_S)


def _steps(metrics: Path, after: int) -> Iterator[Step]:
    """The steps in verl's metrics file after the one numbered `after`."""
    for record in _records(metrics):
        if record["step"] > after and _REWARD in record["data"]:
            yield Step(record["step"], record["data"][_REWARD], record["data"][_SECONDS])


def _accuracies(metrics: Path) -> list[float]:
    """The validations in verl's metrics file."""
    return [value for record in _records(metrics) for key, value in record["data"].items() if key.endswith(_ACCURACY)]


def _records(metrics: Path) -> Iterator[dict[str, Any]]:
    if not metrics.exists():
        return
    for line in metrics.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)
