"""Reads journals: latencies and token counts of sources for a plan, and the steps that stand beside their plans.

A plan needs the duration of an average request without waiting. So it uses `service_s`, the time of the answered
attempt. `latency_s` starts at the submission of the sample, and includes waiting, retries and other attempts.
Stragglers are left out of the mean, because the plan adds its own.

The plans of recorded steps take latencies, lengths of rollouts and data sources from the same journal. So their errors
are those of the simulated limits and of the scheduling, and not of guesses about the sources.

A plan neither creates nor changes a journal.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any

from ..config.names import configured_name
from ..errors import InputError
from ..journal.database import reading

if TYPE_CHECKING:
    from .prediction import Plan

LATEST = 50_000
"""Only this many entries are read, the latest ones."""
LATEST_ATTEMPTS = 5_000
"""The same for the requests of samples, which show how many failed."""
FEWEST = 20
"""Fewest verdicts of a source for which its numbers are used."""
_STRAGGLER_FROM = 5.0
"""An answer that takes at least this multiple of the median is a straggler."""
_SELECT = (
    "SELECT source, service_s, attempts, prompt_tokens, completion_tokens FROM outcomes "
    "WHERE outcome = 'scored' AND cached = 0 ORDER BY id DESC LIMIT ?"
)
_RESULTS = (
    "SELECT json_extract(value, '$.source'), sum(json_extract(value, '$.result') = 'failed'), count(*) FROM "
    "(SELECT history FROM outcomes WHERE cached = 0 AND history IS NOT NULL ORDER BY id DESC LIMIT ?), "
    "json_each(history) WHERE json_extract(value, '$.result') IN ('valid', 'invalid', 'failed') GROUP BY 1"
)

_TRAINED = "step IS NOT NULL AND cached = 0 AND coalesce(split, 'train') = 'train'"
"""New answers about samples of a training."""
# A judge that asks others has a row of its own, without requests, tokens and cost.
_STEPS = (
    "SELECT step, count(DISTINCT coalesce(sample_id, id)), max(recorded_at) - min(recorded_at - latency_s), "
    f"sum(attempts), sum(prompt_tokens + completion_tokens), sum(cost_usd) FROM outcomes WHERE {_TRAINED} "
    "GROUP BY run_id, step ORDER BY max(id) DESC LIMIT ?"
)
_SHARES = f"SELECT data_source, count(*) FROM outcomes WHERE {_TRAINED} GROUP BY data_source ORDER BY data_source"


@dataclass(frozen=True)
class Recorded:
    """The numbers that a journal has of one source; None for a number with too few verdicts."""

    latency_s: float | None = None
    """Mean time of an attempt that was answered, in seconds, stragglers left out."""
    deviation: float = 0.0
    """Standard deviation of the logarithm of these times, stragglers left out; 0 where `latency_s` is None."""
    completion_tokens: float | None = None
    """Mean of a verdict."""
    prompt_tokens: tuple[int, ...] = ()
    error_share: float | None = None
    """The part of its requests that failed; throttled and cancelled ones do not count."""


def read_recorded(path: str, names: Collection[str]) -> dict[str, Recorded]:
    """Read the journal at `path`. Returns the numbers of the sources `names`.

    Empty if the file does not exist. Raises `JournalError` for a file that is not a readable journal.
    """
    if not os.path.exists(path):
        return {}
    with reading(path) as connection:
        verdicts = connection.execute(_SELECT, (LATEST,)).fetchall()
        results = connection.execute(_RESULTS, (LATEST_ATTEMPTS,)).fetchall()
    return {name: _recorded(name, verdicts, results) for name in names}


def _recorded(name: str, verdicts: Sequence[Any], results: Sequence[Any]) -> Recorded:
    of_it = [row for source, *row in verdicts if source == name]
    service_s = [seconds for seconds, *_ in of_it if seconds]
    # The usage of several attempts is recorded only as a sum.
    single = [tokens for _, attempts, *tokens in of_it if attempts == 1]
    # A source with several keys is as many sources here.
    counts = [(failed, count) for source, failed, count in results if configured_name(source) == name]
    failed, requests = (sum(each) for each in zip(*counts, strict=True)) if counts else (0, 0)
    enough = len(single) >= FEWEST
    most_s = _STRAGGLER_FROM * median(service_s) if len(service_s) >= FEWEST else 0.0
    usual = [seconds for seconds in service_s if seconds < most_s]
    return Recorded(
        latency_s=fmean(usual) if usual else None,
        deviation=pstdev(map(math.log, usual)) if usual else 0.0,
        completion_tokens=fmean(completion for _, completion in single) if enough else None,
        prompt_tokens=tuple(prompt for prompt, _ in single if prompt) if enough else (),
        error_share=failed / requests if requests >= FEWEST else None,
    )


@dataclass(frozen=True)
class Step:
    """A training step, measured or planned. `seconds` are those from its first sample to its last outcome."""

    number: int
    samples: int
    seconds: float
    requests: float
    tokens: float
    cost_usd: float


@dataclass(frozen=True)
class Compared:
    """A measured step, and what the plan of a step of as many samples says."""

    measured: Step
    planned: Step
    assumed: tuple[str, ...] = ()
    """What the plan does not know, as sentences."""


def read_steps(path: str, last: int) -> list[Step]:
    """Read the latest steps of a journal, the earliest of them first. Raises `JournalError` for a file that is no
    journal, and `InputError` for one without steps.
    """
    with reading(path) as connection:
        found = [Step(*row) for row in connection.execute(_STEPS, (last,))]
    if not found:
        raise InputError(f"{path} has no training steps; its samples have no step, or all of them are of a validation")
    return found[::-1]


def recorded_shares(path: str) -> list[tuple[str, float]]:
    """Return the data sources of a journal's training samples, and how many there are of each."""
    with reading(path) as connection:
        return [(name, float(count)) for name, count in connection.execute(_SHARES)]


def compare(steps: Sequence[Step], planned: Callable[[int], Plan]) -> list[Compared]:
    """Set a plan beside each step. `planned` makes that of a step of so many samples."""
    plans = {count: planned(count) for count in sorted({step.samples for step in steps})}
    return [Compared(step, _as_step(step.number, plans[step.samples]), plans[step.samples].notes) for step in steps]


def errors_of(compared: Sequence[Compared]) -> dict[str, float]:
    """Return the median error of the plans, by what they predict: 0.1 for a prediction that is 10 % too high. What was
    0 in every step is left out.
    """
    errors: dict[str, float] = {}
    for name in ("seconds", "requests", "tokens", "cost_usd"):
        pairs = [(getattr(each.planned, name), getattr(each.measured, name)) for each in compared]
        if found := [planned / measured - 1 for planned, measured in pairs if measured]:
            errors[name] = median(found)
    return errors


def in_figures(compared: Sequence[Compared]) -> Mapping[str, Any]:
    """Return all numbers for JSON."""
    return {"steps": [asdict(each) for each in compared], "errors": errors_of(compared)}


def _as_step(number: int, plan: Plan) -> Step:
    return Step(
        number,
        plan.samples,
        plan.step_s.p50,
        plan.attempts * plan.samples,
        sum(use.tokens for use in plan.sources),
        0.0 if plan.cost_usd is None else plan.cost_usd.p50,
    )
