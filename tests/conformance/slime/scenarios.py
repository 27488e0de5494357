"""What is played: a judge that behaves in some way, and a way to ask it. Nothing here knows slime."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qreward_plugins.testing import Faults, Latency

from .. import bad_minutes
from ..bad_minutes import AWAY, AWAY_S, STEP
from ..functions import PATH as FUNCTION
from ..judges import GROUP_SIZE, GROUPS, Draft, Judge, hanging, never, tenth, uneven

PARTS = 2
"""Training samples that a fan-out makes of a draft."""
EVAL_ITEMS = 3
EVAL_DRAFTS = 2
WATCHDOG_S = 60.0
"""A step that takes longer hangs: the slowest is allowed a few seconds by its deadlines."""

Mode = Literal["single", "group", "fan_out"]
Scored = Literal["all", "none", "unspoilt", "some", "any"]
FLAGGED_AT = 0.8
"""The reward from which a monitor flags a sample."""

JudgedBy = Literal["server", "function", "both", "ranked", "screened"]
"""Who judges: a judge server, the user's own function (functions.py), a sum of the two, a judge server that sees a
group at once, or one with a monitor that flags the best."""


@dataclass(frozen=True)
class Scenario:
    """What is played, and what must come out of it."""

    name: str
    judge: Judge
    scored: Scored
    """Which trained samples have a reward: all, none, those that the judge does not spoil, some but not all, or that
    depends on who comes first."""
    mode: Mode = "single"
    steps: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The node `engine` of the configuration."""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """The node `groups` of the configuration."""
    post_process: bool = True
    """Whether the post-process hook is set."""
    drop_failed_groups: bool = False
    prompts: int = GROUPS
    """Groups that a step trains."""
    oversampling: int = 0
    """Groups that are submitted together; as many as a step trains, or more."""
    judged_by: JudgedBy = "server"
    function_s: float = 1.0
    """After how many seconds a call of the function is killed."""
    patience_s: float = 120.0
    """After how many seconds a request is given up."""
    partial: bool = False
    never_generated: Callable[[Draft], bool] = never
    """Drafts whose generation does not end before it is aborted."""
    reward_key: str | None = None
    log_category: str | None = None
    advantage_estimator: str = "grpo"
    normalize_advantages: bool = False
    evaluate: bool = False
    log_passrate: bool = False
    error: str | None = None
    """Name of the error that ends the job, None where it goes on."""

    def __str__(self) -> str:
        return self.name

    def loses(self, draft: Draft) -> bool:
        """Whether this draft can have no reward."""
        flagged = self.judged_by == "screened" and draft.reward >= FLAGGED_AT
        return self.judge.spoils(draft) or flagged or (self.judged_by in ("function", "both") and hanging(draft))

    def config(self, base_url: str) -> dict[str, Any]:
        """The tree of `qreward:`."""
        sources: dict[str, Any] = {}
        judges: dict[str, Any] = {}
        if self.judged_by != "function":
            sources["judge"] = self._server(base_url)
            judges["quality"] = {"kind": "llm"}
        if self.judged_by in ("function", "both"):
            timeouts = {"total_s": self.function_s}
            sources["own"] = {"kind": "function", "function": FUNCTION, "timeouts": timeouts, "workers": 2}
            judges["rules"] = {"kind": "function"}
        if self.judged_by == "both":
            judges["both"] = {"kind": "sum", "weights": {"quality": 0.5, "rules": 0.5}}
        if self.judged_by == "screened":
            judges["monitor"] = {"kind": "llm"}
            judges["screen"] = {"kind": "screen", "judge": "quality", "monitor": "monitor", "at": FLAGGED_AT}
        if self.judged_by == "ranked":
            judges["ranked"] = {"kind": "rank", "judge": "quality", "rewards": "scores"}
        tree = {"sources": sources, "judges": judges, "engine": {"deadline_s": 30.0, "seed": 7, **self.engine}}
        return {**tree, "groups": dict(self.groups)} if self.groups else tree

    def _server(self, base_url: str) -> dict[str, Any]:
        return {
            "kind": "openai",
            "base_url": base_url,
            "model": "judge",
            "limits": {"concurrency": self.judge.limits.concurrency or 64},
            "timeouts": {"connect_s": 2.0, "total_s": self.patience_s},
        }


def later_items(draft: Draft) -> bool:
    """Drafts of the items that are not needed to fill a step."""
    return draft.item >= GROUPS


_QUICK = {"deadline_s": 0.5, "max_attempts": 2}
_HASTY = {"deadline_s": 2.0, "max_attempts": 2}
_PATIENT = {"deadline_s": 50.0, "max_attempts": 20}
_ENDLESS = {"deadline_s": 3600.0}
_INVALID = {"prose": 0.25, "score_out_of_range": 0.25, "two_verdicts": 0.25, "wrong_nonce": 0.25}

_JUDGES: dict[str, tuple[Judge, Scored, Mapping[str, Any]]] = {
    "up": (Judge(), "all", {}),
    "slow": (Judge(latency=Latency(median_s=0.2, sigma=0.5)), "all", {}),
    "flaky": (Judge(faults=Faults(rates={"error_500": 0.3})), "all", _PATIENT),
    "refused": (Judge(listens=False), "none", _QUICK),
    "broken": (Judge(faults=Faults(rates={"error_500": 1.0})), "none", _QUICK),
    "nan": (Judge(faults=Faults(rates={"score_nan": 1.0})), "none", _QUICK),
    "invalid": (Judge(faults=Faults(rates=_INVALID)), "none", _QUICK),
    "uneven": (Judge(spoils=uneven), "unspoilt", _PATIENT),
    "dying": (Judge(answers=3), "some", _HASTY),
}

_MODES: tuple[Mode, ...] = ("single", "group", "fan_out")

EVERY_JUDGE_IN_EVERY_MODE = tuple(
    Scenario(f"{judge}-{mode}", plan, scored, mode, engine=engine)
    for judge, (plan, scored, engine) in _JUDGES.items()
    for mode in _MODES
)

_HELD_SAMPLES = (4 - GROUPS) * GROUP_SIZE

ABORTED = tuple(
    Scenario(
        f"aborted-{mode}",
        Judge(holds=later_items, held=_HELD_SAMPLES * (PARTS if mode == "fan_out" else 1)),
        "all",
        mode,
        engine=_ENDLESS,
        oversampling=4,
    )
    for mode in _MODES
)
"""The judge holds what is not needed to fill the step: slime aborts, and waits for every pending reward."""

PARTIAL = tuple(
    Scenario(
        f"partial-{mode}",
        # Slow enough that holding back for a moment is no silence.
        Judge(holds=later_items, held=_HELD_SAMPLES, latency=Latency(median_s=0.3)),
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

PARTIAL_JUDGES = tuple(
    Scenario(
        f"partial-{judge}", _JUDGES[judge][0], "any", engine=_JUDGES[judge][2], oversampling=3, partial=True, steps=2
    )
    for judge in ("up", "flaky", "refused", "nan", "uneven", "dying")
)

WITHOUT_HOOK = tuple(
    Scenario(f"no-hook-{mode}", Judge(spoils=uneven), "unspoilt", mode, engine=_PATIENT, post_process=False)
    for mode in _MODES
)

REWARD_KEY = tuple(
    Scenario(
        f"reward-key-{mode}",
        Judge(spoils=uneven),
        "unspoilt",
        mode,
        engine=_PATIENT,
        reward_key="score",
        log_category="cause",
    )
    for mode in _MODES
)

REWARD_KEY += (
    Scenario(
        "reward-key-of-ones-own",
        Judge(spoils=uneven),
        "unspoilt",
        engine=_PATIENT,
        reward_key="points",
        log_category="cause",
    ),
)

ESTIMATORS = tuple(
    Scenario(
        f"{estimator}-{judge}",
        _JUDGES[judge][0],
        _JUDGES[judge][1],
        engine=_PATIENT,
        advantage_estimator=estimator,
        normalize_advantages=estimator.startswith("reinforce_plus_plus"),
    )
    for estimator in ("ppo", "gspo", "reinforce_plus_plus_baseline", "reinforce_plus_plus")
    for judge in ("up", "uneven")
) + tuple(
    Scenario(
        f"{estimator}-refused-normalised",
        Judge(listens=False),
        "none",
        engine=_QUICK,
        advantage_estimator=estimator,
        normalize_advantages=True,
    )
    for estimator in ("ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
)
"""slime's trainer cannot take a wholly masked sample with reinforce_plus_plus, nor, with normalised advantages, a
wholly masked batch."""


def one_of_item_0(draft: Draft) -> bool:
    """Spoil a single draft of the first item."""
    return draft.item == 0 and draft.draft == 3


def after_item_2(draft: Draft) -> bool:
    """Leave item 2 as the only one that can take the place of a dropped group."""
    return draft.item > 2


FILTERED = Scenario(
    "filter-drops-lonely",
    Judge(spoils=uneven),
    "unspoilt",
    engine=_PATIENT,
    drop_failed_groups=True,
    never_generated=after_item_2,
)
FILTERED_ALL = Scenario(
    "filter-drops",
    Judge(spoils=one_of_item_0),
    "all",
    engine=_PATIENT,
    drop_failed_groups=True,
    never_generated=after_item_2,
    groups={"min_scored": "all"},
)
FILTERED_ALL_MASKED = Scenario(
    "filter-drops-masked",
    Judge(spoils=one_of_item_0),
    "all",
    engine=_PATIENT,
    drop_failed_groups=True,
    never_generated=after_item_2,
    groups={"min_scored": "all"},
    advantage_estimator="reinforce_plus_plus",
    normalize_advantages=True,
)
FILTERED_KEPT = Scenario(
    "filter-keeps",
    Judge(spoils=one_of_item_0),
    "unspoilt",
    engine=_PATIENT,
    drop_failed_groups=True,
    groups={"min_scored": 3},
)
FILTERED_DEAD = tuple(
    Scenario(
        f"filter-{judge}-{mode}",
        _JUDGES[judge][0],
        "none",
        mode,
        engine=_QUICK,
        drop_failed_groups=True,
        groups={"give_up_after": 3},
        error="JudgeUnavailable",
    )
    for judge in ("refused", "nan")
    for mode in _MODES
)

FILTERS = (FILTERED, FILTERED_ALL, FILTERED_ALL_MASKED, FILTERED_KEPT, *FILTERED_DEAD)

EVALUATED = (
    Scenario("eval-up", Judge(), "all", evaluate=True, log_passrate=True),
    Scenario("eval-uneven", Judge(spoils=uneven), "unspoilt", engine=_PATIENT, evaluate=True),
    Scenario(
        "eval-passrate",
        Judge(spoils=lambda draft: draft == Draft(1, 1)),
        "unspoilt",
        engine=_PATIENT,
        evaluate=True,
        log_passrate=True,
    ),
    Scenario("eval-refused", Judge(listens=False), "none", engine=_QUICK, evaluate=True),
    Scenario("eval-fan_out", Judge(spoils=uneven), "unspoilt", "fan_out", engine=_PATIENT, evaluate=True),
    Scenario("eval-group", Judge(spoils=uneven), "unspoilt", "group", engine=_PATIENT, evaluate=True),
    Scenario(
        "eval-reward-key",
        Judge(spoils=uneven),
        "unspoilt",
        engine=_PATIENT,
        evaluate=True,
        reward_key="score",
        log_category="cause",
    ),
)

RANKED = (
    Scenario("ranked", Judge(), "all", "group", judged_by="ranked", steps=2),
    Scenario("ranked-refused", Judge(listens=False), "none", "group", engine=_QUICK, judged_by="ranked"),
)
"""A judge that sees the samples of a group at once."""

SCREENED = tuple(Scenario(f"screened-{mode}", Judge(), "unspoilt", mode, judged_by="screened") for mode in _MODES[:2])
"""A monitor takes samples out, which have not failed."""

BAD_MINUTES = tuple(Scenario(name, **plan) for name, plan in bad_minutes.BAD_MINUTES.items())

MORE_BAD_MINUTES = (
    Scenario("away-group", Judge(answers=STEP + 3, away_s=AWAY_S), "all", "group", engine=AWAY, steps=2),
    Scenario("away-fan_out", Judge(answers=STEP + 3, away_s=AWAY_S), "all", "fan_out", engine=AWAY, steps=2),
    Scenario("away-503", Judge(answers=STEP + 3, away_s=AWAY_S, away_as="error_503"), "all", engine=AWAY, steps=2),
    Scenario(
        "away-silent",
        Judge(answers=STEP + 3, away_s=AWAY_S, away_as="hang"),
        "all",
        engine=AWAY,
        steps=2,
        patience_s=2.5,
    ),
    Scenario("away-eval", Judge(answers=3, away_s=AWAY_S), "all", engine=AWAY, evaluate=True),
    Scenario("away-filter", Judge(answers=3, away_s=AWAY_S), "all", engine=AWAY, drop_failed_groups=True),
    Scenario("hanging-group", Judge(), "unspoilt", "group", engine=AWAY, prompts=48, judged_by="function"),
    Scenario("prose-group", Judge(prose=tenth), "all", "group", prompts=16),
)
"""The same in other ways to ask, and a judge that is away in other ways. The fake trainer does not play them, because
each takes some seconds."""

MINUTE_S = 60.0
MINUTE = Scenario(
    "minute",
    Judge(prose=tenth, answers=100, away_s=MINUTE_S),
    "unspoilt",
    engine={"deadline_s": 300.0},
    steps=3,
    prompts=16,
    judged_by="both",
    function_s=2.0,
    evaluate=True,
)
"""All of it in one run, with a whole minute and the deadline that is the default."""

SHARED = (
    BAD_MINUTES
    + EVERY_JUDGE_IN_EVERY_MODE
    + RANKED
    + SCREENED
    + ABORTED
    + WITHOUT_HOOK
    + REWARD_KEY
    + ESTIMATORS
    + EVALUATED
    + FILTERS
)
"""What slime and the fake trainer both play."""
