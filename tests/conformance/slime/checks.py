"""What must hold of everything that slime or its fake has played."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..checks import NORMALISING, check_counts, check_failures, check_raw, check_run, close, middle_of, own_metrics
from ..judges import GROUP_SIZE
from ..played import Played, PlayedSample, PlayedStep
from ..scenarios import Scenario

_GROUP_NORMALISED = ("grpo", "gspo", "cispo", "reinforce_plus_plus_baseline")
_DIVIDED_BY_STD = ("grpo", "gspo", "cispo")


def check(scenario: Scenario, played: Played) -> None:
    """Everything below, for every step."""
    if not check_run(scenario, played):
        return
    assert len(played.steps) == scenario.steps
    for step in played.steps:
        check_samples(scenario, step)
        check_train_data(scenario, step)
        assert all(len(sample.advantages) == len(sample.mask) for sample in step.samples)
        check_counts(scenario, own_metrics(step, "rollout/qreward/"), step)
    for step in played.evaluations:
        check_samples(scenario, step)
        check_evaluation(scenario, step)


def number(scenario: Scenario, sample: PlayedSample) -> float:
    """The reward that trains, out of what the reward function returned."""
    return sample.reward[scenario.reward_key] if scenario.reward_key else sample.reward


def check_samples(scenario: Scenario, step: PlayedStep) -> None:
    """Those have failed that had to, each with a cause; the others have the judge's reward."""
    check_failures(scenario, step)
    for sample in step.samples:
        assert bool(sample.cause) == sample.failed
        reward = number(scenario, sample)
        assert math.isfinite(reward)
        assert sample.failed or reward == sample.draft.reward
        if scenario.reward_key:
            assert (sample.reward["failed"], sample.reward["cause"]) == (float(sample.failed), sample.cause)
        if scenario.judged_by == "both":
            assert sample.cause in ("", "infra/hung")


def check_train_data(scenario: Scenario, step: PlayedStep) -> None:
    """Failed samples are masked and move nothing: the others get what they would get alone."""
    check_masks(scenario, step)
    groups: dict[object, list[PlayedSample]] = {}
    for sample in step.samples:
        groups.setdefault(sample.group, []).append(sample)
    # A group that failed whole gets the mean of the batch, which only the hook knows.
    whole = (middle_of(step.samples) if scenario.hook else None) or 0.0
    for group in groups.values():
        middle = middle_of(group)
        check_raw(group, whole if middle is None else middle)
    if not scenario.hook:
        return
    grouped = scenario.advantage_estimator in _GROUP_NORMALISED
    # Where its count is not what slime expects, as after a fan-out, the batch is one group.
    size = GROUP_SIZE if len(step.samples) == scenario.prompts * GROUP_SIZE else len(step.samples)
    for start in range(0, len(step.samples), size):
        group = step.samples[start : start + size]
        expected = normalised(scenario, [sample.raw for sample in group if not sample.failed])
        trained = [sample.trained for sample in group if not sample.failed]
        assert all(close(*pair, NORMALISING) for pair in zip(trained, expected, strict=True)), (trained, expected)
        assert not grouped or all(sample.trained == 0.0 for sample in group if sample.failed)
    if step.default is not None:
        trained = [sample.trained for sample in step.samples]
        assert all(close(*pair, NORMALISING) for pair in zip(trained, step.default, strict=True)), "not slime's own"


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


def normalised(scenario: Scenario, rewards: Sequence[float]) -> list[float]:
    """slime's normalisation of one group, in plain Python."""
    if scenario.advantage_estimator not in _GROUP_NORMALISED or not rewards:
        return list(rewards)
    middle = statistics.fmean(rewards)
    spread = statistics.stdev(rewards) + 1e-6 if len(rewards) > 1 else 1.0
    divided_by = spread if scenario.advantage_estimator in _DIVIDED_BY_STD else 1.0
    return [(reward - middle) / divided_by for reward in rewards]


def check_evaluation(scenario: Scenario, step: PlayedStep) -> None:
    """The mean of an evaluation is that of its scored samples."""
    scored = [number(scenario, sample) for sample in step.samples if not sample.failed]
    assert scored or "eval/sums" not in step.metrics, "a mean of nothing"
    assert not scored or close(step.metrics["eval/sums"], statistics.fmean(scored))
    check_counts(scenario, own_metrics(step, "eval/sums/qreward/"), step)
