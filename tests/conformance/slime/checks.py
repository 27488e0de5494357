"""What must hold of everything that was played, whoever played it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from ..judges import GROUP_SIZE
from .played import Played, PlayedSample, PlayedStep
from .scenarios import Scenario

_GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED_BY_STD = ("grpo", "gspo", "cispo")
_TOLERANCE = 2e-5
"""slime normalises in float32."""


def check(scenario: Scenario, played: Played) -> None:
    """Everything below, for every step."""
    assert played.error == scenario.error, played.error_text
    assert not played.complaints, "\n".join(played.complaints)
    if scenario.error is not None:
        return
    assert len(played.steps) == scenario.steps
    for step in played.steps:
        check_failed_samples(scenario, step)
        check_train_data(scenario, step)
        check_advantages(scenario, step)
        check_metrics(step, "rollout")
    for step in played.evaluations:
        check_failed_samples(scenario, step)
        check_evaluation(scenario, step)


def number(scenario: Scenario, reward: Any) -> float:
    """The reward that trains, out of what the reward function returned."""
    return reward[scenario.reward_key] if scenario.reward_key else reward


def check_failed_samples(scenario: Scenario, step: PlayedStep) -> None:
    """Those samples have failed that had to, each with a cause; the others have the judge's reward."""
    failed = [sample for sample in step.samples if sample.failed]
    if scenario.scored == "all":
        assert not failed, [(sample.draft, sample.cause) for sample in failed]
    elif scenario.scored == "none":
        assert len(failed) == len(step.samples)
    elif scenario.scored == "unspoilt":
        assert {sample.draft for sample in failed} == {
            sample.draft for sample in step.samples if scenario.loses(sample.draft)
        }
        if scenario.judged_by in ("function", "both"):
            assert {sample.cause for sample in failed} <= {"infra/hung"}
    elif scenario.scored == "some":
        assert len(step.samples) - len(failed) == scenario.judge.answers
    for sample in step.samples:
        assert bool(sample.cause) == sample.failed
        reward = number(scenario, sample.reward)
        assert math.isfinite(reward)
        if not sample.failed:
            assert reward == sample.draft.reward
        if scenario.reward_key:
            assert sample.reward["failed"] == float(sample.failed)
            assert sample.reward["cause"] == sample.cause


def check_train_data(scenario: Scenario, step: PlayedStep) -> None:
    """Failed samples are masked and move nothing: the others get what they would get alone."""
    assert all(map(math.isfinite, (value for sample in step.samples for value in (sample.raw, sample.trained))))
    check_masks(scenario, step)
    for group in groups_of(scenario, step):
        scored = [sample for sample in group if not sample.failed]
        expected = normalised(scenario, [number(scenario, sample.reward) for sample in scored])
        if scenario.post_process:
            assert [sample.trained for sample in scored] == approximately(expected)
            if scenario.advantage_estimator in _GROUP_NORMALISED:
                assert all(sample.trained == 0.0 for sample in group if sample.failed)
    batch = [number(scenario, sample.reward) for sample in step.samples if not sample.failed]
    for group in by_prompt(step.samples):
        scored = [number(scenario, sample.reward) for sample in group if not sample.failed]
        assert [sample.raw for sample in group if not sample.failed] == scored
        # A group that failed whole gets the mean of the batch, which only the hook knows.
        around = scored or (batch if scenario.post_process else [])
        middle = statistics.fmean(around) if around else 0.0
        assert all(math.isclose(sample.raw, middle, abs_tol=_TOLERANCE) for sample in group if sample.failed)
    if step.default is not None and scenario.post_process:
        assert [sample.trained for sample in step.samples] == approximately(step.default), "not slime's own"


def check_masks(scenario: Scenario, step: PlayedStep) -> None:
    """No token of a failed sample trains, but for the one that slime's trainer insists on."""
    assert all(all(sample.mask) for sample in step.samples if not sample.failed)
    left = [sum(sample.mask) for sample in step.samples if sample.failed]
    if scenario.advantage_estimator == "reinforce_plus_plus":
        assert left == [1] * len(left)
    elif scenario.normalize_advantages and len(left) == len(step.samples):
        assert sum(left) == 1
    else:
        assert not any(left)
        assert all(sample.removed == sample.failed for sample in step.samples)


def check_advantages(scenario: Scenario, step: PlayedStep) -> None:
    """The trainer gets through, and every advantage is finite, also where it is masked."""
    assert not step.training_error, step.training_error
    assert len(step.advantages) == len(step.samples)
    assert all(math.isfinite(value) for values in step.advantages for value in values)


def groups_of(scenario: Scenario, step: PlayedStep) -> list[Sequence[PlayedSample]]:
    """What slime normalises together: the prompts' groups, or everything where their sizes are not what it expects."""
    samples = step.samples
    if len(samples) != scenario.prompts * GROUP_SIZE or scenario.advantage_estimator not in _GROUP_NORMALISED:
        return [samples] if scenario.advantage_estimator in _GROUP_NORMALISED else by_prompt(samples)
    return [samples[start : start + GROUP_SIZE] for start in range(0, len(samples), GROUP_SIZE)]


def by_prompt(samples: Sequence[PlayedSample]) -> list[Sequence[PlayedSample]]:
    groups: dict[int | None, list[PlayedSample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    return list(groups.values())


def normalised(scenario: Scenario, rewards: Sequence[float]) -> list[float]:
    """slime's normalisation of one group, in plain Python."""
    if scenario.advantage_estimator not in _GROUP_NORMALISED:
        return list(rewards)
    if not rewards:
        return []
    middle = statistics.fmean(rewards)
    centred = [reward - middle for reward in rewards]
    if scenario.advantage_estimator not in _DIVIDED_BY_STD or len(rewards) < 2:
        return centred
    deviation = statistics.stdev(rewards)
    return [value / (deviation + 1e-6) for value in centred]


class approximately(list[float]):
    """A list that equals another within float32's error of normalising, which a small deviation magnifies."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, list)
            and len(self) == len(other)
            and all(math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-3) for a, b in zip(self, other, strict=True))
        )


def check_metrics(step: PlayedStep, axis: str) -> None:
    """The metrics count the samples and the failures, and all are finite."""
    # What a monitor took out has not failed.
    failed = sum(sample.failed and sample.cause != "policy/screened" for sample in step.samples)
    screened = sum(sample.cause == "policy/screened" for sample in step.samples)
    metrics = {name: value for name, value in step.metrics.items() if name.startswith(f"{axis}/qreward/")}
    assert math.isclose(metrics[f"{axis}/qreward/screened_rate"], screened / len(step.samples))
    assert metrics[f"{axis}/qreward/samples"] == len(step.samples)
    assert metrics[f"{axis}/qreward/failed"] == failed
    assert math.isclose(metrics[f"{axis}/qreward/failed_rate"], failed / len(step.samples))
    by_cause = sum(metrics[f"{axis}/qreward/failed/{cause}"] for cause in ("infra", "verdict", "policy"))
    assert by_cause == failed
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in metrics.values()), metrics


def check_evaluation(scenario: Scenario, step: PlayedStep) -> None:
    """The mean of an evaluation is that of its scored samples; for pass rates, of the prompts scored whole."""
    spoilt = {sample.draft.item for sample in step.samples if sample.failed and scenario.log_passrate}
    counted = [sample for sample in step.samples if not sample.failed and sample.draft.item not in spoilt]
    scored = [number(scenario, sample.reward) for sample in counted]
    if scored:
        assert math.isclose(step.metrics["eval/sums"], statistics.fmean(scored))
    else:
        assert "eval/sums" not in step.metrics, "a mean of nothing"
    check_metrics(step, "eval/sums")
