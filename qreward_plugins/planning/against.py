"""Sets plans beside the steps that a journal has recorded: how far the predictions are off.

The plans take latencies, lengths of rollouts and data sources from the same journal. So the errors are those of the
simulated limits and of the scheduling, and not of guesses about the sources.
"""

from __future__ import annotations

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
    "SELECT step, count(DISTINCT coalesce(sample_id, id)), max(recorded_at) - min(recorded_at - latency_s), "
    f"sum(attempts), sum(prompt_tokens + completion_tokens), sum(cost_usd) FROM outcomes WHERE {_TRAINED} "
    "GROUP BY run_id, step ORDER BY max(id) DESC LIMIT ?"
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
