"""Plays scenarios on `FakeRollTrainer`, in the test process: the other half of what `real` does."""

from __future__ import annotations

from typing import Any

from qreward_plugins.testing import FakeRollTrainer, roll_stand_in

from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of
from ..played import Played, PlayedStep
from ..scenarios import Scenario, shorter
from .describe import describe, played_step
from .scenarios import DOMAIN, SEED, VAL_ITEMS, WATCHDOG_S, item_row, keys_of


def play(scenario: Scenario) -> Played:
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
    # The pipeline names the domain before what its scheduler tells, and `real` looks at the scheduler.
    metrics = {name.removeprefix(f"{DOMAIN}/"): value for name, value in result.metrics.items()}
    return played_step({**describe(result.batch, result.responses, raw), "metrics": metrics}, scenario)
