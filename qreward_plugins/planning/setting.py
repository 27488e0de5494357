"""Builds a rehearsal from a configuration and assumptions, and describes the assumptions in sentences."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, pstdev
from typing import Any, NamedTuple

from ..config import Config, configured_name, judge_for, parts_of, sources_of
from ..errors import InputError
from ..judges import Judge, JudgeFailed, JudgeRouter, Leaf
from ..judges import kind_of as judge_kind_of
from ..samples import Sample
from ..scheduling import CallFailed, Unanswered
from ..sources import kind_of, open_source
from .advice import listed
from .recorded import Recorded, read_recorded
from .rehearsal import Rehearsal, Truth
from .rollouts import (
    BYTES_PER_TOKEN,
    LENGTH_SHARE,
    Lengths,
    Rollouts,
    check_data_sources,
    default_data_source,
    journal_rows,
    length_share,
    relative_work,
    tokens_of,
)


class RequestTime(NamedTuple):
    """Seconds of an average request of n calls: `fixed_s + n * call_s`. A request carries several calls at a source
    with `batch`, otherwise one.
    """

    fixed_s: float
    call_s: float


@dataclass(frozen=True)
class Assumptions:
    """Assumptions about the sources and the rollouts. Times are seconds; shares go from 0 to 1.

    Raises `InputError` for numbers out of range.
    """

    latency_s: Mapping[str, float | RequestTime] = field(default_factory=dict)
    """Seconds of an average request without waiting, by the name of the source; "*" for all others. A number is the
    time of a request of one call. Default: from the journal, or else the `usual_latency_s` of the kind (3 for a
    language model, 0.5 for a scoring service, 0.1 for a function); never from the journal for a source with `batch`,
    because it does not record how many calls a request carried."""
    fixed_share: float = 0.5
    """The part of the time of a request of one call that does not grow with the number of its calls. Used for sources
    with `batch` whose `latency_s` is a number."""
    spread: float | None = None
    """Sigma of the lognormal noise on latencies. Default: from the journal, or else 0.3."""
    length_share: float | None = None
    """The part of a latency that is proportional to the length of the rollout. Default: from the journal, or else 0.5.
    """
    straggler_share: float = 0.01
    """Share of the requests that take ten times as long. A journal does not show it: the scheduler replaces such an
    attempt by another one, and only the answered attempt is recorded."""
    error_share: float = 0.01
    """Share of the requests that fail and are tried again."""
    prompt_tokens: int = 200
    """Tokens of the question of a rollout. Not used if rollouts come from a file or a journal."""
    verdict_tokens: float | None = None
    """Tokens of a verdict with its rationale. Default: from the journal, or else 120."""

    def __post_init__(self) -> None:
        for name, given in self.latency_s.items():
            parts = given if isinstance(given, RequestTime) else (given,)
            if not (all(part >= 0 for part in parts) and 0.001 <= sum(parts) <= 3600):
                written = "+".join(f"{part:g}" for part in parts)
                raise InputError(f"the latency of {name!r} must be from 0.001 to 3600 seconds, not {written}")
        for key in ("fixed_share", "length_share", "straggler_share", "error_share"):
            value = getattr(self, key)
            if value is not None and not 0 <= value <= 1:
                raise InputError(f"{key} must be from 0 to 1, not {value:g}")
        if self.error_share > 0.9:
            raise InputError(f"error_share must be at most 0.9, not {self.error_share:g}: nothing would ever end")
        if self.spread is not None and not 0 <= self.spread <= 3:
            raise InputError(f"spread must be from 0 to 3, not {self.spread:g}")
        if self.prompt_tokens < 0 or (self.verdict_tokens is not None and not 0 <= self.verdict_tokens < 1e6):
            raise InputError("prompt_tokens and verdict_tokens must be numbers of tokens, from 0 on")


VERDICT_TOKENS = 120.0
SPREAD = 0.3


def parse_latency(text: str, config: Config) -> dict[str, float | RequestTime]:
    """Read `3` (every source) or `a=2,b=0.5`; `a=2,5` is 2 for a and 5 for all others. `a=0.02+0.001` is a
    `RequestTime`: 0.02 for a request, plus 0.001 for each call in it. Raises `InputError`.
    """
    latency_s: dict[str, float | RequestTime] = {}
    for part in text.split(","):
        name, separator, number = part.strip().rpartition("=")
        name = name.strip() if separator else "*"
        try:
            seconds = _seconds(number)
        except ValueError:
            remedy = "write 3, or a=2,b=0.5, or a=0.02+0.001 (for a request, plus for each call in it)"
            raise InputError(f"--latency {text!r}: {number!r} is no number of seconds; {remedy}") from None
        names = dict.fromkeys(map(configured_name, config.sources))
        if name != "*" and name not in (*config.sources, *names):
            raise InputError(f"--latency {text!r}: there is no source {name!r}; there are {', '.join(names)}")
        latency_s[name] = seconds
    return latency_s


def _seconds(text: str) -> float | RequestTime:
    try:
        return float(text)  # first, because of numbers like 1e+2
    except ValueError:
        fixed, separator, call = text.partition("+")
        if not separator:
            raise
        return RequestTime(float(fixed), float(call))


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


@dataclass(frozen=True)
class Setting:
    """A rehearsal, and the origin of its numbers."""

    rehearsal: Rehearsal
    judged: Mapping[str, float]
    latency_from: Mapping[str, str]
    notes: tuple[str, ...]


def set_up(
    config: Config,
    count: int,
    lengths: Lengths | None,
    assumptions: Assumptions,
    data_sources: Sequence[tuple[str, float]],
    workers: int,
) -> Setting:
    """Combine configuration, journal and assumptions. Raises as `plan` does."""
    slots = {name: _slots(config, name) for name in config.sources}
    journal = config.engine.journal
    recorded = read_recorded(journal.path, set(map(configured_name, config.sources))) if journal is not None else {}
    named = tuple(data_sources)
    rows = journal_rows(recorded, _own_tokens(config, named[0][0] if named else default_data_source(config)))
    by_journal = length_share(rows) if assumptions.length_share is None else assumptions.length_share
    share = LENGTH_SHARE if by_journal is None else round(by_journal, 2)
    latency_from, truths = {}, {}
    for name in config.sources:
        latency_s, latency_from[name] = _latency(config, name, assumptions, recorded.get(configured_name(name)))
        if latency_from[name] == "journal":
            latency_s /= relative_work(rows.get(configured_name(name), ()), share)
        truths[name] = Truth(
            latency_s=latency_s,
            fixed_s=_fixed_s(config, name, assumptions, latency_s),
            spread=SPREAD,
            straggler_share=assumptions.straggler_share,
            error_share=assumptions.error_share,
            verdict_tokens=_verdict_tokens(assumptions, recorded.get(configured_name(name))),
            slots=slots[name],
        )
    if not named and not (lengths and lengths.rollouts):
        named = ((default_data_source(config), 1.0),)
    check_data_sources(config, [name for name, _ in named])
    if lengths is None:
        lengths = _recorded_lengths(recorded, _own_tokens(config, named[0][0])) or Lengths()
    rollouts = Rollouts(count, lengths, 0 if lengths.seen else assumptions.prompt_tokens, named)
    samples = rollouts.samples(0)
    usual = sum(tokens_of(sample.response) for sample in samples) / len(samples)
    works = [1 - share * (1 - tokens_of(sample.response) / usual) for sample in samples]
    by_length = pstdev(map(math.log, (max(work, 0.01) for work in works)))
    truths = {
        name: replace(truth, spread=_spread(assumptions, recorded.get(configured_name(name)), by_length))
        for name, truth in truths.items()
    }
    rehearsal = Rehearsal(config, truths, rollouts, usual, share, workers)
    judged, unjudged = _judged(config, samples)
    check_data_sources(config, sorted(unjudged)[:1] if not judged else [])
    _check_judges(config, judged, drawn=None if lengths.rollouts else samples[0])
    notes = [
        f"rollouts: {lengths.describe()}{_texts_note(assumptions, lengths, truths)}",
        _latency_note(config, truths, latency_from, recorded, judged),
        f"latencies spread with a sigma of {_each(f'{truth.spread:.2g}' for truth in truths.values())}; "
        f"{_percent(share)} of each is in proportion to the length of the rollout",
        f"{_percent(assumptions.straggler_share)} of the requests take ten times as long, "
        f"{_percent(assumptions.error_share)} fail and are tried again",
    ]
    if unjudged:
        rest = sum(unjudged.values())
        notes.append(f"{rest:,} samples have a data source that no route matches, e.g. {next(iter(unjudged))!r}")
    notes += _undeclared(config, judged)
    return Setting(rehearsal, judged, latency_from, tuple(notes))


def _check_judges(config: Config, judged: Iterable[str], *, drawn: Sample | None) -> None:
    """Raise `InputError` for a kind of judge without `rehearsed`, whose replies cannot be simulated, and for a judge
    that finds nothing to ask about in a `drawn` sample: it would seem to cost nothing.
    """
    opened = JudgeRouter(config, key=bytes(16)).judges
    for name in dict.fromkeys(part for judge in judged for part in parts_of(config, judge)):
        kind = judge_kind_of(config.judges[name])
        if inspect.getattr_static(kind, "rehearsed") is inspect.getattr_static(Judge, "rehearsed"):
            raise InputError(
                f"judge {name!r} cannot be planned: its kind {config.judges[name].kind!r} defines no `rehearsed`, "
                "which makes a reply without asking"
            )
        if drawn is not None and kind.asks and (why := asyncio.run(_why_unasked(opened[name], drawn))):
            remedy = "give real rollouts with --tokens file:PATH"
            raise InputError(f"judge {name!r} has nothing to ask about a made-up response: {why}; {remedy}")


async def _why_unasked(judge: Judge, sample: Sample) -> str:
    """Why a judge asks nothing about a sample; "" if it asks."""
    asked = False

    async def ask(call: Any) -> Any:
        nonlocal asked
        asked = True
        raise CallFailed(Unanswered("unasked"))

    unanswered: Any = ask
    try:
        failure = (await judge.judge(sample, unanswered)).failure
    except JudgeFailed as error:
        failure = error.failed
    return "" if asked or failure is None else failure.detail or failure.reason


def _slots(config: Config, name: str) -> int | None:
    node = config.sources[name]
    if not kind_of(node).local:
        # It is not opened: a plan needs no API key, and the key may be unset here.
        return None
    source = open_source(name, node)
    asyncio.run(source.aclose())
    return source.slots


def _latency(config: Config, name: str, assumptions: Assumptions, recorded: Recorded | None) -> tuple[float, str]:
    given = _given(name, assumptions)
    if given is not None:
        return (sum(given) if isinstance(given, RequestTime) else given), "given"
    # The journal does not say how many calls a request carried.
    if recorded is not None and recorded.latency_s is not None and not takes_batches(config, name):
        return max(_SHORTEST_LATENCY_S, recorded.latency_s), "journal"
    return kind_of(config.sources[name]).usual_latency_s, "assumed"


def _given(name: str, assumptions: Assumptions) -> float | RequestTime | None:
    latency_s = assumptions.latency_s
    return latency_s.get(name, latency_s.get(configured_name(name), latency_s.get("*")))


def _fixed_s(config: Config, name: str, assumptions: Assumptions, latency_s: float) -> float:
    given = _given(name, assumptions)
    if isinstance(given, RequestTime):
        return given.fixed_s
    return assumptions.fixed_share * latency_s if takes_batches(config, name) else 0.0


def takes_batches(config: Config, name: str) -> bool:
    """Whether a request to this source may carry several calls."""
    return getattr(config.sources[name], "batch", None) is not None


def _spread(assumptions: Assumptions, recorded: Recorded | None, by_length: float) -> float:
    """Return the noise on latencies: of the recorded spread, the part that lengths do not explain."""
    if assumptions.spread is not None:
        return assumptions.spread
    if recorded is None or recorded.latency_s is None:
        return SPREAD
    return min(3.0, math.sqrt(max(0.0, recorded.deviation**2 - by_length**2)))


def _each(words: Iterable[str]) -> str:
    """List the distinct words."""
    return listed(list(dict.fromkeys(words)))


def _verdict_tokens(assumptions: Assumptions, recorded: Recorded | None) -> float:
    if assumptions.verdict_tokens is not None:
        return assumptions.verdict_tokens
    return recorded.completion_tokens if recorded is not None and recorded.completion_tokens else VERDICT_TOKENS


def _recorded_lengths(recorded: Mapping[str, Recorded], own_tokens: int) -> Lengths | None:
    """Return the recorded lengths of requests, without the judge's own text."""
    seen = [max(1, tokens - own_tokens) for one in recorded.values() for tokens in one.prompt_tokens]
    return Lengths(seen=tuple(seen), origin="the journal, questions included") if seen else None


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


def _judged(config: Config, samples: Sequence[Sample]) -> tuple[dict[str, float], Counter[str]]:
    judged: Counter[str] = Counter()
    unjudged: Counter[str] = Counter()
    for sample in samples:
        judge = judge_for(config, sample.data_source)
        if judge is None:
            unjudged[sample.data_source] += 1
        else:
            judged[judge] += 1
    return dict(judged), unjudged


def _texts_note(assumptions: Assumptions, lengths: Lengths, truths: Mapping[str, Truth]) -> str:
    questions = "" if lengths.seen or lengths.rollouts else f"questions of {assumptions.prompt_tokens:,}, "
    verdicts = sorted({round(truth.verdict_tokens) for truth in truths.values()})
    return f"; {questions}verdicts of {listed([f'{tokens:,}' for tokens in verdicts])}"


def _latency_note(
    config: Config,
    truths: Mapping[str, Truth],
    latency_from: Mapping[str, str],
    recorded: Mapping[str, Recorded],
    judged: Mapping[str, float],
) -> str:
    asked = [name for name in config.sources if any(name in sources_of(config, judge) for judge in judged)]
    words = []
    for origin, wording in (
        ("journal", "from {} verdicts in the journal"),
        ("given", "as given"),
        ("assumed", "assumed"),
    ):
        names = [name for name in asked if latency_from[name] == origin]
        if names:
            count = f"{sum(recorded[name].verdicts for name in set(map(configured_name, names)) & set(recorded)):,}"
            each = ", ".join(f"{_time_of(config, name, truths[name])} at {name}" for name in names)
            words.append(f"{each} ({wording.format(count)})")
    return "an average request takes " + "; ".join(words)


def _time_of(config: Config, name: str, truth: Truth) -> str:
    if not takes_batches(config, name):
        return f"{truth.latency_s:.3g} s"
    return f"{truth.fixed_s:.3g} s plus {truth.latency_s - truth.fixed_s:.3g} s for each of its calls"


def _undeclared(config: Config, judged: Mapping[str, float]) -> list[str]:
    """List the limits that are not declared and therefore assumed to be infinite."""
    asked = [name for name in config.sources if any(name in sources_of(config, judge) for judge in judged)]
    by_lack: dict[str, list[str]] = {}
    for name in asked:
        source = config.sources[name]
        if kind_of(source).local:
            continue
        limits = source.limits
        lacks = [
            word
            for word, value in (
                ("requests", limits.requests_per_minute),
                ("tokens", limits.tokens_per_minute),
                ("concurrency", limits.concurrency),
            )
            if value is None
        ]
        if lacks:
            by_lack.setdefault(listed(lacks).replace(" and ", " or "), []).append(name)
    return [f"{listed(names)}: no limit of {lacks} declared, so none is assumed" for lacks, names in by_lack.items()]


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%"
