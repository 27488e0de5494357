"""What ROLL plays beside the scenarios of both frameworks."""

from __future__ import annotations

import random
from typing import Any

from ..judges import ITEMS, Judge, label_of, prompt_of
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
