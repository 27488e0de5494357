"""What a batch waited for: the critical path of its last outcome, in parts that add up to the time it took.

It tells an engineer why a step was slow: which source, and whether it was quota, a straggler or errors. Averages over
all samples cannot tell that, because most waits did not delay the last outcome.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal


def percentile(values: Iterable[float], share: float) -> float:
    """The nearest-rank percentile (`share` from 0 to 1) of `values`; NaN without any."""
    ranked = sorted(values)
    if not ranked:
        return math.nan
    return ranked[min(len(ranked) - 1, max(0, math.ceil(share * len(ranked)) - 1))]


PartKind = Literal["arrival", "queue", "quota", "pause", "service", "straggler", "retry"]
"""`arrival`: the sample was submitted later than the first. `queue`: the source was busy with other samples. `quota`:
its limits were spent. `pause`: it asked for a pause, or its circuit was open. `service`: an attempt took its usual
time. `straggler`: an attempt took longer, or the source answered nobody while it was busy with other samples. `retry`:
attempts that failed, and the backoff after them."""


@dataclass(frozen=True)
class Part:
    """A part of the time of a batch, and the source that it was spent on (empty: none)."""

    kind: PartKind
    source: str
    seconds: float


@dataclass(frozen=True)
class BatchReport:
    """A batch that has ended. `makespan_s` is the time from its start to its last outcome, in seconds; `parts` are the
    critical path of that outcome, in order, and add up to it.
    """

    samples: int
    scored: int
    failed: int
    attempts: int
    hedges: int
    makespan_s: float
    parts: tuple[Part, ...]

    def by_source(self) -> Mapping[str, Mapping[PartKind, float]]:
        """The makespan by source and kind; the source with the longest time comes first."""
        total: dict[str, dict[PartKind, float]] = {}
        for part in self.parts:
            kinds = total.setdefault(part.source, {})
            kinds[part.kind] = kinds.get(part.kind, 0.0) + part.seconds
        return dict(sorted(total.items(), key=lambda item: -sum(item[1].values())))

    def metrics(self) -> dict[str, float]:
        """The makespan for trackers: seconds by `blame_s/SOURCE/PART`. An arrival has the source `none`."""
        return {
            f"blame_s/{source or 'none'}/{kind}": seconds
            for source, kinds in self.by_source().items()
            for kind, seconds in kinds.items()
        }

    def describe(self) -> str:
        """Say in one line what the batch waited for."""
        blames = []
        for source, kinds in self.by_source().items():
            spent = sorted(((seconds, kind) for kind, seconds in kinds.items() if seconds >= 0.05), reverse=True)
            if spent:
                whole = sum(seconds for seconds, _ in spent)
                what = ", ".join(f"{seconds:.1f} {kind}" for seconds, kind in spent)
                blames.append(f"{whole:.1f} s on {source}: {what}" if source else f"{whole:.1f} s: {what}")
        failed = f", {self.failed} failed" if self.failed else ""
        waited = "; waited " + "; ".join(blames) if blames else ""
        return f"{self.samples} samples in {self.makespan_s:.1f} s{failed}{waited}"
