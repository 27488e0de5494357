"""Probes every source for `qreward check`: whether it answers, which limits it announces, and whether its judges can
distinguish a right answer from nonsense.

`show_prompts` sends nothing, and shows what would be sent (`--prompt`).

Each call names one source and goes through the engine's dispatcher, so that the limits hold, and a source that
throttles is waited for. Nothing is written to the journal.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

from ..config import Config, Route, judge_for, parts_of, routes_of, sources_of
from ..engine import RewardEngine
from ..engine.followed_calls import answers_of
from ..engine.trial import CAUSE_OF_EQUAL, Trial, try_out
from ..errors import ConfigurationError, InputError, InvalidReply, SourceError
from ..files import read_rollouts
from ..journal.stories import lines_of
from ..judges import JudgeFailed, Leaf
from ..judges.extraction import stated
from ..samples import Failed, RawScore, Sample, Verdict
from ..scheduling.calls import Answer, Call, Unanswered
from ..scheduling.upstream import Upstream
from ..secrets import one_line
from ..sources import LOGITS, TEXT, Reply, Request
from ..sources.base import Source
from .console import OK, OUT, say
from .engines import open_engine

_LINE_CHARS = 200_000

PATIENCE = 4
"""A call has so many times the time limit of its source, because it may have to wait for the limits of the source."""
RETRIES = 2
"""A call that fails in passing, or that is throttled, is made so many times more. A throttled one goes when its source
may be asked again."""
SAMPLE = Sample(
    messages=[{"role": "user", "content": "What is 17 plus 25? Answer with the number."}],
    response="17 plus 25 is 42",
    ground_truth="42",
    data_source="qreward/check",
)
"""A sample that most judges can score: the answer is right."""


@dataclass(frozen=True)
class Probe:
    """The answer of one source to one judge.

    `latency_s` is the time to the complete reply in seconds. `announced` are the limits that the source states in its
    headers. `problem` is empty if the verdict is valid. `asked` is false if the sample does not fit the judge, so that
    nothing was sent. `trial` holds the rewards for `trial.PAIRS`; None if there was none, or if `untried` says why it
    was not finished. `source` is "" for a judge that was tried as a whole.
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
    untried: str = ""


async def probe(engine: RewardEngine, samples: Mapping[str, Sample] | None = None) -> list[Probe]:
    """Send one request of every judge to each of its sources, all at the same time; after a reply to an LLM judge or a
    reward model also those of the trial.

    `samples` maps the name of a judge to its sample; default: `SAMPLE`. The results are in the order of the
    configuration.
    """
    return await asyncio.gather(
        *(
            _ask(engine, judge, engine.upstreams[name], (samples or {}).get(judge.name) or built_in(judge))
            for judge in engine.judges.values()
            for name in judge.sources
        )
    )


def built_in(judge: Leaf) -> Sample:
    """The sample for a judge for which the user has none."""
    return replace(SAMPLE, response=stated(SAMPLE.response, judge.extract))


def with_route_to_each(config: Config) -> Config:
    """Return `config` with a data source for each judge, by which `probe_whole` reaches it."""
    routes = {_data_source(name): Route(judge=name) for name in config.judges}
    return config.model_copy(update={"routes": {**routes, **dict(routes_of(config))}})


async def probe_whole(engine: RewardEngine, samples: Mapping[str, Sample], failed: set[str]) -> list[Probe]:
    """Let each judge that is no leaf score a sample: those that other packages add, and those that ask other judges. A
    judge with a part in `failed` is not tried.
    """
    names = [
        name
        for name in engine.config.judges
        if name not in engine.judges and failed.isdisjoint(parts_of(engine.config, name))
    ]
    own = {name: replace(SAMPLE, data_source=_data_source(name)) for name in names}
    return await asyncio.gather(*(_score(engine, name, samples.get(name, own[name])) for name in names))


async def _score(engine: RewardEngine, name: str, sample: Sample) -> Probe:
    loop = asyncio.get_running_loop()
    started_at = loop.time()
    deadline_s = PATIENCE * max((upstream.timeout_s for upstream in engine.upstreams.values()), default=1.0)
    try:
        outcome = await engine.score(sample, deadline_s=deadline_s)
    except ConfigurationError as error:
        return Probe(name, "", problem=str(error.mistakes[0]))
    if isinstance(outcome, Failed):
        return Probe(name, "", problem=outcome.describe())
    return Probe(name, "", latency_s=loop.time() - started_at, verdict=outcome.verdict)


def _data_source(judge: str) -> str:
    return f"{SAMPLE.data_source}/{judge}"


def samples_for(engine: RewardEngine, samples: Iterable[Sample]) -> dict[str, Sample]:
    """Return for each judge the first sample that makes it ask a source, and for a judge of judges the first that makes
    all of its parts ask.

    The sample must be routed to the judge; that of a part, to a judge that contains it. Reads `samples` only as far as
    needed. Judges without such a sample are missing.
    """
    found: dict[str, Sample] = {}
    for sample in samples:
        routed = judge_for(engine.config, sample.data_source)
        if routed is None:
            continue
        parts = parts_of(engine.config, routed)
        asked = [name for name in parts if name not in engine.judges or _asks(engine.judges[name], sample)]
        for name in asked if routed in engine.judges or asked != list(parts) else [routed, *asked]:
            found.setdefault(name, sample)
        if len(found) == len(engine.config.judges):
            break
    return found


def _asks(judge: Leaf, sample: Sample) -> bool:
    """Return whether `judge` asks a source about `sample`."""
    try:
        return judge.screened(sample) is None
    except JudgeFailed:
        return False


def idle_sources(engine: RewardEngine) -> list[str]:
    """Return the names of the sources that no judge asks."""
    judged = {name for judge in engine.config.judges for name in sources_of(engine.config, judge)}
    return [name for name in engine.upstreams if name not in judged]


class _Failed(Exception):
    """A call that has no answer."""


async def _ask(engine: RewardEngine, judge: Leaf, upstream: Upstream, sample: Sample) -> Probe:
    said, answer = await _judged_by(engine, judge, upstream, sample)
    if isinstance(answer, Unanswered):
        asked = answer.reason != "input"
        return Probe(judge.name, upstream.name, upstream.source.model, problem=_why(answer), asked=asked)
    model, announced = answer.model or upstream.source.model, answer.value[0].announced
    found = Probe(judge.name, upstream.name, model, answer.service_s, announced)
    found = replace(found, problem=said) if isinstance(said, str) else replace(found, verdict=said)
    if judge.asks not in (TEXT, LOGITS):
        return found
    raw: list[RawScore | None] = []

    async def reward(sample: Sample) -> float:
        shown = replace(sample, response=stated(sample.response, judge.extract))
        said, answer = await _judged_by(engine, judge, upstream, shown)
        if isinstance(answer, Unanswered):
            # A sample of the trial may lack what the judge's instructions need.
            raise _Failed("" if answer.reason == "input" else _why(answer))
        if isinstance(said, str):
            raise InvalidReply(said)
        raw.append(said.raw)
        return said.score

    try:
        trial = await try_out(reward, sample)
    except _Failed as failed:
        return replace(found, untried=str(failed))
    first = raw[0] if raw else None
    if judge.asks == LOGITS and first is not None and all(one == first for one in raw):
        trial = replace(trial, cause=CAUSE_OF_EQUAL)
    return replace(found, trial=trial)


async def _judged_by(
    engine: RewardEngine, judge: Leaf, upstream: Upstream, sample: Sample
) -> tuple[Verdict | str, Answer[Any] | Unanswered]:
    """Return the verdict of a source on a sample, or why its reply is none; and its answer. A sample that the judge
    scores without a call has no answer (`input`).
    """
    with suppress(JudgeFailed):  # the same happens to the request, which says why
        floor = judge.screened(sample)
        if floor is not None:
            why = "" if floor.failure is None else floor.failure.detail
            return "", Unanswered("input", why or "the judge asks no source about this sample")

    def read(request: Request, reply: Reply) -> tuple[Reply, Verdict | str]:
        try:
            return reply, judge.verdict(request, reply)
        except (SourceError, InvalidReply) as error:
            return reply, str(error)

    def request(attempt: int) -> Request:
        return judge.request(sample, attempt=attempt)

    dispatcher = engine.dispatcher()
    call = Call((upstream.name,), request, read, name=judge.name, max_attempts=1 + RETRIES)
    due_at = dispatcher.now() + PATIENCE * upstream.timeout_s
    (answer,) = await answers_of(dispatcher, dispatcher.batches.new(), [call], due_at)
    return ("" if isinstance(answer, Unanswered) else answer.value[1]), answer


def _why(answer: Unanswered) -> str:
    return answer.detail or answer.reason


# What would be sent


async def show_prompts(config: Config, path: Path, rollouts: Path | None, row: int | None) -> int:
    """Print what each judge would send to each of its sources. `row`: of this row of the rollouts, else of the first
    one that goes to the judge, or of a built-in sample.

    Raises `ConfigurationError`, and `InputError` for a row that is not there.
    """
    async with open_engine(config, path) as engine:
        chosen = _chosen(engine, rollouts, row)
        for name, judge in engine.judges.items():
            for source in judge.sources:
                for sample in engine.seen_by(name, chosen.get(name) or built_in(judge)):
                    _show_prompt(judge, engine.upstreams[source].source, sample, is_built_in=name not in chosen)
    return OK


def _chosen(engine: RewardEngine, rollouts: Path | None, row: int | None) -> Mapping[str, Sample]:
    if rollouts is None:
        return {}
    if row is None:
        return samples_for(engine, (rollout.sample for rollout in read_rollouts(rollouts)))
    count = 0
    for count, rollout in enumerate(read_rollouts(rollouts), 1):
        if count == row:
            return dict.fromkeys(engine.judges, rollout.sample)
    raise InputError(f"{rollouts}: has no row {row}; it has {count:,}, counted from 1")


def _show_prompt(judge: Leaf, source: Source, sample: Sample, *, is_built_in: bool) -> None:
    OUT.rule(Text(f"judge {judge.name} to source {source.name} ({one_line(source.model, 200)})", "bold"), align="left")
    try:
        verdict = judge.screened(sample)
        request = judge.request(sample, attempt=0)
    except (InputError, JudgeFailed) as error:
        of_yours = "; this is the built-in sample, show a row of yours with --rollouts FILE" if is_built_in else ""
        say(OUT, Text(f"nothing: {one_line(str(error), _LINE_CHARS)}{of_yours}", "red"))
        return
    if verdict is not None:
        why = verdict.failure.describe() if verdict.failure is not None else "it needs no source"
        say(OUT, f"nothing: the reward is {verdict.score:g}; {one_line(why, _LINE_CHARS)}")
        return
    for line in _written(source, request):
        say(OUT, one_line(line, _LINE_CHARS))


def _written(source: Source, request: Request) -> Iterator[str]:
    """The lines of the body of a request, or of the sample that a function gets."""
    written = source.written(request)
    if written is not None:
        yield from lines_of(written)
        return
    sample = request.sample
    shown = {"prompt": list(sample.messages), "response": sample.response, "ground_truth": sample.ground_truth}
    yield "the function is called with:"
    yield from lines_of(json.dumps(shown, default=repr))
