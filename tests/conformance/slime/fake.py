"""Plays scenarios on `FakeSlimeTrainer`, in the test process: the other half of what `real` does."""

from __future__ import annotations

from typing import Any

import slime_adapter
from qreward_plugins.testing import FakeSlimeTrainer, SlimeSample, slime_stand_in

from ..judges import GROUP_SIZE, ITEMS, Draft, dying, item_of, label_of, prompt_of, read_response
from ..played import Played, PlayedSample, PlayedStep
from ..scenarios import Scenario, shorter
from .rollouts import parts_of
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
    flags: dict[str, Any] = {
        "prompts": _rows(ITEMS),
        "respond": lambda sample, rng: _draft_of(sample).response,
        "hold": lambda sample: scenario.never_generated(_draft_of(sample)),
        "rollout_batch_size": scenario.prompts,
        "n_samples_per_prompt": GROUP_SIZE,
        "over_sampling_batch_size": max(scenario.oversampling, scenario.prompts),
        "advantage_estimator": scenario.advantage_estimator,
        "normalize_advantages": scenario.normalize_advantages,
        "group_rm": scenario.mode == "group",
        "partial_rollout": scenario.partial,
        "reward_key": scenario.reward_key,
        "custom_rm_path": "slime_adapter.reward",
        "custom_rollout_log_function_path": "slime_adapter.log_rollout",
        "custom_eval_rollout_log_function_path": "slime_adapter.log_eval",
    }
    if scenario.hook:
        flags["custom_reward_post_process_path"] = "slime_adapter.post_process"
    if scenario.drop_failed_groups:
        flags["dynamic_sampling_filter_path"] = "slime_adapter.drop_failed_groups"
    if scenario.mode == "group":
        flags["eval_function_path"] = "slime_adapter.eval_rollout"
    if scenario.evaluate:
        flags["eval_datasets"] = {"sums": _rows(EVAL_ITEMS)}
        flags["n_samples_per_eval_prompt"] = EVAL_DRAFTS
    return flags


def _rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt_of(item), "label": label_of(item), "metadata": {"item": item}} for item in range(count)]


def _draft_of(sample: SlimeSample) -> Draft:
    assert sample.index is not None
    drafts = EVAL_DRAFTS if sample.group_index is None else GROUP_SIZE
    return Draft(item_of(str(sample.prompt)), sample.index % drafts)


def _step(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    step = trainer.rollout(number)
    told = zip(step.raw_rewards, step.rewards, step.token_advantages, step.loss_masks, strict=True)
    return PlayedStep(tuple(map(_played, step.samples, told)), step.metrics)


def _evaluation(trainer: FakeSlimeTrainer, number: int) -> PlayedStep:
    seen: list[SlimeSample] = []
    evaluate = trainer._evaluate

    def remember(*arguments: Any, **keywords: Any) -> Any:
        output = evaluate(*arguments, **keywords)
        # The log hook takes failed samples out of the data in place.
        seen.extend(output.data["sums"]["samples"])
        return output

    trainer._evaluate = remember
    try:
        evaluation = trainer.evaluate(number)
    finally:
        trainer._evaluate = evaluate
    return PlayedStep(tuple(_played(sample) for sample in seen), evaluation.metrics)


def _played(sample: SlimeSample, told: tuple[Any, ...] = (None, None, (), ())) -> PlayedSample:
    raw, trained, advantages, mask = told
    record = sample.metadata.get("qreward") or {"failed": True, "cause": "no record"}
    return PlayedSample(
        read_response(sample.response),
        sample.reward,
        raw,
        trained,
        tuple(advantages),
        tuple(mask),
        bool(record["failed"] or record.get("excluded", False)),
        record["cause"],
        sample.group_index,
        sample.remove_sample,
        sample.status.value,
        sample.non_generation_time,
    )
