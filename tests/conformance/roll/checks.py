"""What must hold of everything that was played, whoever played it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from ..judges import GROUP_SIZE
from .played import Played, PlayedSample, PlayedStep
from .scenarios import CORRECT_AT, LOOP, VAL_ITEMS, Scenario

_TOLERANCE = 2e-5
"""ROLL computes in float32."""
_NORMALISING = 1e-3
"""What float32 loses where a group's deviation is small."""

METRICS = frozenset(
    f"qreward/{name}"
    for name in (
        "samples_sum",
        "failed_sum",
        "failed_rate",
        "failed/infra_sum",
        "failed/verdict_sum",
        "failed/policy_sum",
        "attempts_mean",
        "latency_s_mean",
        "latency_s_p99",
        "latency_s_max",
        "tokens_sum",
        "cost_usd_sum",
        "cached_rate",
        "cut_rate",
        "floor_rate",
    )
)
"""What every call tells, whatever its configuration."""


def check(scenario: Scenario, played: Played) -> None:
    """Everything below, for every step."""
    assert played.error == scenario.error, played.error_text
    assert not played.complaints, "\n".join(played.complaints)
    if scenario.error is not None:
        return
    assert len(played.steps) == scenario.steps
    for step in played.steps:
        prompts = VAL_ITEMS if scenario.validation else scenario.prompts
        assert len(step.samples) == prompts * GROUP_SIZE
        check_finite(step)
        check_scored_samples(scenario, step)
        if scenario.validation:
            check_validation(scenario, step)
        else:
            check_failed_samples(scenario, step)
            check_normalisation(scenario, step)
        check_metrics(scenario, step)


def has_failed(scenario: Scenario, sample: PlayedSample) -> bool | None:
    """Whether the scenario says that this sample has failed; None where it does not say."""
    by_kind = {"all": False, "none": True, "unspoilt": scenario.loses(sample.draft)}
    return by_kind.get(scenario.scored)


def groups_of(samples: Sequence[PlayedSample]) -> list[Sequence[PlayedSample]]:
    """What ROLL normalises together."""
    groups = [samples[start : start + GROUP_SIZE] for start in range(0, len(samples), GROUP_SIZE)]
    for group in groups:
        assert sorted(sample.draft.draft for sample in group) == list(range(GROUP_SIZE)), group
        assert len({sample.draft.item for sample in group}) == 1, group
    return groups


def check_finite(step: PlayedStep) -> None:
    for sample in step.samples:
        numbers = (sample.score, sample.raw, sample.trained, sample.advantage)
        assert all(number is None or math.isfinite(number) for number in numbers), sample


def check_scored_samples(scenario: Scenario, step: PlayedStep) -> None:
    """Those that have a reward have the judge's, and train."""
    for sample in step.samples:
        if has_failed(scenario, sample) is False:
            assert sample.raw is None or close(sample.raw, sample.draft.reward), sample
            assert sample.score == float(sample.draft.reward >= CORRECT_AT), sample
            assert sample.mask > 0, sample


def check_failed_samples(scenario: Scenario, step: PlayedStep) -> None:
    """Failed samples are masked where something can mask them, and do not move the mean of their group."""
    for group in groups_of(step.samples):
        if scenario.masks:
            failed = [sample for sample in group if not sample.mask]
            known = {has_failed(scenario, sample) for sample in group} != {None}
            assert not known or failed == [sample for sample in group if has_failed(scenario, sample)]
            assert all(sample.advantage == 0.0 for sample in failed), failed
        else:
            assert all(sample.mask for sample in group)
            failed = [sample for sample in group if has_failed(scenario, sample)]
        scored = [sample for sample in group if sample not in failed]
        if not failed or not scored or not (scenario.masks or scenario.mode != "single"):
            continue
        if isinstance(scenario.on_failure, dict):
            assert all(close(sample.raw, scenario.on_failure["constant"]) for sample in failed)
            continue
        middle = statistics.fmean(sample.draft.reward for sample in scored)
        assert all(sample.raw is None or close(sample.raw, middle) for sample in failed), (middle, failed)
        assert all(abs(sample.trained) < _NORMALISING for sample in failed), failed


def check_normalisation(scenario: Scenario, step: PlayedStep) -> None:
    """Scored samples keep the distance to the mean of the scored ones, in units of the group's deviation."""
    for group in groups_of(step.samples):
        if any(sample.raw is None for sample in group):
            continue
        rewards = [sample.raw for sample in group]
        middle, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
        for sample in group:
            expected = (sample.raw - middle) / (deviation + 1e-6)
            assert close(sample.trained, expected, _NORMALISING), (sample, expected)
            assert not sample.mask or close(sample.advantage, sample.trained, _NORMALISING), sample


def check_validation(scenario: Scenario, step: PlayedStep) -> None:
    """Exactly 1 is what ROLL counts as correct, and a failed sample never is."""
    for sample in step.samples:
        assert sample.mask > 0
        if has_failed(scenario, sample):
            assert sample.score != 1.0, sample
            assert not scenario.loop or sample.score == 0.0, sample


def check_metrics(scenario: Scenario, step: PlayedStep) -> None:
    """The metrics count the samples and the failures, and all are finite numbers. ROLL has none of the batch path's."""
    metrics = {name: value for name, value in step.metrics.items() if name.startswith("qreward/")}
    assert all(isinstance(value, (int, float)) and math.isfinite(value) for value in step.metrics.values()), metrics
    if scenario.mode == "batch":
        assert not metrics
        return
    assert set(metrics) >= METRICS, METRICS - set(metrics)
    assert not any("qreward_failed" in name for name in (*step.tensors, *step.non_tensors))
    assert close(metrics["qreward/samples_sum"], len(step.samples))
    causes = sum(metrics[f"qreward/failed/{cause}_sum"] for cause in ("infra", "verdict", "policy"))
    assert close(metrics["qreward/failed_sum"], causes)
    assert close(metrics["qreward/failed_rate"], causes / len(step.samples))
    told = [has_failed(scenario, sample) for sample in step.samples]
    # What a monitor took out has not failed.
    out = causes + metrics["qreward/screened_rate"] * len(step.samples)
    assert close(causes, 0.0) or scenario.judged_by != "screened"
    if None not in told:
        assert close(out, sum(map(bool, told)))
    if scenario.masks:
        assert close(out, sum(not sample.mask for sample in step.samples))


def check_remedy(played: Played) -> None:
    """Where failed samples train, one warning says what would keep them out."""
    (said,) = played.said
    assert f"user_defined_rollout_loop_cls: {LOOP}" in said or "generate_opt_level" in said


def close(one: float | None, other: float, tolerance: float = _TOLERANCE) -> bool:
    return one is not None and math.isclose(one, other, rel_tol=tolerance, abs_tol=tolerance)
