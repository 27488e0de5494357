"""What slime plays beside the scenarios of both frameworks."""

from __future__ import annotations

from dataclasses import replace

from qreward_plugins.testing import Latency

from ..judges import GROUP_SIZE, GROUPS, Draft, Judge
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
