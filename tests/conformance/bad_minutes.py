"""What costs a run a minute or a few samples, and no innocent one: a judge that is away and comes back, a reward
function that never ends for 2 % of the samples, and prose in place of one verdict in ten; at last all of them at once.
The minute is a few seconds here. Arguments of a `Scenario` by its name; both frameworks have a class of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .judges import GROUP_SIZE, GROUPS, Judge, tenth

STEP = GROUPS * GROUP_SIZE
"""Samples of a step."""
AWAY_S = 4.0
AWAY = {"deadline_s": 20.0}
"""What a judge that is away for a short time, and cold afterwards, leaves time for."""

BAD_MINUTES: Mapping[str, Mapping[str, Any]] = {
    "away": {"judge": Judge(answers=STEP, away_s=AWAY_S), "scored": "all", "engine": AWAY, "steps": 3},
    "hanging": {"judge": Judge(), "scored": "unspoilt", "engine": AWAY, "prompts": 48, "judged_by": "function"},
    "prose": {"judge": Judge(prose=tenth), "scored": "all", "steps": 3, "prompts": 16},
    "everything": {
        "judge": Judge(prose=tenth, answers=100, away_s=AWAY_S),
        "scored": "unspoilt",
        "engine": AWAY,
        "steps": 2,
        "prompts": 16,
        "judged_by": "both",
    },
}


def shorter(judge: Judge) -> Judge:
    """The same judge, away for half the time and warm sooner, for fake trainers. (Whole minutes without a judge are
    played in virtual time, in tests/engine and by the soak.)
    """
    return judge if judge.away_s is None else replace(judge, away_s=AWAY_S / 2, cold_s=0.2)
