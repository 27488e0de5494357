"""Live requests to every source of a configuration, to see that it answers, what it says of itself, and that judges can
tell a right answer from nonsense.

A probe goes around the scheduler on purpose: it tells about one source at a time, and a source that is throttled or
refuses the key must be shown as that, and not be replaced by a neighbour. Nothing gets into the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import anyio

from .config import judge_for, parts_of
from .ending import end, forget
from .engine import RewardEngine
from .errors import InputError, InvalidVerdict, SourceError, TransientError
from .judges import Judge, LLMJudge
from .samples import Sample, Verdict
from .scheduling import Lane
from .sources import Reply, Request
from .trial import Trial, try_out

END_WITHIN_S = 1.0
"""Longest time, in seconds, for which a call is waited for that was cancelled because its time is up."""
SAMPLE = Sample(
    messages=[{"role": "user", "content": "What is 17 plus 25? Answer with the number."}],
    response="17 plus 25 is 42",
    ground_truth="42",
    data_source="qreward/check",
)
"""A sample that most judges can score: the answer is right."""


@dataclass(frozen=True)
class Probe:
    """What one source answered one judge.

    `latency_s` is the time to the whole reply in seconds; `announced` are the limits that the source states in its
    headers; `problem` is empty when the verdict is valid. `asked` is false when the sample does not fit the judge, so
    that nothing was sent. `trial` is what a language model made of the pairs of `trial.PAIRS`; None where it was not
    tried: no reply, another kind of judge, or a source that stopped answering on the way.
    """

    judge: str
    source: str
    model: str = ""
    latency_s: float | None = None
    announced: Mapping[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None
    problem: str = ""
    asked: bool = True
    trial: Trial | None = None


async def probe(engine: RewardEngine, samples: Mapping[str, Sample] | None = None) -> list[Probe]:
    """Ask every source of every judge, each within its own time limit: once, and where a language model has replied for
    the answers of the trial as well.

    All sources are asked at the same time, each by one judge after the other. `samples` holds the sample for a judge by
    its name; default: `SAMPLE`. The results are in the order of the configuration.
    """
    turns = {name: _Turn() for name in engine.lanes}
    return await asyncio.gather(
        *(
            _ask(judge, engine.lanes[name], (samples or {}).get(judge.name, SAMPLE), turns[name])
            for judge in engine.judges.values()
            for name in judge.sources
        )
    )


def samples_for(engine: RewardEngine, samples: Iterable[Sample]) -> dict[str, Sample]:
    """For every judge the first of `samples` that is routed to it, or to a sum that it is a part of, and that it has to
    ask a source about.

    Reads no further than it must. Judges without such a sample are left out.
    """
    found: dict[str, Sample] = {}
    for sample in samples:
        routed = judge_for(engine.config, sample.data_source)
        for name in () if routed is None else parts_of(engine.config, routed):
            if name not in found and engine.judges[name].screen(sample) is None:
                found[name] = sample
        if len(found) == len(engine.judges):
            break
    return found


def idle_sources(engine: RewardEngine) -> list[str]:
    """Names of the sources that no judge asks."""
    asked = {name for judge in engine.judges.values() for name in judge.sources}
    return [name for name in engine.lanes if name not in asked]


class _Turn:
    """Whose turn it is to ask a source, and the judge to whom it gave no answer in time."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.silent_to = ""


async def _ask(judge: Judge, lane: Lane, sample: Sample, turn: _Turn) -> Probe:
    loop = asyncio.get_running_loop()
    reply: Reply | None = None
    latency_s: float | None = None
    verdict, problem, trial = None, "", None
    try:
        request = judge.request(sample, attempt=0)
    except InputError as error:
        return Probe(judge.name, lane.name, lane.source.model, problem=str(error), asked=False)
    async with turn.lock:
        if turn.silent_to:
            # Every further judge would wait as long again, for the same silence.
            problem = f"not asked, because it gave no answer to the judge {turn.silent_to!r}"
            return Probe(judge.name, lane.name, lane.source.model, problem=problem)
        started_at = loop.time()
        try:
            reply = await _reply(lane, request)
            latency_s = loop.time() - started_at
            verdict = judge.verdict(request, reply)
        except TimeoutError:
            problem, turn.silent_to = f"no answer within {lane.timeout_s:g} s", judge.name
        except (SourceError, InvalidVerdict) as error:
            problem = str(error)
        if reply is not None and isinstance(judge, LLMJudge):
            trial = await _trial(judge, lane, sample)
    return Probe(
        judge.name,
        lane.name,
        model=(reply.model if reply else "") or lane.source.model,
        latency_s=latency_s,
        announced=reply.announced if reply else {},
        verdict=verdict,
        problem=problem,
        trial=trial,
    )


async def _trial(judge: LLMJudge, lane: Lane, like: Sample) -> Trial | None:
    async def reward(sample: Sample) -> float:
        request = judge.request(sample, attempt=0)
        return judge.verdict(request, await _reply(lane, request)).score

    try:
        return await try_out(reward, like)
    except (TimeoutError, SourceError, InputError):
        return None


async def _reply(lane: Lane, request: Request) -> Reply:
    """Raises TimeoutError, and what the source raises. A source may be cancelled by others, or not let itself be."""

    async def send() -> Reply:
        return await lane.source.send(request, on_sent=lambda: None)

    call = asyncio.ensure_future(send())
    try:
        done, _ = await asyncio.wait([call], timeout=lane.timeout_s)
    finally:
        for task in await end([call], within_s=END_WITHIN_S):
            forget(task)
    if not done:
        raise TimeoutError
    if call.cancelled():
        raise TransientError(f"the call at {lane.name} was cancelled from outside")
    return call.result()
