"""What is played: a judge that behaves in some way, and a way to ask it. Nothing here knows ROLL."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from qreward_plugins.testing import Faults, Latency

from .. import bad_minutes
from ..bad_minutes import AWAY, AWAY_S, STEP
from ..functions import PATH as FUNCTION
from ..judges import GROUPS, ITEMS, Draft, Judge, hanging, tenth, uneven

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
CORRECT_AT = 0.5
LATE_S = 0.5
"""By how much a declared window is longer than the server's, which gets no processor at times."""
WATCHDOG_S = 90.0
"""A request that takes longer hangs: the slowest starts a dozen processes."""
PIPELINE_S = 900.0
"""A whole run of the pipeline that takes longer hangs. On a busy machine its dozen processes take minutes to start."""

Mode = Literal["single", "group", "batch"]
"""How the worker is asked: a sample at a time (`is_num_return_sequences_expand: true`), a group at a time, or all
samples of a step together (`generate_opt_level: 0`)."""

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
    """Which samples have a reward: all, none, those that the judge does not spoil, some but not all, or that depends
    on who comes first."""
    mode: Mode = "single"
    steps: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    """The node `engine` of the configuration."""
    groups: Mapping[str, Any] = field(default_factory=dict)
    """The node `groups` of the configuration, over one scored sample a group."""
    loop: bool = True
    """Whether the rollout loop is configured."""
    prompts: int = GROUPS
    """Groups that a step trains (`rollout_batch_size`)."""
    judged_by: JudgedBy = "server"
    function_s: float = 1.0
    """After how many seconds a call of the function is killed."""
    patience_s: float = 120.0
    """After how many seconds a request is given up."""
    workers: int = 1
    """Reward workers (`world_size`)."""
    asynchronous: bool = False
    """Whether prompts are sampled ahead (`async_generation_ratio: 1`)."""
    validation: bool = False
    """Play a validation in place of training steps."""
    on_failure: Any = "exclude"
    error: str | None = None
    """Name of the error that ends the run, None where it goes on."""

    def __str__(self) -> str:
        return self.name

    @property
    def masks(self) -> bool:
        """Whether failed samples are masked: only the loop can, and ROLL asks it for neither batches nor validation."""
        return self.loop and self.mode != "batch" and not self.validation and self.on_failure == "exclude"

    @property
    def company(self) -> tuple[Any, ...]:
        """Scenarios of the same company can share a reward worker: it cannot tell them apart."""
        return (
            id(self.judge),
            repr((self.engine, self.groups, self.loop, self.workers, self.on_failure, *self._judging)),
        )

    @property
    def _judging(self) -> tuple[Any, ...]:
        return self.judged_by, self.function_s, self.patience_s

    def loses(self, draft: Draft) -> bool:
        """Whether this draft can have no reward."""
        flagged = self.judged_by == "screened" and draft.reward >= FLAGGED_AT
        return self.judge.spoils(draft) or flagged or (self.judged_by in ("function", "both") and hanging(draft))

    def config(self, base_url: str) -> dict[str, Any]:
        """The tree of `reward_manager_config`."""
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
        judges[list(judges)[-1]]["correct_at"] = CORRECT_AT
        if self.judged_by == "screened":
            judges["monitor"] = {"kind": "llm"}
            judges["screen"] = {"kind": "screen", "judge": "quality", "monitor": "monitor", "at": FLAGGED_AT}
        if self.judged_by == "ranked":
            judges["ranked"] = {"kind": "rank", "judge": "quality", "rewards": "scores"}
        tree: dict[str, Any] = {
            "sources": sources,
            "judges": judges,
            # Scenarios follow one another in one Ray job, whose workers are killed in between; what a killed worker had
            # of a shared limit comes back after its time (tests/conformance/sharing), and these deadlines are shorter.
            "engine": {"deadline_s": 30.0, "seed": 7, "shared": "local", **self.engine},
        }
        if self.on_failure != "exclude":
            tree["on_failure"] = self.on_failure
        return {**tree, "groups": {"min_scored": 1, **self.groups}}

    def _server(self, base_url: str) -> dict[str, Any]:
        return {
            "kind": "openai",
            "base_url": base_url,
            "model": "judge",
            "limits": self._limits(),
            "timeouts": {"connect_s": 2.0, "total_s": self.patience_s},
        }

    def _limits(self) -> dict[str, Any]:
        theirs = self.judge.limits
        limits: dict[str, Any] = {"concurrency": theirs.concurrency or 64}
        if theirs.requests_per_minute is not None:
            amount, window_s = theirs.requests_per_minute * theirs.window_s, theirs.window_s + LATE_S
            limits |= {"requests_per_minute": amount / window_s, "window_s": window_s, "window": "sliding"}
        return limits


def drawn() -> list[int]:
    """The items in the order in which ROLL draws them from the data set, in its first pass."""
    items = list(range(ITEMS))
    random.Random(SEED).shuffle(items)
    return items


_QUICK = {"deadline_s": 1.5, "max_attempts": 2}
_HOPELESS = {"deadline_s": 0.5, "max_attempts": 2}
"""For judges without any verdict, where nothing comes of waiting."""
_PATIENT = {"deadline_s": 50.0, "max_attempts": 20}
_INVALID = {"prose": 0.25, "score_out_of_range": 0.25, "two_verdicts": 0.25, "wrong_nonce": 0.25}

_UP = Judge()
_SLOW = Judge(latency=Latency(median_s=0.2, sigma=0.5))
_FLAKY = Judge(faults=Faults(rates={"error_500": 0.3}))
_UNEVEN = Judge(spoils=uneven)
_REFUSED = Judge(listens=False)
_BROKEN = Judge(faults=Faults(rates={"error_500": 1.0}))
_NAN = Judge(faults=Faults(rates={"score_nan": 1.0}))
_INVALID_JUDGE = Judge(faults=Faults(rates=_INVALID))
_DYING = Judge(answers=3)

_ALIVE: dict[str, tuple[Judge, Scored, Mapping[str, Any]]] = {
    "up": (_UP, "all", {}),
    "slow": (_SLOW, "all", {}),
    "flaky": (_FLAKY, "all", _PATIENT),
    "uneven": (_UNEVEN, "unspoilt", _PATIENT),
}
_DEAD: dict[str, Judge] = {
    "refused": _REFUSED,
    "broken": _BROKEN,
    "nan": _NAN,
    "invalid": _INVALID_JUDGE,
}
_MODES: tuple[Mode, ...] = ("single", "group", "batch")

ALIVE = tuple(
    Scenario(f"{name}-{mode}", judge, scored, mode, engine=engine)
    for name, (judge, scored, engine) in _ALIVE.items()
    for mode in _MODES
)
"""Judges that answer at least some of every group: training goes on."""

DEAD = tuple(
    Scenario(
        f"{name}-{mode}", judge, "none", mode, engine=_HOPELESS, groups={"give_up_after": 3}, error="JudgeUnavailable"
    )
    for name, judge in _DEAD.items()
    for mode in ("single", "group")
)
"""Judges without any verdict, and the loop: the run ends with one error."""

DYING = (
    Scenario(
        "dying-loop", _DYING, "some", engine=_QUICK, groups={"give_up_after": 3}, error="JudgeUnavailable", steps=2
    ),
    Scenario("dying-no_loop", Judge(answers=3), "some", engine=_QUICK, loop=False),
)
"""A judge that is gone in mid-batch."""

WITHOUT_LOOP = (
    Scenario("no_loop-uneven-single", _UNEVEN, "unspoilt", engine=_PATIENT, loop=False),
    Scenario("no_loop-uneven-group", _UNEVEN, "unspoilt", "group", engine=_PATIENT, loop=False),
    Scenario("no_loop-refused-single", _REFUSED, "none", engine=_HOPELESS, loop=False, steps=2),
    Scenario("no_loop-refused-batch", _REFUSED, "none", "batch", engine=_HOPELESS, loop=False),
)
"""The loop is not configured: nothing is masked, everything is finite, and the run goes on."""

ASYNCHRONOUS = (
    Scenario("async-up", _UP, "all", asynchronous=True, steps=3),
    Scenario("async-uneven", _UNEVEN, "unspoilt", engine=_PATIENT, asynchronous=True, steps=3),
)
"""Prompts are sampled ahead, and rewards go on while the model is updated."""

VALIDATED = (
    Scenario("val-up", _UP, "all", validation=True),
    Scenario("val-uneven", _UNEVEN, "unspoilt", engine=_PATIENT, validation=True),
    Scenario("val-no_loop", _UNEVEN, "unspoilt", engine=_PATIENT, loop=False, validation=True),
    Scenario("val-refused", _REFUSED, "none", engine=_HOPELESS, groups={"give_up_after": 3}, validation=True),
)

_ONE_SPOILT = Judge(spoils=lambda draft: draft.item == drawn()[0] and draft.draft == 3)

WHOLE_GROUPS = Scenario("min_scored-all", _ONE_SPOILT, "all", engine=_PATIENT, groups={"min_scored": "all"})
"""A group with a failed sample is dropped, and another prompt takes its place."""

TWO_WORKERS = (
    Scenario("two_workers-single", _UNEVEN, "unspoilt", engine=_PATIENT, workers=2),
    Scenario("two_workers-group", _UNEVEN, "unspoilt", "group", engine=_PATIENT, workers=2),
    Scenario("two_workers-batch", _UNEVEN, "unspoilt", "batch", engine=_PATIENT, workers=2),
)

ON_FAILURE = (
    Scenario("constant", _UNEVEN, "unspoilt", "group", engine=_PATIENT, on_failure={"constant": 0.25}),
    Scenario("raise", _UNEVEN, "unspoilt", engine=_PATIENT, on_failure="raise", error="RewardMissing"),
)

RANKED = (
    *(Scenario(f"ranked-{mode}", _UP, "all", mode, judged_by="ranked", steps=2) for mode in _MODES),
    Scenario("ranked-workers", _UP, "all", judged_by="ranked", workers=2),
)
"""A judge that sees the samples of a group at once, however ROLL asks for them."""

SCREENED = tuple(Scenario(f"screened-{mode}", _UP, "unspoilt", mode, judged_by="screened") for mode in _MODES[:2])
"""A monitor takes samples out, which have not failed."""

BAD_MINUTES = tuple(Scenario(name, **plan) for name, plan in bad_minutes.BAD_MINUTES.items())

MORE_BAD_MINUTES = (
    Scenario("away-group", Judge(answers=STEP + 3, away_s=AWAY_S), "all", "group", engine=AWAY, steps=2),
    Scenario("away-batch", Judge(answers=STEP + 3, away_s=AWAY_S), "all", "batch", engine=AWAY, steps=2),
    Scenario("away-503", Judge(answers=STEP + 3, away_s=AWAY_S, away_as="error_503"), "all", engine=AWAY, steps=2),
    Scenario(
        "away-silent",
        Judge(answers=STEP + 3, away_s=AWAY_S, away_as="hang"),
        "all",
        engine=AWAY,
        steps=2,
        patience_s=2.5,
    ),
    Scenario("away-val", Judge(answers=3, away_s=AWAY_S), "all", engine=AWAY, validation=True),
    Scenario("away-workers", Judge(answers=STEP + 3, away_s=AWAY_S), "all", engine=AWAY, steps=2, workers=2),
    Scenario("hanging-batch", Judge(), "unspoilt", "batch", engine=AWAY, prompts=48, judged_by="function"),
    Scenario("prose-group", Judge(prose=tenth), "all", "group", prompts=16),
    Scenario("away-async", Judge(answers=STEP + 3, away_s=AWAY_S), "all", engine=AWAY, asynchronous=True, steps=3),
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
    prompts=12,
    judged_by="both",
    function_s=2.0,
    asynchronous=True,
)
"""All of it in one run, with a whole minute and the deadline that is the default."""

DIRECT_SLOW = Scenario("direct-slow", _SLOW, "all")
DIRECT_UNEVEN = Scenario("direct-uneven", _UNEVEN, "unspoilt", engine=_PATIENT)
"""For calls of a worker without a rollout around them."""

ROLLOUTS = (
    *ALIVE,
    *DEAD,
    *DYING,
    *WITHOUT_LOOP,
    *ASYNCHRONOUS,
    *VALIDATED,
    WHOLE_GROUPS,
    *TWO_WORKERS,
    *ON_FAILURE,
    *RANKED,
    *SCREENED,
    *BAD_MINUTES,
)
EVERY = (DIRECT_SLOW, DIRECT_UNEVEN, *ROLLOUTS, *MORE_BAD_MINUTES)

SHARED = (
    *ALIVE,
    *DEAD,
    *WITHOUT_LOOP,
    *VALIDATED,
    WHOLE_GROUPS,
    *TWO_WORKERS,
    *ON_FAILURE,
    *RANKED,
    *SCREENED,
    *BAD_MINUTES,
)
"""What ROLL and the fake trainer both play. Where a judge dies, or prompts are sampled ahead, who comes first is not
fixed, so the two may differ there."""
