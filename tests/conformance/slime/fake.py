"""Plays scenarios on `FakeSlimeTrainer`, in the test process: the other half of what `real` does."""

from __future__ import annotations

from typing import Any

import slime_adapter
from qreward_plugins.testing import FakeSlimeTrainer, SlimeSample, slime_stand_in

from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of
from ..played import Played, PlayedStep
from ..scenarios import Scenario, shorter
from .rollouts import describe, flags_of, parts_of, played_sample, rows
from .scenarios import EVAL_DRAFTS, EVAL_ITEMS, WATCHDOG_S


def play(scenario: Scenario) -> Played:
    """Play a scenario on the fake trainer."""
    steps: list[PlayedStep] = []
    evaluations: list[PlayedStep] = []
    error: Exception | None = None
    with slime_stand_in(), shorter(scenario.judge).start() as judge, dying(judge):
        config = scenario.config(judge.base_url)
        with FakeSlimeTrainer(**_flags(scenario), qreward=config, timeout_s=WATCHDOG_S) as trainer:
            if scenario.mode == "fan_out":

                async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
                    return parts_of(args, await trainer.generate(args, sample, sampling_params))

                trainer.args.custom_generate_function_path = fan_out
            try:
                for number in range(scenario.steps):
                    if scenario.evaluate:
                        evaluations.append(_evaluation(trainer, number))
                    steps.append(_step(trainer, number))
            except Exception as raised:
                error = raised
            finally:
                slime_adapter.close()
    return Played(tuple(steps), tuple(evaluations), type(error).__name__ if error else None, str(error or ""))


def _flags(scenario: Scenario) -> dict[str, Any]:
    return {
        **flags_of(scenario),
        "prompts": rows(ITEMS),
        "respond": lambda sample, rng: _draft_of(sample).response,
        "hold": lambda sample: scenario.never_generated(_draft_of(sample)),
        "custom_rm_path": "slime_adapter.reward",
        "eval_datasets": {"sums": rows(EVAL_ITEMS)} if scenario.evaluate else None,
    }


def _draft_of(sample: SlimeSample) -> Draft:
    assert sample.index is not None
    drafts = EVAL_DRAFTS if sample.group_index is None else GROUP_SIZE
    return Draft(item_of(str(sample.prompt)), sample.index % drafts)


def _step(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    step = trainer.rollout(number)
    # Every token has the reward that trains.
    tokens = [[float(reward)] * len(mask) for reward, mask in zip(step.rewards, step.loss_masks, strict=True)]
    told = zip(step.raw_rewards, step.rewards, tokens, step.loss_masks, strict=True)
    return PlayedStep(tuple(map(played_sample, map(describe, step.samples), told)), step.metrics)


def _evaluation(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    seen: list[Any] = []

    def log(rollout_id: int, args: Any, data: dict[str, Any], extra: dict[str, Any] | None) -> bool:
        # The log hook takes failed samples out of the data in place.
        seen.extend(data["sums"]["samples"])
        return slime_adapter.log_eval(rollout_id, args, data, extra)

    trainer.args.custom_eval_rollout_log_function_path = log
    metrics = trainer.evaluate(number).metrics
    return PlayedStep(tuple(played_sample(describe(sample)) for sample in seen), metrics)
