"""Checks the order of samples: of two that wait for the same judge, the one of higher priority is sent first."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fnmatch import fnmatchcase

from ..config import Config, priority_of, routes_of
from .record import Given, Record, Sent
from .trial import EMPTY, Trial, judge_of

_ROUNDING_S = 1e-6


def by_priority(trial: Trial, record: Record) -> Iterator[str]:
    """No sample is sent for the first time while one of higher priority waits for the same judge, and was never sent.

    Only trials with one server, which takes one call a request: with several, a sample may wait for a better one.
    Trials with reloads are left out: the sources of a judge differ there from sample to sample. So are requests
    to a server whose last one failed: a probe of a source with an open circuit goes with any sample.
    """
    if trial.reloads or len(trial.servers) > 1 or trial.servers[0].batch is not None:
        return
    config = Config.model_validate(trial.config)
    first: dict[str, Sent] = {}
    for sent in record.sent:
        first.setdefault(sent.sample, sent)
    by_judge: dict[str | None, list[tuple[int, float, Given]]] = {}
    for given in record.given():
        sent_at = first[given.sample.id or ""].started_at if given.sample.id in first else math.inf
        if given.sample.response != EMPTY:
            ranked = by_judge.setdefault(judge_of(trial.config, given.sample), [])
            ranked.append((_priority(config, given), sent_at, given))
    for judge, ranked in by_judge.items():
        if judge is None or len({priority for priority, _, _ in ranked}) == 1:
            continue
        for priority, sent_at, given in ranked:
            if given.sample.id not in first or _may_probe(first[given.sample.id], record):
                continue
            for other_priority, other_at, other in ranked:
                if (
                    other_priority > priority
                    and other.submitted_at < sent_at - _ROUNDING_S
                    and other_at > sent_at + _ROUNDING_S
                    and other.outcome is not None
                    and other.ended_at > sent_at + _ROUNDING_S
                ):
                    yield (
                        f"{given.sample.id} (priority {priority}) was sent at {sent_at:.6f} s, while"
                        f" {other.sample.id} (priority {other_priority}) waited since {other.submitted_at:.6f} s"
                    )


def _may_probe(sent: Sent, record: Record) -> bool:
    """Whether the last request that ended at a server before this one failed there."""
    before = [one for one in record.sent if one.server == sent.server and one.ended_at <= sent.started_at]
    last = max(before, key=lambda one: one.ended_at, default=None)
    return last is not None and last.ending in ("failed", "cancelled")


def _priority(config: Config, given: Given) -> int:
    if given.call.priority is not None:
        return given.call.priority
    source = given.sample.data_source
    route = next((route for pattern, route in routes_of(config) if fnmatchcase(source, pattern)), None)
    return 0 if route is None else priority_of(config, route, given.sample.split)
