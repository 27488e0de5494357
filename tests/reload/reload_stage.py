"""Engines over simulated sources in virtual time, for reloads."""

from __future__ import annotations

import asyncio
import json

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources.base import Reply


def tree(*names, limits=None, judge=None, engine=None, **top):
    return {
        "sources": {
            name: {
                "kind": "openai",
                "base_url": f"http://{name}.invalid/v1",
                "model": "m",
                "limits": (limits or {}).get(name, {}),
            }
            for name in names
        },
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1], **(judge or {})}},
        "engine": {"seed": 1, **(engine or {})},
        **top,
    }


def written(score):
    def answer(request):
        text = json.dumps({"id": request.nonce, "rationale": "so", "score": score})
        return Reply(text=text, usage=Usage(10, 5), model="m")

    return answer


class Stage:
    """Simulated sources `a`, `b` and `c`; `sent` lists (time, source) of every request."""

    def __init__(self, **latencies):
        self.sent = []
        self.sources = {
            name: SimulatedSource(
                name, behaviour=self._behaviour(name, latencies.get(name, 1.0)), answer=written(score), model="m"
            )
            for name, score in (("a", 0.25), ("b", 0.5), ("c", 0.75))
        }

    def _behaviour(self, name, latency_s):
        def behave(number, request, now):
            self.sent.append((now, name))
            return latency_s

        return behave

    def times(self, name):
        return [at for at, source in self.sent if source == name]

    def play(self, config, main, **options):
        async def runs():
            async with RewardEngine(config, sources=self.sources, **options) as engine:
                said = await main(engine)
            assert {source.in_flight for source in self.sources.values()} == {0}
            assert asyncio.all_tasks() == {asyncio.current_task()}
            return said

        return run(runs())


NO_HEDGE = {"scheduling": {"hedge": False}}


def sample(number=0, **fields):
    return Sample([{"role": "user", "content": f"Is it {number}?"}], f"yes {number}", **fields)


def batch(engine, count, **options):
    return asyncio.ensure_future(engine.score_all([sample(n) for n in range(count)], **options))
