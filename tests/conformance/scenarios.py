"""What is played: a judge that behaves in some way, and a way to ask it. Nothing here knows a framework.

A scenario of both frameworks stands here once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from qreward_plugins.testing import Faults

from .functions import PATH as FUNCTION
from .judges import GROUPS, Draft, Judge, hanging, never, tenth, uneven

CORRECT_AT = 0.5
FLAGGED_AT = 0.8
"""The reward from which a monitor flags a sample."""
LATE_S = 0.5
"""By how much a declared window is longer than the server's, which gets no processor at times."""
AWAY_S = 4.0
FUNCTION_S = 1.0
"""After how many seconds a call of the function is killed."""

Mode = Literal["single", "group", "batch", "fan_out"]
"""How rewards are asked for: of a sample, of a group, of a whole batch (ROLL), of the parts of a sample (slime)."""

Scored = Literal["all", "none", "unspoilt", "some", "any"]

JudgedBy = Literal["server", "both", "ranked", "screened"]
"""Who judges: a judge server, a sum of it and the user's own function (functions.py), a judge server that sees a group
at once, or one with a monitor that flags the best."""


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
    """The node `groups` of the configuration."""
    hook: bool = True
    """Whether our rollout loop (ROLL) or post-processing (slime) is configured."""
    prompts: int = GROUPS
    """Groups that a step trains."""
    judged_by: JudgedBy = "server"
    on_failure: Any = "exclude"
    evaluate: bool = False
    """slime: evaluate before each step. ROLL: validate in place of steps."""
    error: str | None = None
    """Name of the error that ends the run, None where it goes on."""
    workers: int = 1
    """ROLL's reward workers."""
    asynchronous: bool = False
    """Whether ROLL samples ahead."""
    drop_failed_groups: bool = False
    """The rest is slime's. Whether its dynamic filter is ours."""
    oversampling: int = 0
    """Groups that are submitted together; as many as a step trains, or more."""
    partial: bool = False
    never_generated: Callable[[Draft], bool] = never
    """Drafts whose generation does not end before it is aborted."""
    reward_key: str | None = None
    advantage_estimator: str = "grpo"
    normalize_advantages: bool = False

    def __str__(self) -> str:
        return self.name

    def loses(self, draft: Draft) -> bool:
        """Whether this draft can have no reward."""
        flagged = self.judged_by == "screened" and draft.reward >= FLAGGED_AT
        return self.judge.spoils(draft) or flagged or (self.judged_by == "both" and hanging(draft))

    def fails(self, draft: Draft) -> bool | None:
        """Whether a draft has no reward; None where that depends on who comes first."""
        return {"all": False, "none": True, "unspoilt": self.loses(draft)}.get(self.scored)

    def config(self, base_url: str, **engine: Any) -> dict[str, Any]:
        """The tree of the configuration; `engine` has defaults of its node."""
        judge = {
            "kind": "openai",
            "base_url": base_url,
            "model": "judge",
            "limits": self._limits(),
            "timeouts": {"connect_s": 2.0, "total_s": 120.0},
        }
        sources: dict[str, Any] = {"judge": judge}
        judges: dict[str, Any] = {"quality": {"kind": "llm"}}
        if self.judged_by == "both":
            timeouts = {"total_s": FUNCTION_S}
            sources["own"] = {"kind": "function", "function": FUNCTION, "timeouts": timeouts, "workers": 2}
            judges["rules"] = {"kind": "function"}
            judges["both"] = {"kind": "sum", "weights": {"quality": 0.5, "rules": 0.5}}
        judges[list(judges)[-1]]["correct_at"] = CORRECT_AT
        if self.judged_by == "screened":
            judges["monitor"] = {"kind": "llm"}
            judges["screen"] = {"kind": "screen", "judge": "quality", "monitor": "monitor", "at": FLAGGED_AT}
        if self.judged_by == "ranked":
            judges["ranked"] = {"kind": "rank", "judge": "quality", "rewards": "scores"}
        nodes = {"engine": {"deadline_s": 30.0, "seed": 7, **engine, **self.engine}, "groups": dict(self.groups)}
        return {"sources": sources, "judges": judges, "on_failure": self.on_failure, **nodes}

    def _limits(self) -> dict[str, Any]:
        theirs = self.judge.limits
        limits: dict[str, Any] = {"concurrency": theirs.concurrency or 64}
        if theirs.requests_per_minute is not None:
            amount, window_s = theirs.requests_per_minute * theirs.window_s, theirs.window_s + LATE_S
            limits |= {"requests_per_minute": amount / window_s, "window_s": window_s, "window": "sliding"}
        return limits


HOPELESS = {"deadline_s": 0.5, "max_attempts": 2}
"""For judges without any verdict, where nothing comes of waiting."""
HASTY = {"deadline_s": 1.5, "max_attempts": 2}
PATIENT = {"deadline_s": 50.0, "max_attempts": 20}
AWAY = {"deadline_s": 20.0}
"""What a judge that is away for a short time, and cold afterwards, leaves time for."""
GIVES_UP = {"groups": {"give_up_after": 3}, "error": "JudgeUnavailable"}

UP = Judge()
UNEVEN = Judge(spoils=uneven)
REFUSED = Judge(listens=False)
_INVALID = {"prose": 0.2, "score_out_of_range": 0.2, "score_nan": 0.2, "two_verdicts": 0.2, "wrong_nonce": 0.2}

ALIVE: dict[str, tuple[Judge, Scored, Mapping[str, Any]]] = {
    "up": (UP, "all", {}),
    "uneven": (Judge(spoils=uneven, faults=Faults(rates={"error_500": 0.1})), "unspoilt", PATIENT),
}
"""Judges that answer at least some of every group."""

DEAD: dict[str, tuple[Judge, Scored, Mapping[str, Any]]] = {
    "refused": (REFUSED, "none", HOPELESS),
    "invalid": (Judge(faults=Faults(rates=_INVALID)), "none", HOPELESS),
}
"""Judges without any verdict."""


def in_modes(
    judges: Mapping[str, tuple[Judge, Scored, Mapping[str, Any]]], *modes: Mode, **more: Any
) -> list[Scenario]:
    """Every judge, asked in every mode."""
    return [
        Scenario(f"{name}-{mode}", judge, scored, mode, engine=engine, **more)
        for name, (judge, scored, engine) in judges.items()
        for mode in modes
    ]


RANKED = Scenario("ranked", UP, "all", "group", judged_by="ranked", steps=2)
"""A judge that sees the samples of a group at once."""

SCREENED = tuple(
    Scenario(f"screened-{mode}", UP, "unspoilt", mode, judged_by="screened") for mode in ("single", "group")
)
"""A monitor takes samples out, which have not failed."""

BAD_MINUTE = Scenario(
    "bad_minute",
    Judge(prose=tenth, answers=100, away_s=AWAY_S),
    "unspoilt",
    engine=AWAY,
    steps=2,
    prompts=16,
    judged_by="both",
)
"""A judge that is away and comes back, prose in place of one verdict in ten, and a function that never ends for 2 % of
the samples: it costs a run a minute (a few seconds here) and these samples, and no innocent one."""


def shorter(judge: Judge) -> Judge:
    """The same judge, away for half the time and warm sooner, for fake trainers. (Whole minutes without a judge are
    played in virtual time, in tests/engine and by the soak.)
    """
    return judge if judge.away_s is None else replace(judge, away_s=AWAY_S / 2, cold_s=0.2)
