"""One live request to every source of a configuration, to see that it answers, and what it says of itself.

A probe goes around the scheduler on purpose: it tells about one source at a time, and a source that is throttled or
refuses the key must be shown as that, and not be replaced by a neighbour.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import anyio

from .engine import RewardEngine
from .errors import InvalidVerdict, SourceError
from .samples import Sample, Verdict
from .sources import Reply

SAMPLE = Sample(
    messages=[{"role": "user", "content": "What is 17 plus 25? Answer with the number."}],
    response="17 plus 25 is 42.",
    ground_truth="42",
    data_source="qreward/check",
)
"""A sample that any judge can score: the answer is right."""


@dataclass(frozen=True)
class Probe:
    """What one source answered one judge.

    `latency_s` is the time to the whole reply in seconds; `announced` are the limits that the source states in its
    headers; `problem` is empty when the verdict is valid.
    """

    judge: str
    source: str
    model: str = ""
    latency_s: float | None = None
    announced: Mapping[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    problem: str = ""


async def probe(engine: RewardEngine, sample: Sample = SAMPLE) -> AsyncIterator[Probe]:
    """Ask every source of every judge once, in the order of the configuration, each within its own time limit."""
    for judge in engine.judges.values():
        for name in judge.sources:
            lane = engine.lanes[name]
            loop = asyncio.get_running_loop()
            started_at = loop.time()
            reply: Reply | None = None
            verdict, problem = None, ""
            try:
                with anyio.fail_after(lane.timeout_s):
                    request = judge.request(sample, attempt=0)
                    reply = await lane.source.send(request, on_sent=lambda: None)
                latency_s = loop.time() - started_at
                verdict = judge.verdict(request, reply)
            except TimeoutError:
                problem = f"no answer within {lane.timeout_s:g} s"
            except (SourceError, InvalidVerdict) as error:
                problem = str(error)
            yield Probe(
                judge.name,
                name,
                model=(reply.model if reply else "") or lane.source.model,
                latency_s=latency_s if reply else None,
                announced=reply.announced if reply else {},
                verdict=verdict,
                problem=problem,
            )
