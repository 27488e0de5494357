"""Plays scenarios on ROLL: keys, judge servers, and the process in which ROLL runs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from ..judges import GROUP_SIZE, ITEMS, dying
from ..played import Played
from ..processes import PlayerProcess, environment
from ..scenarios import Scenario
from .describe import played_step
from .scenarios import DOMAIN, VAL_ITEMS, WATCHDOG_S, keys_of

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

    def __enter__(self) -> Player:
        # Ray's sockets are in it, whose paths must be short; a test's folder is not.
        self._session = tempfile.TemporaryDirectory(prefix="roll-", ignore_cleanup_errors=True)
        self.arguments += (self._session.name,)
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__()
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
