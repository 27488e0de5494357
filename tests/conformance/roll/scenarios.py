"""What ROLL plays beside the scenarios of both frameworks, with which keys, and what must hold of it."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..judges import GROUP_SIZE, ITEMS, Draft, Judge, label_of, prompt_of, read_response
from ..played import (
    NORMALISING,
    Played,
    PlayedSample,
    PlayedStep,
    by_item,
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
    CORRECT_AT,
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

DOMAIN = "judged"
TAG = "judged_tag"
LOOP = "roll_adapter.QRewardRolloutLoop"
OWN_LOOP = "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"
WORKER = "roll_adapter.QRewardWorker"
NOTES = "CONFORMANCE_NOTES"
"""The environment variable that names the file in which a training worker notes when it uses its devices."""
SEED = 42
"""ROLL's seed: it fixes the order in which items are drawn."""
VAL_ITEMS = 3
"""Prompts of a validation, each answered as often as in training."""
TRAIN_ITEMS = 48
"""Items of all domains together in a whole run of the pipeline; those of validation come after them."""
ENV_REWARD = 0.125
"""What the environment of `agentic` gives for every turn."""
WATCHDOG_S = 180.0
"""A request that takes longer hangs: the slowest starts a dozen processes."""
PIPELINE_S = 900.0
"""A whole run of the pipeline that takes longer hangs. On a busy machine its dozen processes take minutes to start."""


def item_row(item: int, domain: str = DOMAIN, tag: str = TAG) -> dict[str, Any]:
    """An item as a row of a data set for ROLL, before its prompt is encoded."""
    return {
        "id": str(item),
        "prompt": prompt_of(item),
        "messages": [{"role": "user", "content": prompt_of(item)}],
        "ground_truth": label_of(item),
        "domain": domain,
        "tag": tag,
    }


def tree_of(scenario: Scenario, base_url: str) -> dict[str, Any]:
    """The tree of `reward_manager_config`."""
    # Scenarios follow one another in one Ray job, whose workers are killed in between; what a killed worker had of a
    # shared limit comes back after its time (tests/conformance/sharing), and these deadlines are shorter.
    tree = scenario.config(base_url, shared="local")
    return {**tree, "groups": {"min_scored": 1, **tree["groups"]}}


def keys_of(scenario: Scenario, base_url: str) -> dict[str, Any]:
    """ROLL's keys for a scenario, as far as its fake has them, too."""
    worker = {
        "worker_cls": WORKER,
        "tag_included": [TAG],
        "world_size": scenario.workers,
        "reward_manager_config": [tree_of(scenario, base_url)],
    }
    return {
        "rewards": {DOMAIN: worker},
        "is_num_return_sequences_expand": scenario.mode == "single",
        "generate_opt_level": 0 if scenario.mode == "batch" else 1,
        "rollout_batch_size": scenario.prompts,
        "user_defined_rollout_loop_cls": LOOP if scenario.hook else OWN_LOOP,
    }


def masks(scenario: Scenario) -> bool:
    """Whether failed samples are masked: only the loop can, and ROLL asks it for neither batches nor validation."""
    loop = scenario.hook and scenario.mode != "batch" and not scenario.evaluate
    return loop and scenario.on_failure == "exclude"


def drawn() -> list[int]:
    """The items in the order in which ROLL draws them from the data set, in its first pass."""
    items = list(range(ITEMS))
    random.Random(SEED).shuffle(items)
    return items


_MODES: tuple[Mode, ...] = ("single", "group", "batch")

LIVING = in_modes(ALIVE, *_MODES)
"""Training goes on."""

ENDING = (
    *in_modes({"refused": DEAD["refused"]}, "single", **GIVES_UP),
    *in_modes({"invalid": DEAD["invalid"]}, "group", **GIVES_UP),
)
"""With the loop the run ends with one error."""

WITHOUT_LOOP = (
    Scenario("no_loop-uneven-single", UNEVEN, "unspoilt", engine=PATIENT, hook=False),
    Scenario("no_loop-uneven-group", UNEVEN, "unspoilt", "group", engine=PATIENT, hook=False),
    Scenario("no_loop-refused-batch", REFUSED, "none", "batch", engine=HOPELESS, hook=False),
)
"""The loop is not configured: nothing is masked, everything is finite, and the run goes on."""

VALIDATED = (
    Scenario("val-uneven", UNEVEN, "unspoilt", engine=PATIENT, evaluate=True),
    Scenario("val-no_loop", UNEVEN, "unspoilt", engine=PATIENT, hook=False, evaluate=True),
    Scenario("val-refused", REFUSED, "none", engine=HOPELESS, groups={"give_up_after": 3}, evaluate=True),
)

_ONE_SPOILT = Judge(spoils=lambda draft: draft.item == drawn()[0] and draft.draft == 3)

WHOLE_GROUPS = Scenario("min_scored-all", _ONE_SPOILT, "all", engine=PATIENT, groups={"min_scored": "all"})
"""A group with a failed sample is dropped, and another prompt takes its place."""

TWO_WORKERS = (Scenario("two_workers-batch", UNEVEN, "unspoilt", "batch", engine=PATIENT, workers=2),)

ON_FAILURE = (
    Scenario("constant", UNEVEN, "unspoilt", "group", engine=PATIENT, on_failure={"constant": 0.25}),
    Scenario("raise", UNEVEN, "unspoilt", engine=PATIENT, on_failure="raise", error="RewardMissing"),
)

SHARED = (
    *LIVING,
    *ENDING,
    *WITHOUT_LOOP,
    *VALIDATED,
    WHOLE_GROUPS,
    *TWO_WORKERS,
    *ON_FAILURE,
    RANKED,
    *SCREENED,
    BAD_MINUTE,
)
"""What ROLL and the fake trainer both play."""

ALONE = (*in_modes({"uneven": ALIVE["uneven"]}, *_MODES), *WITHOUT_LOOP, BAD_MINUTE)
"""What the fake plays by itself, too. That it plays the others as ROLL does is compared where ROLL is."""


# What is seen of a batch, whoever has made it


def describe(batch: Any, texts: Sequence[str], raw: Iterable[float | None] | None = None) -> dict[str, Any]:
    """The samples of a batch in order, with the texts of their responses and the rewards before normalisation, and the
    names of what it carries.
    """
    tensors, count = batch.batch, len(texts)
    masked = tensors["final_response_mask" if "final_response_mask" in tensors else "response_mask"]
    advantages = np.asarray(tensors["advantages"]) if "advantages" in tensors else [None] * count
    rewards = np.asarray(tensors["response_level_rewards"]).tolist()
    columns = {
        "response": texts,
        "domain": batch.non_tensor_batch["domain"],
        "score": np.asarray(tensors["scores"]).tolist(),
        "reward": rewards,
        "raw": raw or [None] * count,
        "advantage": [None if row is None else _largest(row) for row in advantages],
        "mask": np.asarray(masked).sum(-1).tolist(),
    }
    samples = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return {"samples": samples, "columns": sorted([*tensors.keys(), *batch.non_tensor_batch.keys()])}


def played_step(told: Mapping[str, Any], scenario: Scenario) -> PlayedStep:
    """A step as `describe` tells it, with its metrics."""
    samples = tuple(played_sample(sample, scenario) for sample in told["samples"])
    return PlayedStep(samples, told["metrics"], tuple(told["columns"]))


def played_sample(told: Mapping[str, Any], scenario: Scenario) -> PlayedSample:
    """A sample as `describe` tells it."""
    draft = read_response(told["response"]) if told["response"] else Draft(-1, -1)
    trains = told["advantage"] is not None
    return PlayedSample(
        draft,
        told["score"],
        told["raw"],
        told["reward"] if trains else None,
        (told["advantage"],) if trains else (),
        (1,) * int(told["mask"]),
        not told["mask"] if masks(scenario) else scenario.fails(draft),
        group=told["domain"],
    )


def _largest(values: Any) -> float:
    """The value farthest from zero; NaN where there is one."""
    return float(values[np.abs(values).argmax()]) if np.isfinite(values).all() else float("nan")


# What must hold


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
