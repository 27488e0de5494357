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

START_S = 180.0
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


class Company:
    """The reward workers of one scenario after the other, and their judge. A context manager.

    A worker takes seconds to start. The next scenario of the same company has it, too: nothing stays in a worker that
    it would see.
    """

    def __init__(self, player: Player) -> None:
        self.player = player
        self.said: list[str] = []
        """All that these workers have warned of."""
        self._of: tuple[Any, ...] | None = None

    @property
    def alive(self) -> bool:
        return self.player.alive

    def __enter__(self) -> Company:
        self.player.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._dismiss()
        self.player.__exit__()

    def _dismiss(self) -> None:
        if self._of is not None:
            self.judge.__exit__()
            self._of = None

    def hire(self, scenario: Scenario) -> None:
        """Let the workers go that are there, and start those of a scenario, unless they are the same."""
        if self._of == scenario.company:
            return
        if self._of is not None:
            self.player.must("let_go", key="company")
            self._dismiss()
        self.judge, self._of, self.said = scenario.judge.start().__enter__(), scenario.company, []
        self.player.must("hire", key="company", keys=scenario_keys(scenario, self.judge.base_url))


def play(scenario: Scenario, company: Company) -> Played:
    """Play a scenario on ROLL's scheduler and reward workers. What its workers have said before counts as said."""
    company.hire(scenario)
    with dying(company.judge):
        reply = company.player.ask(
            "play",
            key="company",
            keys=scenario_keys(scenario, company.judge.base_url),
            steps=scenario.steps,
            validation=scenario.evaluate,
            items=VAL_ITEMS if scenario.evaluate else ITEMS,
        )
        company.said.extend(reply.said)
    steps = tuple(played_step(told, scenario) for told in reply.result or ())
    return Played(steps, (), reply.error, reply.text, tuple(company.said), reply.complaints)
