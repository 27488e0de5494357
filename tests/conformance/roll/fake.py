"""Plays scenarios on `FakeRollTrainer`, in the test process: the other half of what `real` does."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from qreward_plugins.testing import FakeRollTrainer, roll_stand_in

from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of, read_response
from ..played import Played, PlayedSample, PlayedStep
from ..scenarios import Scenario, shorter
from .rows import item_row
from .scenarios import DOMAIN, LOOP, OWN_LOOP, SEED, TAG, VAL_ITEMS, WATCHDOG_S, WORKER, masks, tree_of


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
                steps.append(_validation(trainer, scenario) if scenario.evaluate else _step(trainer, scenario))
        except Exception as raised:
            error = raised
    name = type(error).__name__ if error else None
    return Played(tuple(steps), (), name, str(error or ""), tuple(said), tuple(complaints))


def _rewards(scenario: Scenario, base_url: str) -> dict[str, Any]:
    worker = {
        "worker_cls": WORKER,
        "tag_included": [TAG],
        "world_size": scenario.workers,
        "reward_manager_config": [tree_of(scenario, base_url)],
    }
    return {DOMAIN: worker}


def _flags(scenario: Scenario) -> dict[str, Any]:
    flags: dict[str, Any] = {
        "rows": _rows(ITEMS),
        "respond": lambda draft, rng: Draft(item_of(draft.prompt), draft.number).response,
        "seed": SEED,
        "timeout_s": WATCHDOG_S,
        "rollout_batch_size": scenario.prompts,
        "num_return_sequences_in_group": GROUP_SIZE,
        # As in ROLL's own configuration here.
        "prompt_length": 24,
        "sequence_length": 40,
        "adv_estimator": "grpo",
        "is_num_return_sequences_expand": scenario.mode == "single",
        "generate_opt_level": 0 if scenario.mode == "batch" else 1,
        "user_defined_rollout_loop_cls": LOOP if scenario.hook else OWN_LOOP,
    }
    if scenario.evaluate:
        flags["val_rows"] = _rows(VAL_ITEMS)
        flags["val_generating_args"] = {"num_return_sequences": GROUP_SIZE}
    return flags


def _rows(count: int) -> list[dict[str, Any]]:
    return [item_row(item, DOMAIN, TAG) for item in range(count)]


def _step(trainer: FakeRollTrainer, scenario: Scenario) -> PlayedStep:
    step = trainer.step()
    advantages = [(_largest(row),) for row in np.asarray(step.batch.batch["advantages"])]
    trained = list(zip(step.raw_rewards, step.rewards, advantages, step.trained_tokens, strict=True))
    return _played(scenario, step, trained, step.metrics)


def _validation(trainer: FakeRollTrainer, scenario: Scenario) -> PlayedStep:
    validation = trainer.validate()
    tokens = np.asarray(validation.batch.batch["response_mask"]).sum(-1)
    trained = [(raw, None, (), count) for raw, count in zip(validation.rewards, tokens, strict=True)]
    return _played(scenario, validation, trained, validation.metrics)


def _played(
    scenario: Scenario, result: Any, trained: Sequence[tuple[Any, ...]], metrics: Mapping[str, Any]
) -> PlayedStep:
    samples = []
    told = zip(result.responses, result.scores, result.column("domain"), trained, strict=True)
    for response, score, domain, (raw, normalised, advantages, tokens) in told:
        draft = read_response(response)
        failed = not tokens if masks(scenario) else scenario.fails(draft)
        mask = (1,) * int(tokens)
        samples.append(PlayedSample(draft, score, raw, normalised, advantages, mask, failed, group=domain))
    # The pipeline names the domain before what its scheduler tells, and `real` looks at the scheduler.
    named = {name.removeprefix(f"{DOMAIN}/"): value for name, value in metrics.items()}
    columns = sorted([*result.batch.batch.keys(), *result.batch.non_tensor_batch.keys()])
    return PlayedStep(tuple(samples), named, tuple(columns))


def _largest(values: Any) -> float:
    """The value farthest from zero; NaN where there is one."""
    return float(values[np.abs(values).argmax()]) if np.isfinite(values).all() else float("nan")


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
