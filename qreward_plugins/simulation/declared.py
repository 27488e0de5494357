"""Checks P3 over reloads: what was sent keeps to the limits and the sources of the configuration in force.

A server counts on over a reload. So each request is checked when it is sent, under the limits that are declared then,
together with everything that its server was sent before, whatever the source was called and the limit was.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from .record import Given, Record, Sent
from .servers import Server
from .strict_limits import RequestBucket
from .trial import Trial, judge_of

_ROUNDING_S = 1e-6


def declared_limits(trial: Trial, record: Record) -> Iterator[str]:
    """P3: no request is sent beyond a limit that is declared when it is sent. Only for trials with reloads."""
    if not trial.reloads:
        return
    for server in trial.servers:
        if server.declared:
            sent = [one for one in record.sent if one.server == server.name and one.leads]
            yield from _concurrent(sent, record)
            if server.window == "bucket" and server.declares_window:
                yield from _paced(server, sent, record)
            elif server.window == "sliding":
                yield from _windowed(server, sent, record, "requests_per_minute")
            yield from _windowed(server, sent, record, "tokens_per_minute")


def sent_as_configured(trial: Trial, record: Record) -> Iterator[str]:
    """Each request goes to a source that there is when it is sent, and that its judge has, or has had since."""
    given = {each.sample.id: each for each in record.given()}
    for sent in record.sent:
        one = given[sent.sample]
        name = judge_of(record.configs[one.epoch], one.sample)
        if sent.source not in record.configs[sent.epoch]["sources"]:
            yield f"{sent.sample} was sent to {sent.source} at {sent.started_at:.6f} s, after it was removed"
        elif name is None or sent.source not in sources_since(record, one, name, sent.epoch):
            yield f"{sent.sample} was sent to {sent.source} at {sent.started_at:.6f} s, which {name} does not name"


def sources_since(record: Record, given: Given, judge: str, last: int) -> set[str]:
    """The sources that a judge had from the time when the sample was submitted to the epoch `last`."""
    nodes = (config["judges"].get(judge) for config in record.configs[given.epoch : last + 1])
    return {source for node in nodes if node is not None for source in node["sources"]}


def _limits(record: Record, sent: Sent) -> Mapping[str, Any]:
    found: Mapping[str, Any] = record.configs[sent.epoch]["sources"].get(sent.source, {}).get("limits", {})
    return found


def _concurrent(sent: list[Sent], record: Record) -> Iterator[str]:
    for number, one in enumerate(sent):
        most = _limits(record, one).get("concurrency", math.inf)
        open_ones = 1 + sum(other.ended_at > one.started_at for other in sent[:number])
        if open_ones > most:
            yield (
                f"{one.source} was sent a request at {one.started_at:.6f} s, its number {open_ones} in flight, and its"
                f" concurrency was {most}"
            )


def _windowed(server: Server, sent: list[Sent], record: Record, name: str) -> Iterator[str]:
    """A request that takes more tokens than a whole window is sent alone."""
    window: deque[tuple[float, int]] = deque()
    for one in sent:
        while window and window[0][0] <= one.started_at - server.window_s + _ROUNDING_S:
            window.popleft()
        amount = 1 if name == "requests_per_minute" else one.tokens
        per_minute = _limits(record, one).get(name, math.inf)
        limit = math.floor(per_minute * server.window_s / 60.0 + 1e-9) if per_minute < math.inf else math.inf
        spent = sum(earlier for _, earlier in window) + amount
        if spent > limit and not (not window and amount > limit):
            yield (
                f"{one.source} was sent a request at {one.started_at:.6f} s, which makes {spent} in its window, and"
                f" {name} was {per_minute:g}, so {limit}"
            )
        if not _rejected(one):
            window.append((one.started_at, amount))


def _rejected(sent: Sent) -> bool:
    """Whether a server refused a request, which takes nothing of a limit then."""
    return sent.ending == "throttled"


def _paced(server: Server, sent: list[Sent], record: Record) -> Iterator[str]:
    rates = [_rate_of(server, config) for config in record.configs]
    bucket, epoch = RequestBucket(next((rate for rate in rates if rate), 1.0), server.burst), 0
    for one in sent:
        while epoch < one.epoch:
            epoch += 1
            rate = rates[epoch]
            if rate is not None:
                bucket.change(rate, record.reloaded_at[epoch - 1])
        if rates[epoch] is None:
            continue
        if bucket.wait_s(1, one.started_at) > 0:
            yield f"{one.source} was sent a request at {one.started_at:.6f} s, and its bucket was empty"
        bucket.enter(1, one.started_at)


def _rate_of(server: Server, config: Mapping[str, Any]) -> float | None:
    """The declared requests per minute of a server; None if it has no source, or none are declared."""
    nodes = (node for node in config["sources"].values() if node.get("server") == server.name)
    found: float | None = next((node["limits"].get("requests_per_minute") for node in nodes), None)
    return found
