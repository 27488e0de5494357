"""Scenarios for a batch, by name: servers, samples and the bound.

A scenario is a pure function of its name, the number of samples and the seed. All scenarios of a seed have the same
samples and random numbers, so that policies and scenarios can be compared. Sizes are lognormal(0, 0.6) with mean 1. The
length of the text, which a client sees, differs from the size by a lognormal factor with sigma 0.4.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from ..config import Config
from ..judges import Judge, LLMJudge, Opening
from ..samples import Sample
from .bound import Job, makespan_bound_s
from .draws import POISON, Luck, completion_tokens, normal, prompt_tokens
from .servers import Fault, Server
from .simulated_server import SimulatedServer

SIZE_SIGMA = 0.6
SIGHT_SIGMA = 0.4
BYTES_PER_UNIT = 3150
"""Bytes of a request with work 1. With its answer, a mean request takes about 1000 tokens."""
GROUP_SIZE = 8
MAX_TOKENS = 512
JUDGE = {
    "kind": "llm",
    "instructions": "Grade it.",
    "system": "",
    "max_tokens": MAX_TOKENS,
    "response_format": "none",
    "max_response_chars": 1_000_000,
}
"""The judge of all scenarios: its own text is short and it never cuts the response, which so sets the size of a
request."""


@dataclass(frozen=True)
class Scenario:
    """Servers and samples. `count` samples arrive at once, or over the first `spread_s` seconds.

    The first `poisoned` samples are throttled on every try. `engine` are keys of the `engine:` of our configuration.
    """

    name: str
    title: str
    servers: tuple[Server, ...]
    count: int = 512
    spread_s: float = 0.0
    seed: int = 0
    poisoned: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)

    def samples(self) -> list[Sample]:
        """The samples. Their hidden work is `extras["work"]`; their id contains the seed."""
        own_bytes = bytes_of_judge()
        samples = []
        for number, (work, seen, _) in enumerate(self._drawn):
            name = f"{self.seed}-{number}"
            length = max(len(name) + 2, round(BYTES_PER_UNIT * seen) - own_bytes)
            samples.append(
                Sample(
                    messages=[{"role": "user", "content": "?"}],
                    response=f"{name} ".ljust(length, "x"),
                    group_id=f"{self.seed}-{number // GROUP_SIZE}",
                    extras={"work": work, **({POISON: "throttled"} if number < self.poisoned else {})},
                    id=name,
                )
            )
        return samples

    def arrivals(self) -> list[float]:
        """The arrival of each sample, in seconds from the start, ascending."""
        return sorted(self.spread_s * when for _, _, when in self._drawn)

    def config(self, **engine: Any) -> dict[str, Any]:
        """A configuration for `RewardEngine`, with one LLM judge over all servers; `engine` are keys of its `engine:`.

        Deadlines and attempts are ample, because only the makespan is measured.
        """
        return {
            "sources": {server.name: server.source() for server in self.servers},
            "judges": {"quality": dict(JUDGE)},
            "engine": {"seed": self.seed, "deadline_s": 36_000.0, "max_attempts": 30, **engine, **self.engine},
        }

    def sources(self) -> dict[str, SimulatedServer]:
        """New simulated servers by name, for one run."""
        luck = Luck(self.seed)
        return {server.name: SimulatedServer(server, luck) for server in self.servers}

    def bound_s(self) -> float:
        """The clairvoyant bound of the makespan in seconds; see `makespan_bound_s`."""
        return self._bound_s

    @cached_property
    def _bound_s(self) -> float:
        return makespan_bound_s(self.servers, self.jobs())

    def jobs(self) -> list[Job]:
        """The samples with their hidden properties."""
        own_bytes = bytes_of_judge()
        jobs = []
        for sample, arrives_s in zip(self.samples(), self.arrivals(), strict=True):
            work = sample.extras["work"]
            tokens = prompt_tokens(own_bytes + len(sample.response)) + completion_tokens(work, MAX_TOKENS)
            jobs.append(Job(work, tokens, arrives_s))
        return jobs

    @cached_property
    def _drawn(self) -> list[tuple[float, float, float]]:
        """For each sample its work, its visible size, and its arrival as a share of the spread."""
        rng = random.Random(f"scenario {self.seed}")
        drawn = []
        for _ in range(self.count):
            work = math.exp(SIZE_SIGMA * (_normal(rng) - SIZE_SIGMA / 2))
            drawn.append((work, work * math.exp(SIGHT_SIGMA * _normal(rng)), rng.random()))
        return drawn


def scenario(name: str, samples: int = 512, seed: int = 0) -> Scenario:
    """The scenario `name` (one of `SCENARIOS` or `FAULTS`) with this many samples.

    Raises `ValueError` for an unknown name.
    """
    if name in _FAULTS:
        engine = {**_DEFAULTS, "scheduling": {"hedge": name != "hangs"}}
        throttled = 3 * (name == "always-throttled")
        return Scenario(name, *_FAULTS[name], samples, seed=seed, poisoned=throttled, engine=engine)
    if name not in _SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; known: {', '.join((*SCENARIOS, *FAULTS))}")
    title, servers = _SCENARIOS[name]
    made = Scenario(name, title, servers, samples, spread_s=60.0 if name == "streamed" else 0.0, seed=seed)
    if name not in _FIRST_FAILS:
        return made
    healthy_s, (start, end, *how) = made.bound_s(), _FIRST_FAILS[name]
    fault = Fault(start * healthy_s, end * healthy_s, *how)
    return replace(made, servers=(replace(servers[0], faults=(fault,)), *servers[1:]))


def _server(name: str, rpm: float = 300, places: int = 32, seconds: float = 3.0, **further: Any) -> Server:
    return Server(
        name,
        requests_per_minute=rpm,
        concurrency=places,
        seconds_per_unit=seconds,
        **{"error_share": 0.01, **further},
    )


def _four(**further: Any) -> tuple[Server, ...]:
    return tuple(_server(name, **further) for name in "abcd")


_STRAGGLERS: dict[str, Any] = {"straggler_share": 0.02}
_UNEQUAL_RATES = {"a": (600, 64), "b": (180, 20), "c": (60, 8)}

_FIRST_FAILS: dict[str, Any] = {
    "dies-refusing": (0.4, math.inf, "refuse"),
    "dies-hanging": (0.4, math.inf, "hang"),
    "brownout": (0.2, 0.7, "slow", 4.0),
    "everything": (0.4, 0.7, "hang"),
}
"""The fault of the first server by scenario; it starts and ends at shares of the batch's best time."""

_SCENARIOS: dict[str, tuple[str, tuple[Server, ...]]] = {
    "equal": ("four equal servers", _four()),
    "unequal-rates": (
        "rates of 10 : 3 : 1",
        tuple(_server(name, *limits) for name, limits in _UNEQUAL_RATES.items()),
    ),
    "unequal-speeds": (
        "1, 3 and 9 s for the same work",
        tuple(_server(name, seconds=seconds) for name, seconds in (("a", 1.0), ("b", 3.0), ("c", 9.0))),
    ),
    "tokens": ("token limits bind before request limits", _four(rpm=600, places=48, tokens_per_minute=300_000)),
    "stragglers": ("2 % take ten times as long", _four(**_STRAGGLERS)),
    "errors": (
        "20 % errors at one server, 5 % at the others, stragglers",
        tuple(_server(name, error_share=0.2 if name == "a" else 0.05, **_STRAGGLERS) for name in "abcd"),
    ),
    "dies-refusing": ("one server of four refuses connections from 40 % on", _four(**_STRAGGLERS)),
    "dies-hanging": ("one server of four never answers again from 40 % on", _four(**_STRAGGLERS)),
    "brownout": ("one server of four is four times slower from 20 to 70 %", _four(**_STRAGGLERS)),
    "undeclared": (
        "unequal rates that the client does not know",
        tuple(_server(name, *limits, declared=False, **_STRAGGLERS) for name, limits in _UNEQUAL_RATES.items()),
    ),
    "streamed": ("samples come over the first minute", _four(**_STRAGGLERS)),
    "slow-source": (
        "one server of three is six times slower",
        (
            _server("a", 240, 24, 2.0, **_STRAGGLERS),
            _server("b", 240, 24, 2.0, **_STRAGGLERS),
            _server("c", 300, 64, 12.0, **_STRAGGLERS),
        ),
    ),
    "everything": (
        "unequal rates and speeds, tokens, errors, stragglers, and a hang from 40 to 70 %",
        (
            _server("a", 600, 64, 3.0, error_share=0.05, **_STRAGGLERS),
            _server("b", 300, 32, 1.5, error_share=0.2, **_STRAGGLERS),
            _server("c", 180, 48, 9.0, error_share=0.02, **_STRAGGLERS),
            _server("d", 400, 32, 2.0, error_share=0.05, tokens_per_minute=200_000, **_STRAGGLERS),
        ),
    ),
    "buckets": ("servers that refill steadily and do not say so", _four(window="bucket", burst=10, **_STRAGGLERS)),
}

_DEFAULTS: dict[str, Any] = {"max_attempts": 6, "deadline_s": 300.0}
"""Those of the engine, unlike in the other scenarios: what a fault costs is also who gets no score."""


def _only(rpm: float, *faults: Fault, **further: Any) -> tuple[Server, ...]:
    return (_server("a", rpm, 64, faults=faults, **further),)


_FAULTS: dict[str, tuple[str, tuple[Server, ...]]] = {
    "hangs": (
        "2 % of the requests are never answered, and hedging is off",
        _four(straggler_share=0.02, straggler_factor=1e6),
    ),
    "hangs-at-once": ("the only server never answers requests of the first 60 s", _only(900, Fault(0.0, 60.0, "hang"))),
    "hangs-for-a-while": (
        "one server of two never answers what it gets from 5 to 85 s",
        (_server("a", faults=(Fault(5.0, 85.0, "hang"),)), _server("b", 60, 8)),
    ),
    "hangs-later": (
        "the only server never answers what it gets from 5 to 85 s",
        (_server("a", faults=(Fault(5.0, 85.0, "hang"),)),),
    ),
    "nonsense": (
        "four of five replies of one server of two have no verdict",
        (_server("a", 600, 64, invalid_share=0.8), _server("b", 300, 16)),
    ),
    "always-throttled": (
        "the only server answers 3 samples with 429 whatever comes, and nobody declares a limit",
        _only(600, declared=False),
    ),
    "small-fallback": (
        "the large server of two refuses connections for 80 s",
        (*_only(900, Fault(0.0, 80.0, "refuse")), _server("b", 60, 8)),
    ),
    "undeclared-window": (
        "the only server admits 120 requests a minute, which nobody declares",
        _only(120, declared=False),
    ),
    "storm": ("the only server throttles everything for 2 s", _only(300, Fault(8.0, 10.0, "throttle", 0.5))),
    "all-errors": (
        "four of five requests fail in the first 60 s at the only server",
        _only(900, Fault(0.0, 60.0, "errors", 0.8)),
    ),
}

SCENARIOS = tuple(_SCENARIOS)
"""The names of the scenarios."""
FAULTS = tuple(_FAULTS)
"""The names of further scenarios, each for what a scheduler does about one fault."""


def _normal(rng: random.Random) -> float:
    return normal(1.0 - rng.random(), rng.random())


@lru_cache(maxsize=1)
def bytes_of_judge() -> int:
    """The bytes that the judge adds to a request."""
    node = LLMJudge.Config.model_validate(JUDGE)
    judge = LLMJudge("quality", node, Opening(Config(), ("a",), b"simulated", dict[str, Judge]().__getitem__))
    return judge.request(Sample([{"role": "user", "content": "?"}], "x"), attempt=0).size - 1
