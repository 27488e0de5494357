"""A process of its own that scores a part of the samples: its task comes in on stdin, see `test_processes.py`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from qreward_plugins import RewardEngine, Sample, Scored


async def main(config: dict[str, Any], processes: int, responses: list[str]) -> dict[str, Any]:
    async with RewardEngine(config, processes=processes) as engine:
        outcomes = await engine.score_all(
            Sample([{"role": "user", "content": "Write a number as a word."}], response) for response in responses
        )
        requests = engine.statistics().sources["a"].requests
    rewards = [outcome.reward if isinstance(outcome, Scored) else outcome.describe() for outcome in outcomes]
    return {"rewards": rewards, "requests": requests}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(**json.load(sys.stdin)))))
