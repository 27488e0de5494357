"""Plays scenarios: on ROLL, in a process of its own, and on `FakeRollTrainer`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from qreward_plugins.testing import FakeRollTrainer, roll_stand_in

from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of
from ..played import Played, PlayedStep
from ..processes import PlayerProcess, environment
from ..scenarios import Scenario, shorter
from .scenarios import DOMAIN, SEED, VAL_ITEMS, WATCHDOG_S, describe, item_row, keys_of, played_step

START_S = 300.0
"""Importing torch, transformers and ROLL from a cold disk, and starting Ray."""


class Player(PlayerProcess):
    """The process in which ROLL plays, with its Ray. A context manager."""

    def __init__(self, source: Path, folder: Path) -> None:
        super().__init__(
            "ROLL",
            "conformance.roll.player",
            folder,
            environment(
                "ROLL",
                (source,),
                ROLL_LOG_DIR=str(folder / "logs"),
                MODEL_DOWNLOAD_TYPE="HUGGINGFACE_HUB",
                HF_DATASETS_CACHE=str(folder / "datasets"),
                HF_DATASETS_DISABLE_PROGRESS_BARS="1",
            ),
            start_s=START_S,
            watchdog_s=WATCHDOG_S,
        )

    def start(self) -> None:
        # Ray's sockets are in it, whose paths must be short; a test's folder is not.
        self._session = tempfile.TemporaryDirectory(prefix="roll-", ignore_cleanup_errors=True)
        self.arguments = (str(self.folder), self._session.name)
        super().start()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        if self._process is not None:
            self._session.cleanup()


def scenario_keys(scenario: Scenario, base_url: str) -> dict[str, Any]:
    """ROLL's keys for a scenario."""
    keys = {**keys_of(scenario, base_url), "async_generation_ratio": int(scenario.asynchronous)}
    keys["rewards"][DOMAIN]["model_args"] = {"model_name_or_path": "${pretrain}"}
    if scenario.evaluate:
        keys["validation"] = {"generating_args": {"max_new_tokens": 16, "num_return_sequences": GROUP_SIZE}}
    return keys


def play(scenario: Scenario, player: Player) -> Played:
    """Play a scenario on ROLL's scheduler and reward workers."""
    with scenario.judge.start() as judge, dying(judge):
        reply = player.ask(
            "play",
            keys=scenario_keys(scenario, judge.base_url),
            steps=scenario.steps,
            validation=scenario.evaluate,
            items=VAL_ITEMS if scenario.evaluate else ITEMS,
        )
    steps = tuple(played_step(told, scenario) for told in reply.result or ())
    return Played(steps, (), reply.error, reply.text, reply.said, reply.complaints)


def play_fake(scenario: Scenario) -> Played:
    """Play a scenario on the fake trainer."""
    steps: list[PlayedStep] = []
    error: Exception | None = None
    with (
        roll_stand_in(over_installed=True),
        shorter(scenario.judge).start() as judge,
        dying(judge),
        FakeRollTrainer(**keys_of(scenario, judge.base_url), **_flags(scenario)) as trainer,
    ):
        try:
            for _ in range(scenario.steps):
                steps.append(_played(scenario, trainer.validate() if scenario.evaluate else trainer.step()))
        except Exception as raised:
            error = raised
    name = type(error).__name__ if error else None
    return Played(tuple(steps), (), name, str(error or ""))


def _flags(scenario: Scenario) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "rows": [*map(item_row, range(ITEMS))],
        "respond": lambda draft, rng: Draft(item_of(draft.prompt), draft.number).response,
        "seed": SEED,
        "timeout_s": WATCHDOG_S,
        "num_return_sequences_in_group": GROUP_SIZE,
        # As in ROLL's own configuration here.
        "prompt_length": 24,
        "sequence_length": 40,
        "adv_estimator": "grpo",
    }
    if scenario.evaluate:
        flags["val_rows"] = [*map(item_row, range(VAL_ITEMS))]
        flags["val_generating_args"] = {"num_return_sequences": GROUP_SIZE}
    return flags


def _played(scenario: Scenario, result: Any) -> PlayedStep:
    raw = result.rewards if scenario.evaluate else result.raw_rewards
    # The pipeline names the domain before what its scheduler tells, and `play` looks at the scheduler.
    metrics = {name.removeprefix(f"{DOMAIN}/"): value for name, value in result.metrics.items()}
    return played_step({**describe(result.batch, result.responses, raw), "metrics": metrics}, scenario)
