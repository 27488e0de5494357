"""Engines against judge servers on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from qreward_plugins import EngineStatistics, Outcome, RewardEngine, Sample
from qreward_plugins.testing import PlayFault, ScoreCall, overlap_score

from .configs import make_config
from .leaks import connections_left, tasks_left


@dataclass(frozen=True)
class Wired:
    """What became of samples that were judged over real connections."""

    outcomes: list[Outcome]
    statistics: EngineStatistics

    @property
    def rewards(self) -> list[float | None]:
        return [outcome.reward for outcome in self.outcomes]


def wired(servers: Mapping[str, Any], samples: Iterable[Sample], **options: Any) -> Wired:
    """Score samples as one batch over judge servers by name; no task and no connection may be left. `options`: those
    of `make_config`.
    """

    async def main() -> Wired:
        async with RewardEngine(make_config(servers, **options)) as engine:
            outcomes = await engine.score_all(samples)
            statistics = engine.statistics()
        assert tasks_left() == []
        return Wired(outcomes, statistics)

    played = asyncio.run(main())
    urls = [server if isinstance(server, str) else server.base_url for server in servers.values()]
    assert connections_left(*urls, listening=False) == []
    return played


def by_word(call: Any) -> Any:
    """A scorer that does what the last word of the response says: a number, `refuse` (422), `break` (500), `nan`, or
    `nonsense`, a text that is no verdict.
    """
    word = call.blocks["response"].split()[-1]
    if word in ("refuse", "break"):
        raise PlayFault("error_422" if word == "refuse" else "error_500")
    return "I would say seven" if word == "nonsense" else float(word)


def overlap_of(sample: Sample) -> float:
    """What a judge server with the built-in scorer says of a sample."""
    return overlap_score(ScoreCall("judge", sample.messages, {}, sample.response))
