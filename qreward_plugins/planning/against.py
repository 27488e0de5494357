"""Sets plans beside the steps that a journal has recorded: how far the predictions are off.

The plans take latencies, lengths of rollouts and data sources from the same journal. So the errors are those of the
simulated limits and of the scheduling, and not of guesses about the sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ..errors import InputError
from ..journal.database import reading
from .prediction import Plan

_TRAINED = "step IS NOT NULL AND cached = 0 AND coalesce(split, 'train') = 'train'"
"""New answers about samples of a training."""
# A judge that asks others has a row of its own, without requests, tokens and cost.
_STEPS = (
    "SELECT run_id, step, count(DISTINCT coalesce(sample_id, id)), min(recorded_at - latency_s), max(recorded_at), "
    f"sum(attempts), sum(prompt_tokens + completion_tokens), sum(cost_usd) FROM outcomes WHERE {_TRAINED} "
    "GROUP BY run_id, step ORDER BY max(id) DESC LIMIT ?"
)
_LAST = (
    f"SELECT source, recorded_at - latency_s, history FROM outcomes WHERE {_TRAINED} AND run_id = ? AND step = ? "
    "AND source != '' ORDER BY recorded_at DESC LIMIT 1"
)
_SHARES = f"SELECT data_source, count(*) FROM outcomes WHERE {_TRAINED} GROUP BY data_source ORDER BY data_source"


@dataclass(frozen=True)
class Step:
    """A training step, measured or planned. `seconds` are those from its first sample to its last outcome."""

    number: int
    samples: int
    seconds: float
    requests: float
    tokens: float
    cost_usd: float
    bound_by: str
    """What its last outcome waited for most; of a plan, the resource that binds."""


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
    found = []
    with reading(path) as connection:
        for run, number, samples, begins, ends, requests, tokens, cost in connection.execute(_STEPS, (last,)):
            bound_by = "-"
            for source, submitted_at, history in connection.execute(_LAST, (run, number)):
                bound_by = _bound(source, submitted_at - begins, history)
            found.append(Step(number, samples, ends - begins, requests, tokens, cost, bound_by))
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
    bound, cost = plan.bottleneck, plan.cost_usd
    bound_by = f"{bound.resource} of {', '.join(bound.sources)}" if bound.sources else bound.resource
    return Step(
        number,
        plan.samples,
        plan.step_s.p50,
        plan.attempts * plan.samples,
        sum(use.tokens for use in plan.sources),
        0.0 if cost is None else cost.p50,
        bound_by,
    )


def _bound(source: str, submitted_s: float, history: str | None) -> str:
    """Say what took most of the time of the outcome that ended last: its arrival, waiting, tries that failed, or the
    answer.
    """
    attempts = json.loads(history or "[]")
    waited_s = min((attempt["started_s"] for attempt in attempts), default=0.0)
    ended_s = max((attempt["ended_s"] for attempt in attempts), default=0.0)
    valid = [attempt["ended_s"] - attempt["started_s"] for attempt in attempts if attempt["result"] == "valid"]
    answer_s = max(valid, default=0.0)
    parts = {
        "arrival": submitted_s,
        f"waiting for {source}": waited_s,
        f"tries at {source}": ended_s - waited_s - answer_s,
        f"answer of {source}": answer_s,
    }
    return max(parts, key=lambda name: parts[name])
