"""A journal in memory, for virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from qreward_plugins import Outcome, Scored, Verdict
from qreward_plugins.samples.spent import NOTHING


class MemoryJournal:
    """Keeps all outcomes, and the verdicts by their keys. Looking something up takes `seconds`."""

    def __init__(self, seconds: float = 0.01) -> None:
        self.seconds = seconds
        self.outcomes: list[Outcome] = []
        self.verdicts: dict[str, Verdict] = {}

    async def get(self, *keys: str) -> Verdict | None:
        await asyncio.sleep(self.seconds)
        known = next((self.verdicts[key] for key in keys if key in self.verdicts), None)
        return known and replace(known, cached=True, spent=NOTHING)

    async def put(self, key: str | None, sample: Any, outcome: Outcome, history: Any = ()) -> None:
        self.note(key, sample, outcome)

    def note(self, key: str | None, sample: Any, outcome: Outcome, history: Any = ()) -> None:
        self.outcomes.append(outcome)
        if key is not None and isinstance(outcome, Scored):
            self.verdicts[key] = outcome.verdict

    async def aclose(self) -> None:
        pass
