"""What workers and the keeper say to each other: plain tuples of numbers, cheap to pickle, and without any clock.

Times are always seconds from now, from the moment of sending; the receiver counts them from the moment of receiving,
which is later. Nothing here is a date, so that the clocks of two nodes never have to agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..quotas import Resource


class Part(NamedTuple):
    """What a worker says of one limit."""

    share: float
    """What it keeps to from now on; it has lowered it already."""
    spent: tuple[tuple[float, float], ...] = ()
    """What it has spent of it: (seconds until that leaves the window, amount). Infinity: not before it says so."""
    more: float = 0.0
    """What it could use beyond what is spent, now."""
    unit: float = 1.0
    """The smallest amount that is of any use to it."""


class SourceNews(NamedTuple):
    """What a worker learned of a source, or what the others did."""

    pause_s: float = 0.0
    """Seconds for which it asked to be left alone."""
    rest_s: float = 0.0
    """Seconds for which it is given a rest, because it failed again and again."""
    recovered: bool = False
    """Whether it answered after a rest that others may still be giving it."""
    typical: tuple[float, float] | None = None
    """Size in bytes and latency in seconds of a typical answer."""


class SourceReport(NamedTuple):
    """What a worker says of one source."""

    limits: Mapping[Resource, tuple[float, float]]
    """The declared limits: (amount, seconds of its window; 0: it is held until given back)."""
    parts: Mapping[Resource, Part]
    news: SourceNews = SourceNews()


class Report(NamedTuple):
    """What a worker says. `number` grows with every report; only the answer to the latest one counts."""

    worker: str
    number: int
    sources: Mapping[str, SourceReport]
    leaves: bool = False
    """Whether it is the last one."""
    heeded: int = 0
    """The report whose answer was the last one that counted; 0: none has."""


class Grant(NamedTuple):
    """What the keeper says of one limit."""

    share: float
    """What the worker may keep to from now on."""
    target: float
    """What would be fair."""
    recall: bool = False
    """Whether others wait for what it holds above the target."""
    scarce: bool = False
    """Whether others wait at all, so that nobody should keep what he has no use for."""


class SourceAnswer(NamedTuple):
    """What the keeper says of one source."""

    workers: int
    """How many workers share it."""
    grants: Mapping[Resource, Grant]
    news: SourceNews = SourceNews()


class Answer(NamedTuple):
    """What the keeper says."""

    boot: str
    """The keeper that says it; a new one has another."""
    number: int
    """The report that it answers."""
    sources: Mapping[str, SourceAnswer]
