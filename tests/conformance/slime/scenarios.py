"""What slime plays beside the scenarios of both frameworks, with which flags, and what must hold of it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from qreward_plugins.testing import Latency

from ..judges import GROUP_SIZE, GROUPS, Draft, Judge, label_of, prompt_of
from ..played import (
    NORMALISING,
    Played,
    PlayedSample,
    PlayedStep,
    check_counts,
    check_failures,
    check_raw,
    check_run,
    close,
    middle_of,
    own_metrics,
)
from ..scenarios import (
    ALIVE,
    BAD_MINUTE,
    DEAD,
    GIVES_UP,
    HOPELESS,
    PATIENT,
    RANKED,
    REFUSED,
    SCREENED,
    UNEVEN,
    Mode,
    Scenario,
    in_modes,
)

PARTS = 2
"""Training samples that a fan-out makes of a draft."""
EVAL_ITEMS = 3
EVAL_DRAFTS = 2
WATCHDOG_S = 60.0
"""A step that takes longer hangs: the slowest is allowed a few seconds by its deadlines."""

_MODES: tuple[Mode, ...] = ("single", "group", "fan_out")
_DYING = Judge(answers=3)

EVERY_JUDGE = (
    *in_modes(ALIVE, *_MODES),
    *in_modes({"refused": DEAD["refused"]}, "single"),
    *in_modes({"invalid": DEAD["invalid"]}, "group", "fan_out"),
    *in_modes({"dying": (_DYING, "some", {"deadline_s": 2.0, "max_attempts": 2})}, "single", "group"),
)

_HELD = (4 - GROUPS) * GROUP_SIZE
_ENDLESS = {"deadline_s": 3600.0}


def later_items(draft: Draft) -> bool:
    """Drafts of the items that are not needed to fill a step."""
    return draft.item >= GROUPS


ABORTED = tuple(
    Scenario(
        f"aborted-{mode}",
        Judge(holds=later_items, held=_HELD * (PARTS if mode == "fan_out" else 1)),
        "all",
        mode,
        engine=_ENDLESS,
        oversampling=4,
    )
    for mode in _MODES
)
"""The judge holds what is not needed to fill the step: slime aborts, and waits for every pending reward."""

WITHOUT_HOOK = tuple(
    Scenario(f"no_hook-{mode}", UNEVEN, "unspoilt", mode, engine=PATIENT, hook=False) for mode in ("single", "group")
)

PARTIAL = tuple(
    Scenario(
        f"partial-{mode}",
        # Slow enough that holding back for a moment is no silence.
        Judge(holds=later_items, held=_HELD, latency=Latency(median_s=0.3)),
        "all",
        mode,
        steps=2,
        engine=_ENDLESS,
        oversampling=5,
        partial=True,
        never_generated=lambda draft: draft.item == 4,
    )
    for mode in ("single", "group")
)
"""The same with partial rollout: what was held is trained in the next step, by which time the judge is released."""

REWARD_KEY = (Scenario("key-group", UNEVEN, "unspoilt", "group", engine=PATIENT, reward_key="score"),)

_SPOILT = {"uneven": (UNEVEN, "unspoilt", PATIENT), "refused": (REFUSED, "none", HOPELESS)}
_KEPT = {f"partial-{name}": (judge, "any", engine) for name, (judge, _, engine) in _SPOILT.items()}
NOT_FAKED = (
    *in_modes(_KEPT, "single", oversampling=3, partial=True, steps=2),
    *(
        replace(scenario, name=f"{scenario.name}-{estimator}")
        for estimator in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
        for scenario in in_modes(_SPOILT, "single", advantage_estimator=estimator, normalize_advantages=True)
    ),
)
"""Who is scored depends on who comes first; and slime's trainer cannot take a wholly masked sample with
reinforce_plus_plus, nor, with normalised advantages, a wholly masked batch.
"""

ESTIMATORS = (Scenario("ppo", UNEVEN, "unspoilt", engine=PATIENT, advantage_estimator="ppo"),)


def _filtered(name: str, judge: Judge, scored: str, **more: object) -> Scenario:
    """Item 2 is the only one that can take the place of a dropped group."""
    return Scenario(
        f"filter-{name}",
        judge,
        scored,
        engine=PATIENT,
        drop_failed_groups=True,
        never_generated=lambda draft: draft.item > 2,
        **more,
    )


_ONE_OF_ITEM_0 = Judge(spoils=lambda draft: draft == Draft(0, 3))
FILTERED = (
    _filtered("lonely", UNEVEN, "unspoilt"),
    _filtered("all", _ONE_OF_ITEM_0, "all", groups={"min_scored": "all"}),
    _filtered("kept", _ONE_OF_ITEM_0, "unspoilt", groups={"min_scored": 3}),
)
FILTERED_ITEMS = {"filter-lonely": {0, 2}, "filter-all": {1, 2}, "filter-kept": {0, 1}}
"""The items that train in the end."""

FILTERED_DEAD = (
    *in_modes({"filter-refused": DEAD["refused"]}, "single", drop_failed_groups=True, **GIVES_UP),
    *in_modes({"filter-invalid": DEAD["invalid"]}, "group", drop_failed_groups=True, **GIVES_UP),
)

EVALUATED = (
    *in_modes({"eval": (UNEVEN, "unspoilt", PATIENT)}, "single", "group", evaluate=True),
    Scenario("eval-refused", REFUSED, "none", engine=HOPELESS, evaluate=True),
    Scenario("eval-key", UNEVEN, "unspoilt", engine=PATIENT, evaluate=True, reward_key="score"),
)

SHARED = (
    *EVERY_JUDGE,
    BAD_MINUTE,
    RANKED,
    *SCREENED,
    *ABORTED,
    *WITHOUT_HOOK,
    *REWARD_KEY,
    *ESTIMATORS,
    *EVALUATED,
    *FILTERED,
    *FILTERED_DEAD,
)
"""What slime and the fake trainer both play."""

ALONE = (*in_modes({"uneven": ALIVE["uneven"]}, *_MODES), *SCREENED, *REWARD_KEY, *EVALUATED, BAD_MINUTE)
"""What the fake plays by itself, too. That it plays the others as slime does is compared where slime is."""


def flags_of(scenario: Scenario) -> dict[str, Any]:
    """The flags of a scenario by their attribute; None and False are not set."""
    group = scenario.mode == "group"
    return {
        "rollout_batch_size": scenario.prompts,
        "n_samples_per_prompt": GROUP_SIZE,
        "over_sampling_batch_size": max(scenario.oversampling, scenario.prompts),
        "advantage_estimator": scenario.advantage_estimator,
        "partial_rollout": scenario.partial,
        "reward_key": scenario.reward_key,
        "group_rm": group,
        "eval_function_path": "slime_adapter.eval_rollout" if group else None,
        "n_samples_per_eval_prompt": EVAL_DRAFTS if scenario.evaluate else 1,
        "custom_rollout_log_function_path": "slime_adapter.log_rollout",
        "custom_eval_rollout_log_function_path": "slime_adapter.log_eval",
        "custom_reward_post_process_path": "slime_adapter.post_process" if scenario.hook else None,
        "dynamic_sampling_filter_path": "slime_adapter.drop_failed_groups" if scenario.drop_failed_groups else None,
    }


def rows(count: int) -> list[dict[str, Any]]:
    return [{"prompt": prompt_of(item), "label": label_of(item), "metadata": {"item": item}} for item in range(count)]


# What must hold

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
