"""Messages between workers and the keeper: plain tuples, cheap to pickle.

Times are seconds from the moment of sending; the receiver counts them from the moment of receipt, which is later. No
message holds a clock time, so the clocks of two nodes need not agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from ..quotas.shared import Resource


class Part(NamedTuple):
    """A worker's share, spending and demand of one limit."""

    share: float
    """The share that the worker keeps from now on; a lower share is already in effect."""
    spent: tuple[tuple[float, float], ...] = ()
    """Amounts spent: (seconds until the amount leaves the window, amount). Infinity: until a later report."""
    more: float = 0.0
    """Amount that the worker could use now, in addition to what is spent."""
    unit: float = 1.0
    """The smallest amount that the worker can use."""


class SourceNews(NamedTuple):
    """What a worker, or another worker, learned about a source."""

    pause_s: float = 0.0
    """Seconds of the pause that the source asked for."""
    open_s: float = 0.0
    """Seconds for which the circuit stays open, after repeated failures."""
    recovered: bool = False
    """Whether the circuit closed here, and may still be open in other processes."""
    typical: tuple[float, float] | None = None
    """Size in bytes and latency in seconds of a typical answer."""


class SourceReport(NamedTuple):
    """A worker's report on one source."""

    limits: Mapping[Resource, tuple[float, float]]
    """The declared limits: (amount, window in seconds; 0: held until given back)."""
    parts: Mapping[Resource, Part]
    news: SourceNews = SourceNews()


class Revision(NamedTuple):
    """One state of a configuration file: what a worker goes by, and in an answer the newest one."""

    digest: str
    """Hash of the file's path and text."""
    version: int = 0
    """Place in the order of the keeper, which grows with every change; 0 before the first change."""
    before: tuple[str, ...] = ()
    """Digests of earlier states. Only a worker that goes by one of these gets this one."""
    change: int = 0
    """In a report: number of a change of this worker that the keeper has not confirmed, 0 if there is none. In an
    answer: number of the last one that it has ordered."""
    text: str | None = None
    """The plain values of the file as JSON, with interpolations as they are written; None if it is not needed."""
    received: str = ""
    """In a report: digest of the last state that came from another worker, applied or refused."""


class Report(NamedTuple):
    """A worker's report. `number` grows with every report; the worker accepts only the answer to the latest one."""

    worker: str
    number: int
    sources: Mapping[str, SourceReport]
    leaves: bool = False
    """Whether the worker leaves: this is its last report."""
    accepted: int = 0
    """Number of the last report whose answer the worker accepted; 0 if none."""
    revision: Revision | None = None
    """The configuration file that the worker goes by; None if it shares no reloads."""


class Grant(NamedTuple):
    """The keeper's decision on one limit."""

    share: float
    """The share of the worker from now on."""
    target: float
    """The fair share."""
    recall: bool = False
    """Whether other workers wait for what this worker holds above `target`."""
    scarce: bool = False
    """Whether other workers wait, so that an idle worker must give up its share."""


class SourceAnswer(NamedTuple):
    """The keeper's answer on one source."""

    workers: int
    """Number of workers that share the source."""
    grants: Mapping[Resource, Grant]
    news: SourceNews = SourceNews()


class Charged(NamedTuple):
    """What counts as spent of one limit, in the words of one keeper to the next. Times are absolute: both keepers use
    the same monotonic clock.
    """

    limit: float
    window_s: float
    workers: Mapping[str, tuple[float, float]]
    """(until, amount) for each worker that holds a share or has spent something."""
    unknown: tuple[float, float] = (-math.inf, 0.0)
    """(until, amount) of workers that are not known by name."""


class Answer(NamedTuple):
    """The keeper's answer to a report."""

    boot: str
    """Identifies the keeper; a restarted keeper has another value."""
    number: int
    """Number of the answered report."""
    sources: Mapping[str, SourceAnswer]
    revision: Revision | None = None
    """The newest state of the worker's configuration file; None if no worker has changed it."""
