"""Probes every source for `qreward check`: whether it answers, which limits it announces, and whether its judges can
distinguish a right answer from nonsense.

A probe bypasses the scheduler, because the scheduler would replace a source that throttles or rejects the API key by
another one, and its fault would not show. Nothing is written to the journal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import anyio

from ..config import judge_for, parts_of, sources_of, sources_of_models
from ..engine import RewardEngine
from ..engine.trial import Trial, cause_of_equal, try_out
from ..errors import InputError, InvalidReply, SourceError, TransientError
from ..judges import JudgeFailed, Leaf, kind_of
from ..samples import RawScore, Sample, Verdict
from ..scheduling import Upstream
from ..sources import LOGITS, TEXT, Reply, Request
from ..system.threads import abandon, cancel_all

END_WITHIN_S = 1.0
"""Longest wait in seconds for a call to end that was cancelled after its time limit."""
CLIENT_TOKENS = 1024
"""Most tokens of an answer to the question that a check asks as a client would."""
SAMPLE = Sample(
    messages=[{"role": "user", "content": "What is 17 plus 25? Answer with the number."}],
    response="17 plus 25 is 42",
    ground_truth="42",
    data_source="qreward/check",
)
"""A sample that most judges can score: the answer is right."""


@dataclass(frozen=True)
class Probe:
    """The answer of one source to one judge. `judge` is "" for a source that only clients of models ask.

    `latency_s` is the time to the complete reply in seconds. `announced` are the limits that the source states in its
    headers. `problem` is empty if the verdict is valid. `asked` is false if the sample does not fit the judge, so that
    nothing was sent. `trial` holds the rewards for `trial.PAIRS`; None if the judge does not ask for text, or the
    source did not reply to one of these requests.
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
    """Send one request of every judge to each of its sources; after a reply to an LLM judge also those of the trial.

    Each request has the source's own time limit. All sources are probed at the same time, and each gets one judge's
    requests at a time. `samples` maps the name of a judge to its sample; default: `SAMPLE`. The results are in the
    order of the configuration.
    """
    turns = {name: _Turn() for name in engine.upstreams}
    return await asyncio.gather(
        *(
            _ask(judge, engine.upstreams[name], (samples or {}).get(judge.name, SAMPLE), turns[name])
            for judge in engine.judges.values()
            for name in judge.sources
        )
    )


async def probe_for_clients(engine: RewardEngine) -> list[Probe]:
    """Send one question to each source that clients of models ask and no judge does. All at the same time."""
    judged = _judged(engine)
    names = [name for name in sources_of_models(engine.config) if name in engine.upstreams and name not in judged]
    return await asyncio.gather(*(_ask_as_client(engine.upstreams[name]) for name in names))


def samples_for(engine: RewardEngine, samples: Iterable[Sample]) -> dict[str, Sample]:
    """Return for each judge the first sample that makes it ask a source.

    The sample must be routed to the judge, or to a sum that contains it. Reads `samples` only as far as needed. Judges
    without such a sample are missing.
    """
    found: dict[str, Sample] = {}
    for sample in samples:
        routed = judge_for(engine.config, sample.data_source)
        for name in () if routed is None else parts_of(engine.config, routed):
            if name not in found and name in engine.judges and _asks(engine.judges[name], sample):
                found[name] = sample
        if len(found) == len(engine.judges):
            break
    return found


def _asks(judge: Leaf, sample: Sample) -> bool:
    """Return whether `judge` asks a source about `sample`."""
    try:
        return judge.screened(sample) is None
    except JudgeFailed:
        return False


def untried_judges(engine: RewardEngine) -> list[str]:
    """Return the names of judges that ask sources through `ask` only, so that no single request can be probed."""
    return [
        name for name in engine.config.judges if name not in engine.judges and kind_of(engine.config.judges[name]).asks
    ]


def idle_sources(engine: RewardEngine) -> list[str]:
    """Return the names of the sources that neither a judge nor a client of a model asks."""
    asked = {*_judged(engine), *sources_of_models(engine.config)}
    return [name for name in engine.upstreams if name not in asked]


def _judged(engine: RewardEngine) -> set[str]:
    return {name for judge in engine.config.judges for name in sources_of(engine.config, judge)}


class _Turn:
    """Lets one judge at a time ask a source. `silent_to` is the judge that got no answer in time; "" if none."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.silent_to = ""


async def _ask(judge: Leaf, upstream: Upstream, sample: Sample, turn: _Turn) -> Probe:
    try:
        request = judge.request(sample, attempt=0)
    except InputError as error:
        return Probe(judge.name, upstream.name, upstream.source.model, problem=str(error), asked=False)
    async with turn.lock:
        if turn.silent_to:
            # Otherwise each further judge would wait for the whole time limit, too.
            problem = f"not asked, because it did not answer the judge {turn.silent_to!r}"
            return Probe(judge.name, upstream.name, upstream.source.model, problem=problem)
        found, reply = await _asked(upstream, request, judge.name)
        if reply is None:
            if found.problem == _silent(upstream):
                turn.silent_to = judge.name
            return found
        verdict, problem = None, ""
        try:
            verdict = judge.verdict(request, reply)
        except (SourceError, InvalidReply) as error:
            problem = str(error)
        trial = await _trial(judge, upstream, sample) if judge.asks in (TEXT, LOGITS) else None
        return replace(found, verdict=verdict, problem=problem, trial=trial)


async def _ask_as_client(upstream: Upstream) -> Probe:
    bound = CLIENT_TOKENS
    request = Request(
        Sample([], ""), tuple(SAMPLE.messages), {"max_tokens": bound}, max_completion_tokens=bound, judge="check"
    )
    return (await _asked(upstream, request, ""))[0]


async def _asked(upstream: Upstream, request: Request, judge: str) -> tuple[Probe, Reply | None]:
    """Send a request. Return what is known without a verdict, and the reply if there is one."""
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    try:
        reply = await _reply(upstream, request)
    except TimeoutError:
        problem = _silent(upstream)
    except (SourceError, InvalidReply) as error:
        problem = str(error)
    else:
        model = reply.model or upstream.source.model
        return Probe(judge, upstream.name, model, loop.time() - started_at, reply.announced), reply
    return Probe(judge, upstream.name, upstream.source.model, problem=problem), None


def _silent(upstream: Upstream) -> str:
    return f"no answer within {upstream.timeout_s:g} s"


async def _trial(judge: Leaf, upstream: Upstream, like: Sample) -> Trial | None:
    raw: list[RawScore | None] = []

    async def reward(sample: Sample) -> float:
        request = judge.request(sample, attempt=0)
        verdict = judge.verdict(request, await _reply(upstream, request))
        raw.append(verdict.raw)
        return verdict.score

    try:
        trial = await try_out(reward, like)
    except (TimeoutError, SourceError, InputError):
        return None
    first = raw[0] if raw else None
    if judge.asks == LOGITS and first is not None and all(one == first for one in raw):
        return replace(trial, cause=cause_of_equal(first.components))
    return trial


async def _reply(upstream: Upstream, request: Request) -> Reply:
    """Send a request. Raises the errors of the source, TimeoutError after the time limit even if the source ignores its
    cancellation, and TransientError if another task cancels the call.
    """

    async def send() -> Reply:
        return await upstream.source.send(request, on_sent=lambda: None)

    call = asyncio.ensure_future(send())
    try:
        done, _ = await asyncio.wait([call], timeout=upstream.timeout_s)
    finally:
        for task in await cancel_all([call], within_s=END_WITHIN_S):
            abandon(task)
    if not done:
        raise TimeoutError
    if call.cancelled():
        raise TransientError(f"the call at {upstream.name} was cancelled by another task")
    return call.result()
