"""Draws random servers, with every kind of limit, announcement and fault, from a seed.

Simulation tests run the production code against them in virtual time and check the promises. A failing seed can be
replayed.
"""

from __future__ import annotations

import math
import random

from .servers import Fault, FaultKind, Server

MOST_SERVERS = 5
LAST_FAULT_STARTS_S = 180.0
LEAST_TOKENS_PER_WINDOW = 40_000
"""Enough for any single request of a scenario's samples."""

_FAULTS: tuple[FaultKind, ...] = ("refuse", "hang", "slow", "errors", "throttle")
_FOR_GOOD = 0.1


def random_servers(rng: random.Random, count: int | None = None) -> list[Server]:
    """Draw `count` servers (default: from 1 to 5). The same state of `rng` gives the same servers.

    Any of them may die permanently, even all. Every single request of a scenario's size fits into every server's
    limits.
    """
    if count is None:
        count = rng.randint(1, MOST_SERVERS)
    return [_server(rng, f"s{number}") for number in range(count)]


def random_faults(rng: random.Random) -> tuple[Fault, ...]:
    """Draw a schedule of faults: none, a few single ones, or a repeated one (flapping)."""
    shape = rng.random()
    if shape < 0.4:
        return ()
    if shape < 0.6:
        start_s, every_s = rng.uniform(0, LAST_FAULT_STARTS_S / 2), rng.uniform(2, 30)
        kind, part = rng.choice(_FAULTS), rng.uniform(0.2, 0.8)
        factor = _factor(rng, kind)
        begins = [start_s + every_s * number for number in range(rng.randint(2, 6))]
        return tuple(Fault(begin_s, begin_s + part * every_s, kind, factor) for begin_s in begins)
    return tuple(_fault(rng) for _ in range(rng.randint(1, 3)))


def _fault(rng: random.Random) -> Fault:
    kind = rng.choice(_FAULTS)
    start_s = rng.choice((0.0, rng.uniform(0, 20), rng.uniform(0, LAST_FAULT_STARTS_S)))
    end_s = math.inf if rng.random() < _FOR_GOOD else start_s + rng.choice((0.5, 5.0, rng.uniform(1, 90)))
    return Fault(start_s, end_s, kind, _factor(rng, kind))


def _factor(rng: random.Random, kind: FaultKind) -> float:
    if kind == "slow":
        return rng.uniform(1.5, 20)
    if kind == "errors":
        return rng.choice((0.3, 0.7, 1.0))
    return rng.choice((0.0, 1.0, rng.uniform(0.1, 30)))


def _server(rng: random.Random, name: str) -> Server:
    window_s = rng.choice((60.0, 60.0, 60.0, 10.0, 1.0))
    sliding = rng.random() < 0.75
    # At least one request a window; a smaller limit is invalid.
    requests = rng.choice((None, rng.uniform(60, 600), rng.uniform(60, 3000), 60.0))
    tokens = rng.choice((None, None, rng.uniform(1, 10) * LEAST_TOKENS_PER_WINDOW * 60 / window_s))
    return Server(
        name,
        requests_per_minute=requests,
        tokens_per_minute=tokens,
        concurrency=rng.choice((None, 1, rng.randint(2, 16), rng.randint(8, 96))),
        window="sliding" if sliding else "bucket",
        burst=1 if sliding else rng.randint(1, 20),
        window_s=window_s,
        seconds_per_unit=rng.choice((0.01, 0.3, 1.0, 3.0, 10.0)),
        overhead_s=rng.choice((0.0, 0.05, 0.5)),
        noise=rng.choice((0.0, 0.25, 1.0)),
        straggler_share=rng.choice((0.0, 0.02, 0.2)),
        straggler_factor=rng.choice((3.0, 10.0, 100.0)),
        error_share=rng.choice((0.0, 0.0, 0.02, 0.2, 0.5)),
        invalid_share=rng.choice((0.0, 0.0, 0.02, 0.3)),
        faults=random_faults(rng),
        declared=rng.random() < 0.7,
        declares_window=rng.random() < 0.5,
        announces=rng.choice((None, None, "right", "wrong")),
        wrong_by=rng.choice((0.2, 3.0)),
        retry_after=rng.choice(("seconds", "seconds", "none")),
        cancel_frees=rng.random() < 0.8,
        network_s=rng.choice(((0.0, 0.0), (0.01, 0.06), (0.0, 0.1))),
        price_per_request=rng.choice((0.0, 0.001)),
        price_per_million_tokens=rng.choice((0.0, 1.0)),
    )
