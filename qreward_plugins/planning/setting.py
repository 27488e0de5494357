"""Builds a rehearsal from a configuration and assumptions, and describes the assumptions in sentences."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev

from ..config import Config, configured_name, judge_for, parts_of, sources_of
from ..errors import InputError
from ..judges import Judge, JudgeRouter, Leaf
from ..judges import kind_of as judge_kind_of
from ..samples import Sample
from ..sources import kind_of, open_source
from .assumptions import SPREAD, VERDICT_TOKENS, Assumptions, RequestTime
from .bottleneck import listed
from .length_effect import LENGTH_SHARE, journal_rows, length_share, relative_work
from .lengths import BYTES_PER_TOKEN, Lengths, tokens_of
from .recorded import Recorded, read_recorded
from .rehearsal import Rehearsal, Truth
from .rollouts import Rollouts, check_data_sources, default_data_source

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
    rehearsal = Rehearsal(config, truths, rollouts, usual, share)
    judged, unjudged = _judged(config, samples)
    check_data_sources(config, sorted(unjudged)[:1] if not judged else [])
    _check_judges(config, judged)
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
