"""A process of tests that shares limits with others: scores the samples it is told to, and tells what became of them.

It reads one command a line and answers each with one line of JSON: `score FIRST COUNT`, `close`, `stats`, `reload`, and
`deadline`, which tells the configured one. It is given a configuration, or the path of one, which it does not watch.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from qreward_plugins import RewardEngine, Sample


def sample(number):
    return Sample([{"role": "user", "content": "Which number?"}], f"It is {number}.", id=str(number))


def tell(**what):
    print(json.dumps(what), flush=True)


async def blind(file):
    """Watch a file that never changes."""
    await asyncio.get_running_loop().create_future()
    yield


async def main(tree):
    loop = asyncio.get_running_loop()
    engine = RewardEngine(tree)
    engine._reloader._watch = blind
    tell(pid=os.getpid())
    scoring = set()

    async def score(first, count):
        outcomes = await engine.score_all(map(sample, range(first, first + count)), deadline_s=100.0)
        tell(
            scored=sum(outcome.reward is not None for outcome in outcomes),
            problems=sorted({outcome.describe() for outcome in outcomes if outcome.reward is None}),
        )

    while line := await loop.run_in_executor(None, sys.stdin.readline):
        command, *numbers = line.split()
        if command == "score":
            scoring.add(asyncio.ensure_future(score(*map(int, numbers))))
        elif command == "stats":
            share = dict(engine.upstreams["a"].quota.share)
            tell(kept_by=engine.statistics().limits_kept_by, share=share)
        elif command == "reload":
            engine.dispatcher()
            tell(changes=str(await engine.reload()))
        elif command == "deadline":
            engine.dispatcher()
            tell(deadline_s=engine.config.engine.deadline_s)
        elif command == "close":
            await engine.aclose()
            tell(closed=True)
    await asyncio.gather(*scoring)
    await engine.aclose()


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
