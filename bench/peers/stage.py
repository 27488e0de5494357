"""The input of every policy: the samples as requests, the limits that a user knows, and the simulated servers.

`Stage.ask` is one HTTP exchange. It behaves as a real server: an answer, a status with its Retry-After, a refused or
broken connection, or nothing until the caller's time-out. Peers call it through their own network layer, which `wire`
replaces, or directly if the network is the user's part.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from qreward_plugins.config import load_config
from qreward_plugins.errors import SourceError, Throttled
from qreward_plugins.judges import JudgeRouter
from qreward_plugins.samples import Sample
from qreward_plugins.simulation import Scenario, Server, score_of
from qreward_plugins.simulation.simulated_server import completion_tokens, prompt_tokens

TIMEOUT_S = 60.0
"""The time-out of a peer's request. slime has its own 120 s; the engine's sources have their default of 120 s."""

UNKNOWN_CONCURRENCY = 64
"""Concurrency for a source that declares nothing: QReward's default, and a usual number of connections."""


class HTTPFailure(Exception):
    """The server answered with an error status. `retry_after` is the header's text."""

    def __init__(self, status: int, retry_after: str | None) -> None:
        super().__init__(f"HTTP {status}")
        self.status = status
        self.retry_after = retry_after

    @property
    def retry_after_s(self) -> float | None:
        return float(self.retry_after) if self.retry_after else None


class NetworkFailure(Exception):
    """The connection was refused or broke."""


@dataclass(frozen=True)
class Item:
    """One sample as the request that all policies make of it."""

    sample: Sample
    id: str
    messages: tuple[dict[str, str], ...]
    work: float
    prompt_tokens: int
    completion_tokens: int
    """The tokens of its reply, which are unknown before."""
    max_completion_tokens: int


@dataclass(frozen=True)
class Answer:
    """What a server answered with status 200."""

    text: str
    prompt_tokens: int
    completion_tokens: int

    @property
    def score(self) -> float:
        """Raises ValueError where the answer is not a verdict."""
        score = json.loads(self.text)["score"]
        if isinstance(score, bool) or not isinstance(score, (int, float)) or not math.isfinite(score):
            raise ValueError("not a score")
        return float(score)


class Counts(NamedTuple):
    """Requests sent, and those refused because of a limit that the user knew, or did not know."""

    calls: int
    violations: int
    surprises: int


@dataclass(frozen=True)
class Known:
    """What the user knows of a source; None: nothing."""

    requests_per_minute: float | None
    tokens_per_minute: float | None
    concurrency: int | None

    @property
    def in_flight(self) -> int:
        return self.concurrency or UNKNOWN_CONCURRENCY


class Stage:
    """One scenario, ready for one policy."""

    def __init__(self, scenario: Scenario, *, starts_at_s: float = 0.0) -> None:
        self.scenario = scenario
        self.servers: dict[str, Any] = dict(_later(scenario, starts_at_s).sources())
        self.known = {server.name: _known(server.limits()) for server in scenario.servers}
        samples = scenario.samples()
        self.arrivals = scenario.arrivals()
        self.items = _items(scenario, samples)
        self._by_text = {item.messages[-1]["content"]: item for item in self.items}
        self.mean_tokens = statistics.fmean(item.prompt_tokens + item.completion_tokens for item in self.items)

    def item_of(self, messages: list[Mapping[str, Any]]) -> Item:
        """The item whose messages these are."""
        return self._by_text[messages[-1]["content"]]

    async def ask(self, source: str, item: Item, *, timeout_s: float = TIMEOUT_S) -> Answer:
        """One exchange. Raises `HTTPFailure`, `NetworkFailure`, or asyncio.TimeoutError after `timeout_s`."""
        serving = self.servers[source].serve(item.id, item.work, item.prompt_tokens, item.completion_tokens)
        try:
            served = await asyncio.wait_for(serving, timeout_s)
        except Throttled as error:
            after = error.retry_after_s
            raise HTTPFailure(error.status or 429, None if after is None else str(math.ceil(after))) from None
        except SourceError as error:
            if error.status is None:
                raise NetworkFailure(str(error)) from None
            raise HTTPFailure(error.status, None) from None
        text = json.dumps({"score": score_of(item.id)}) if served.valid else "I would rather not say."
        return Answer(text, served.prompt_tokens, served.completion_tokens)

    def counts(self) -> Counts:
        """The counts of all servers so far."""
        servers = self.servers.values()
        known = [server for server in servers if _tells(server.server)]
        violations = sum(len(server.violations) for server in known)
        refused = sum(len(server.violations) for server in servers)
        return Counts(sum(server.sent for server in servers), violations, refused - violations)

    def weights(self) -> dict[str, int]:
        """Shares of a static split: what the declared limits let through in a minute, equal where nothing is known."""
        rates = {}
        for name, known in self.known.items():
            by_tokens = known.tokens_per_minute / self.mean_tokens if known.tokens_per_minute else math.inf
            rate = min(known.requests_per_minute or math.inf, by_tokens)
            rates[name] = rate if rate < math.inf else 300.0
        return {name: max(1, round(rate)) for name, rate in rates.items()}

    def total(self, limit: str) -> float | None:
        """The sum of one limit over the sources; None where a source does not declare it."""
        numbers = [getattr(known, limit) for known in self.known.values()]
        return None if None in numbers else sum(numbers)

    @property
    def in_flight(self) -> int:
        return sum(known.in_flight for known in self.known.values())


def weighted_cycle(weights: Mapping[str, int]) -> Iterator[str]:
    """Endless names, each as often as its weight, as evenly as possible."""
    total = sum(weights.values())
    debts = dict.fromkeys(weights, 0)
    for _ in itertools.count():
        for name, weight in weights.items():
            debts[name] += weight
        name = max(debts, key=lambda name: debts[name])
        debts[name] -= total
        yield name


def _tells(server: Server) -> bool:
    """Whether a client can know how much it may send: the limits, and that they are buckets where they are."""
    return server.declared and (server.window == "sliding" or server.declares_window)


def _known(limits: Mapping[str, Any]) -> Known:
    return Known(limits.get("requests_per_minute"), limits.get("tokens_per_minute"), limits.get("concurrency"))


def _items(scenario: Scenario, samples: list[Sample]) -> list[Item]:
    """The requests that the engine's judge makes, so that all policies send the same text."""
    config = load_config(scenario.config())
    (judge,) = JudgeRouter(config, key=bytes(32)).leaves.values()
    items = []
    for sample in samples:
        request = judge.request(sample, attempt=0)
        work = float(sample.extras["work"])
        messages = tuple({"role": m["role"], "content": m["content"]} for m in request.messages)
        most = request.max_completion_tokens
        tokens = prompt_tokens(request.size), completion_tokens(work, most)
        items.append(Item(sample, str(sample.id), messages, work, *tokens, most))
    return items


def _later(scenario: Scenario, seconds: float) -> Scenario:
    """The same scenario with all faults that much later."""
    servers = (
        replace(
            server,
            faults=tuple(replace(f, start_s=f.start_s + seconds, end_s=f.end_s + seconds) for f in server.faults),
        )
        for server in scenario.servers
    )
    return replace(scenario, servers=tuple(servers)) if seconds else scenario


__all__ = [
    "TIMEOUT_S",
    "UNKNOWN_CONCURRENCY",
    "Answer",
    "Counts",
    "HTTPFailure",
    "Item",
    "Known",
    "NetworkFailure",
    "Stage",
    "weighted_cycle",
]
