"""Messages between workers and the keeper: plain tuples, cheap to pickle.

Times are seconds from the moment of sending; the receiver counts them from the moment of receipt, which is later. No
message holds a clock time, so the clocks of two nodes need not agree.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from ..quotas.learned_limit import Heard, Learned

if TYPE_CHECKING:
    # The process of a machine's keeper imports this module, and must stay small.
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
    """Seconds for which others are told that the circuit is open, after repeated failures."""
    recovered: bool = False
    """In a report: whether the circuit closed there, so that the others are not told any more that it is open. They
    find out by probes of their own, because this may have been an answer to a request from before the outage.
    """
    tested_s: float = 0.0
    """In a report: seconds for which this worker tests whether the source accepts requests again. In an answer: seconds
    for which another one does.
    """


class SourceReport(NamedTuple):
    """A worker's report on one source."""

    limits: Mapping[Resource, tuple[float, float]]
    """The declared limits: (amount, window in seconds; 0: held until given back), and those that the keeper learns as
    it told them; infinity if it has not learned any yet."""
    parts: Mapping[Resource, Part]
    news: SourceNews = SourceNews()
    heard: Mapping[Resource, Heard] = {}
    """What the worker heard of each limit that the keeper learns."""


class Report(NamedTuple):
    """A worker's report. `number` grows with every report; the worker accepts only the answer to the latest one."""

    worker: str
    number: int
    sources: Mapping[str, SourceReport]
    leaves: bool = False
    """Whether the worker leaves: this is its last report."""
    accepted: int = 0
    """Number of the last report whose answer the worker accepted; 0 if none."""


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
    left: float = math.inf
    """What nobody has spent of the whole limit, what is held included; infinity: not said."""


class SourceAnswer(NamedTuple):
    """The keeper's answer on one source."""

    workers: int
    """Number of workers that share the source."""
    grants: Mapping[Resource, Grant]
    news: SourceNews = SourceNews()
    learned: Mapping[Resource, Learned] = {}
    """What the keeper has learned of limits that are not declared, and which of them the worker is to probe."""


class Answer(NamedTuple):
    """The keeper's answer to a report."""

    number: int
    """Number of the answered report."""
    sources: Mapping[str, SourceAnswer]


_MESSAGES = (Part, Heard, SourceNews, SourceReport, Report, Grant, Learned, SourceAnswer, Answer)
FORM = f"{zlib.crc32(repr([each._fields for each in _MESSAGES]).encode()) % 2**24:06x}"
"""Six digits of the messages' form. Processes with another form are of another version of the package."""
