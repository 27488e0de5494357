"""Builds a rehearsal from a configuration and assumptions, and describes the assumptions in sentences."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from ..config import Config, configured_name, judge_for, parts_of, sources_of
from ..errors import InputError
from ..judges import Judge, JudgeRouter, Leaf
from ..judges import kind_of as judge_kind_of
from ..samples import Sample
from ..simulation.draws import BYTES_PER_TOKEN
from ..simulation.servers import Server
from ..sources import kind_of, open_source
from .advice import listed
from .recorded import Recorded, read_recorded
from .rehearsal import Rehearsal, Truth
from .rollouts import Lengths, Rollouts, check_data_sources, default_data_source


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about the sources. Raises `InputError` for numbers out of range."""

    latency_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of an average request without waiting, by the name of the source; "*" for all others. At a source with
    `batch` it is the time of a request of one call. Default: from the journal, or else the `usual_latency_s` of the
    kind (3 for a language model, 0.5 for a scoring service, 0.1 for a function); never from the journal for a source
    with `batch`, because it does not record how many calls a request carried."""
    prompt_tokens: int = 200
    """Tokens of the question of a rollout. Not used if rollouts come from a file or a journal."""
    verdict_tokens: float | None = None
    """Tokens of a verdict with its rationale. Default: from the journal, or else 120."""

    def __post_init__(self) -> None:
        for name, given_s in self.latency_s.items():
            if not 0.001 <= given_s <= 3600:
                raise InputError(f"the latency of {name!r} must be from 0.001 to 3600 seconds, not {given_s:g}")


VERDICT_TOKENS = 120.0
SPREAD = 0.3
STRAGGLERS = 0.01
"""Share of the requests that take ten times as long. A journal does not show it: the scheduler replaces such an attempt
by another one, and only the answered attempt is recorded."""
ERRORS = 0.01
"""Share of the requests that fail and are tried again, where no journal says it."""


def parse_latency(text: str, config: Config) -> dict[str, float]:
    """Read `3` (every source) or `a=2,b=0.5`; `a=2,5` is 2 for a and 5 for all others. Raises `InputError`."""
    latency_s: dict[str, float] = {}
    for part in text.split(","):
        name, separator, number = part.strip().rpartition("=")
        name = name.strip() if separator else "*"
        try:
            seconds = float(number)
        except ValueError:
            remedy = "write 3, or a=2,b=0.5"
            raise InputError(f"--latency {text!r}: {number!r} is no number of seconds; {remedy}") from None
        names = dict.fromkeys(map(configured_name, config.sources))
        if name != "*" and name not in (*config.sources, *names):
            raise InputError(f"--latency {text!r}: there is no source {name!r}; there are {', '.join(names)}")
        latency_s[name] = seconds
    return latency_s


def parse_data_source(text: str) -> tuple[str, float]:
    """Read `math/gsm8k` or, with its share of the samples, `math/gsm8k=0.7`. Raises `InputError`."""
    name, separator, number = text.rpartition("=")
    if not separator:
        return text, 1.0
    try:
        share = float(number)
    except ValueError:
        return text, 1.0
    if not (math.isfinite(share) and share > 0):
        raise InputError(f"--data-source {text!r}: a share must be above 0, not {number}")
    return name, share


_SHORTEST_LATENCY_S = 0.001


def set_up(
    config: Config,
    count: int,
    lengths: Lengths | None,
    assumptions: Assumptions,
    data_sources: Sequence[tuple[str, float]],
    workers: int,
) -> tuple[Rehearsal, Mapping[str, float], list[str]]:
    """Combine configuration, journal and assumptions: what is rehearsed, the samples by judge, and what is assumed, in
    sentences. Raises as `plan` does.
    """
    journal = config.engine.journal
    recorded = read_recorded(journal.path, set(map(configured_name, config.sources))) if journal is not None else {}
    truths = {
        name: _truth(config, name, assumptions, recorded.get(configured_name(name), Recorded()))
        for name in config.sources
    }
    named = tuple(data_sources)
    if not named and not (lengths and lengths.rollouts):
        named = ((default_data_source(config), 1.0),)
    check_data_sources(config, [name for name, _ in named])
    if lengths is None:
        # Of the recorded requests, without the judge's own text.
        own = _own_tokens(config, named[0][0])
        seen = tuple(max(1, tokens - own) for one in recorded.values() for tokens in one.prompt_tokens)
        lengths = Lengths(seen=seen, origin="the journal, questions included" if seen else "")
    rollouts = Rollouts(count, lengths, 0 if lengths.seen else assumptions.prompt_tokens, named)
    rehearsal = Rehearsal(config, truths, rollouts, workers)
    samples = rollouts.samples(0)
    by_judge = Counter(judge_for(config, sample.data_source) for sample in samples)
    unjudged = sorted({sample.data_source for sample in samples if judge_for(config, sample.data_source) is None})
    judged = {name: float(count) for name, count in by_judge.items() if name is not None}
    check_data_sources(config, unjudged[:1] if not judged else [])
    _check_judges(config, judged)
    asked = sources_asked(config, judged)
    questions = "" if lengths.seen or lengths.rollouts else f"questions of {assumptions.prompt_tokens:,}, "
    verdicts = sorted({round(truth.verdict_tokens) for truth in truths.values()})
    notes = [
        f"rollouts: {lengths.describe()}; {questions}verdicts of {listed([f'{tokens:,}' for tokens in verdicts])}",
        *(
            f"{name}: an average request takes {truths[name].latency_s:.3g} s ({truths[name].latency_from})"
            for name in asked
        ),
        f"latencies spread with a sigma of {_each(f'{truth.server.noise:.2g}' for truth in truths.values())}",
        f"{_percent(STRAGGLERS)} of the requests take ten times as long, "
        f"{_each(_percent(truth.server.error_share) for truth in truths.values())} fail and are tried again",
    ]
    if unjudged:
        notes.append(f"{by_judge[None]:,} samples have a data source that no route matches, e.g. {unjudged[0]!r}")
    if workers > 1:
        notes.append(f"{workers:,} processes divide the samples, and share the limits through one keeper")
    notes += _undeclared(config, asked)
    return rehearsal, judged, notes


def sources_asked(config: Config, judges: Iterable[str]) -> list[str]:
    """Return the sources that these judges ask, in the order of the configuration."""
    asked = {name for judge in judges for name in sources_of(config, judge)}
    return [name for name in config.sources if name in asked]


def _check_judges(config: Config, judged: Iterable[str]) -> None:
    """Raise `InputError` for a kind of judge without `rehearsed`, whose replies cannot be simulated."""
    for name in dict.fromkeys(part for judge in judged for part in parts_of(config, judge)):
        kind = judge_kind_of(config.judges[name])
        if inspect.getattr_static(kind, "rehearsed") is inspect.getattr_static(Judge, "rehearsed"):
            raise InputError(
                f"judge {name!r} cannot be planned: its kind {config.judges[name].kind!r} defines no `rehearsed`, "
                "which makes a reply without asking"
            )


def _slots(config: Config, name: str) -> int | None:
    node = config.sources[name]
    if not kind_of(node).local:
        # It is not opened: a plan needs no API key, and the key may be unset here.
        return None
    source = open_source(name, node)
    asyncio.run(source.aclose())
    return source.slots


def _truth(config: Config, name: str, assumptions: Assumptions, recorded: Recorded) -> Truth:
    """Return the assumed properties of a source."""
    takes_batches = getattr(config.sources[name], "batch", None) is not None
    given = [assumptions.latency_s[key] for key in (name, configured_name(name), "*") if key in assumptions.latency_s]
    latency_s, latency_from = kind_of(config.sources[name]).usual_latency_s, "assumed"
    if given:
        latency_s, latency_from = given[0], "given"
    elif recorded.latency_s is not None and not takes_batches:
        # Of a source with batches the journal does not say how many calls a request carried.
        latency_s, latency_from = max(_SHORTEST_LATENCY_S, recorded.latency_s), "journal"
    verdict_tokens = assumptions.verdict_tokens
    server = Server(
        name,
        seconds_per_unit=latency_s,
        overhead_s=0.0,
        noise=SPREAD if recorded.latency_s is None else min(3.0, recorded.deviation),
        straggler_share=STRAGGLERS,
        error_share=ERRORS if recorded.error_share is None else recorded.error_share,
        network_s=(0.0, 0.0),
    )
    if verdict_tokens is None:
        verdict_tokens = recorded.completion_tokens or VERDICT_TOKENS
    return Truth(server, latency_from, verdict_tokens, _slots(config, name))


def _each(words: Iterable[str]) -> str:
    """List the distinct words."""
    return listed(list(dict.fromkeys(words)))


def _own_tokens(config: Config, data_source: str) -> int:
    """Return the tokens that the judge of a data source adds to the texts of a sample; for a sum, the mean."""
    name = judge_for(config, data_source)
    if name is None:
        return 0
    leaves = JudgeRouter(config, key=bytes(16)).leaves
    added = [_added_tokens(leaves[part], data_source) for part in parts_of(config, name) if part in leaves]
    # Judges without messages use no tokens, and have none in the journal.
    worded = [tokens for tokens in added if tokens is not None]
    return round(fmean(worded)) if worded else 0


def _added_tokens(judge: Leaf, data_source: str) -> int | None:
    sample = Sample([{"role": "user", "content": ""}], "x", data_source=data_source)
    try:
        request = judge.request(sample, attempt=0)
        return request.size // BYTES_PER_TOKEN if request.messages else None
    except InputError:
        # Its template needs columns that only real samples have.
        return 0


def _undeclared(config: Config, asked: Sequence[str]) -> Iterator[str]:
    """The limits that are not declared and therefore assumed to be infinite."""
    for name in asked:
        limits = config.sources[name].limits
        lacks = [key for key in ("requests_per_minute", "tokens_per_minute", "concurrency") if not getattr(limits, key)]
        if lacks and not kind_of(config.sources[name]).local:
            yield f"{name}: no {listed(lacks, 'or')} declared, so none is assumed"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
