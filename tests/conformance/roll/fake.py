"""Plays scenarios on `FakeRollTrainer`, in the test process: the other half of what `real` does."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from qreward_plugins.testing import FakeRollTrainer, RollDataProto, RollDraft, roll_stand_in

from ..bad_minutes import shorter
from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of, read_response
from .played import Played, PlayedSample, PlayedStep
from .rows import item_row
from .scenarios import DOMAIN, LOOP, OWN_LOOP, SEED, TAG, VAL_ITEMS, WATCHDOG_S, WORKER, Scenario

PROMPT_LENGTH = 24
SEQUENCE_LENGTH = 40
"""As in ROLL's own configuration here."""


def play(scenario: Scenario) -> Played:
    """Play a scenario on the fake trainer."""
    steps: list[PlayedStep] = []
    error: Exception | None = None
    with (
        roll_stand_in(over_installed=True),
        _heard("roll_adapter", logging.WARNING) as said,
        _heard("asyncio", logging.ERROR) as complaints,
        shorter(scenario.judge).start() as judge,
        dying(judge),
        FakeRollTrainer(_rewards(scenario, judge.base_url), **_flags(scenario)) as trainer,
    ):
        try:
            for _ in range(scenario.steps):
                steps.append(_validation(trainer) if scenario.validation else _step(trainer))
        except Exception as raised:
            error = raised
    return Played(
        tuple(steps), type(error).__name__ if error else None, str(error or ""), tuple(said), tuple(complaints)
    )


def _rewards(scenario: Scenario, base_url: str) -> dict[str, Any]:
    worker = {
        "worker_cls": WORKER,
        "tag_included": [TAG],
        "world_size": scenario.workers,
        "reward_manager_config": [scenario.config(base_url)],
    }
    return {DOMAIN: worker}


def _flags(scenario: Scenario) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "rows": _rows(ITEMS),
        "respond": _respond,
        "seed": SEED,
        "timeout_s": WATCHDOG_S,
        "rollout_batch_size": scenario.prompts,
        "num_return_sequences_in_group": GROUP_SIZE,
        "prompt_length": PROMPT_LENGTH,
        "sequence_length": SEQUENCE_LENGTH,
        "adv_estimator": "grpo",
        "is_num_return_sequences_expand": scenario.mode == "single",
        "generate_opt_level": 0 if scenario.mode == "batch" else 1,
        "user_defined_rollout_loop_cls": LOOP if scenario.loop else OWN_LOOP,
    }
    if scenario.validation:
        flags["val_rows"] = _rows(VAL_ITEMS)
        flags["val_generating_args"] = {"num_return_sequences": GROUP_SIZE}
    return flags


def _rows(count: int) -> list[dict[str, Any]]:
    return [item_row(item, DOMAIN, TAG) for item in range(count)]


def _respond(draft: RollDraft, _: random.Random) -> str:
    return Draft(item_of(draft.prompt), draft.number).response


def _step(trainer: FakeRollTrainer) -> PlayedStep:
    step = trainer.step()
    samples = tuple(
        PlayedSample(
            read_response(response),
            step.column("domain")[place],
            step.scores[place],
            step.raw_rewards[place],
            step.rewards[place],
            _largest(step.batch.batch["advantages"][place]),
            step.trained_tokens[place],
        )
        for place, response in enumerate(step.responses)
    )
    return _played(samples, step.metrics, step.batch)


def _validation(trainer: FakeRollTrainer) -> PlayedStep:
    validation = trainer.validate()
    tokens = validation.batch.batch["response_mask"].sum(-1).tolist()
    samples = tuple(
        PlayedSample(
            read_response(response),
            validation.column("domain")[place],
            validation.scores[place],
            validation.rewards[place],
            None,
            None,
            tokens[place],
        )
        for place, response in enumerate(validation.responses)
    )
    return _played(samples, validation.metrics, validation.batch)


def _played(samples: tuple[PlayedSample, ...], metrics: Mapping[str, Any], batch: RollDataProto) -> PlayedStep:
    # The pipeline names the domain before what its scheduler tells, and `real` looks at the scheduler.
    return PlayedStep(
        samples,
        {name.removeprefix(f"{DOMAIN}/"): value for name, value in metrics.items()},
        tuple(sorted(batch.batch.keys())),
        tuple(sorted(batch.non_tensor_batch.keys())),
    )


def _largest(values: torch.Tensor) -> float:
    """The value farthest from zero; NaN where there is one."""
    return values[values.abs().argmax()].item() if values.isfinite().all() else float("nan")


@contextmanager
def _heard(logger: str, level: int) -> Iterator[list[str]]:
    """What is logged meanwhile."""
    heard: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    ear = Ear(level)
    logging.getLogger(logger).addHandler(ear)
    try:
        yield heard
    finally:
        logging.getLogger(logger).removeHandler(ear)
