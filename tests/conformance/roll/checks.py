"""What must hold of everything that ROLL or its fake has played."""

from __future__ import annotations

import statistics

from ..checks import (
    NORMALISING,
    by_item,
    check_counts,
    check_failures,
    check_raw,
    check_run,
    close,
    middle_of,
    own_metrics,
)
from ..judges import GROUP_SIZE
from ..played import Played, PlayedSample, PlayedStep
from ..scenarios import CORRECT_AT, Scenario
from .scenarios import LOOP, VAL_ITEMS, masks


def check(scenario: Scenario, played: Played) -> None:
    """Everything below, for every step."""
    if not check_run(scenario, played):
        return
    assert len(played.steps) == scenario.steps
    for step in played.steps:
        assert len(step.samples) == (VAL_ITEMS if scenario.evaluate else scenario.prompts) * GROUP_SIZE
        check_failures(scenario, step)
        for group in by_item(step.samples):
            assert sorted(sample.draft.draft for sample in group) == list(range(GROUP_SIZE)), group
            check_group(scenario, group)
        check_metrics(scenario, step)
    # A warning says what would keep failed samples out. (The fake's are heard in tests/roll_adapter.)
    assert all(LOOP in said for said in played.said)


def check_group(scenario: Scenario, group: list[PlayedSample]) -> None:
    """Failed samples are masked where something can mask them, and do not move the mean of their group."""
    for sample in group:
        if sample.failed is False:
            assert sample.reward == float(sample.draft.reward >= CORRECT_AT), sample
        assert sum(sample.mask) or masks(scenario)
    if scenario.evaluate:
        # Exactly 1 is what ROLL counts as correct, and a failed sample never is.
        wrong = [sample.reward for sample in group if sample.failed]
        assert 1.0 not in wrong
        assert not scenario.hook or set(wrong) <= {0.0}
        return
    known = masks(scenario) or scenario.mode != "single"
    constant = scenario.on_failure["constant"] if isinstance(scenario.on_failure, dict) else None
    middle = middle_of(group) if constant is None else constant
    if None not in {sample.failed for sample in group}:
        check_raw(group, middle if known else None)
    failed = [sample for sample in group if sample.failed]
    if known and constant is None and len(failed) < len(group):
        assert all(abs(sample.trained) < NORMALISING for sample in failed), failed
    assert not masks(scenario) or all(sample.advantages == (0.0,) for sample in failed)
    rewards = [sample.raw for sample in group]
    if None in rewards:
        return
    mean, deviation = statistics.fmean(rewards), statistics.stdev(rewards)
    for sample in group:
        expected = (sample.raw - mean) / (deviation + 1e-6)
        assert close(sample.trained, expected, NORMALISING), (sample, expected)
        assert not sum(sample.mask) or close(sample.advantages[0], sample.trained, NORMALISING), sample


def check_metrics(scenario: Scenario, step: PlayedStep) -> None:
    """The metrics count the samples and the failures. ROLL has none of the batch path's."""
    metrics = own_metrics(step, "qreward/")
    assert not any("qreward_failed" in name for name in step.columns) or scenario.mode == "batch"
    if scenario.mode == "batch":
        assert not metrics
        return
    check_counts(scenario, metrics, step, "{}_sum")
