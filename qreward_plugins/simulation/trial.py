"""A trial: servers, a configuration of the engine and calls, all drawn from one seed.

Random draws give combinations that no test author thinks of, such as a batch with a cut-off and a cancelled caller
while a source with unknown limits recovers from a hang. A trial that broke a promise is replayed from its seed.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ..config import Batch
from ..samples import Sample
from .draws import POISON, Poison, normal
from .scenarios import JUDGE
from .servers import Server, random_servers

DATA_SOURCES = ("math/easy", "math/hard", "code", "chat")
EMPTY = "  \n"
BATCHES_SHARE_OF_TRIALS = 0.2
PRIORITIES_SHARE_OF_TRIALS = 0.3
_PRIORITIES: tuple[str | int, ...] = ("high", "normal", "low", 3, -40)
_LARGEST_BYTES = 12_000
"""So that a request fits the token limits of all random servers."""
_LARGEST_TOKENS = 6000
_POISONED_SHARE_OF_TRIALS = 0.2
_LOOK_LIKE_THE_SOURCE = ("blocked", "missing", "redirected", "limits")
"""Poison that looks like a failed source, or like a limit of it, if three samples have it."""
_MOST_ALIKE = 2
_MOST_POISONED = 1000
_PATIENT_TIMEOUT_S, _PATIENT_DEADLINE_S = 120.0, 7200.0
"""More than a healthy server takes for any sample that is not poisoned, and more than all samples of a trial need."""
_SLOWEST_S_PER_UNIT, _WIDEST_NOISE = 3.0, 0.25
"""With both at four sigma, sample and noise, a server of this speed takes 75 s."""
_STRATEGIES = ("round_robin", "weighted", "least_requests")

CallKind = Literal["batch", "single", "stream"]


@dataclass(frozen=True)
class Call:
    """One call of the engine. Times are seconds from the start of its step."""

    kind: CallKind
    samples: tuple[Sample, ...] = field(repr=False)
    after_s: float = 0.0
    deadline_s: float | None = None
    """None: what the configuration says."""
    priority: int | None = 0
    """None: what the configuration says. A stream has none of its own."""
    cutoff: tuple[float, float] | None = None
    """Seconds and quorum at which a batch stops waiting."""
    cancel_after_s: float | None = None
    """When its caller loses interest, counted from the call."""
    window: int | None = None
    gap_s: float = 0.0
    """How long a stream waits for each of its samples."""


@dataclass(frozen=True)
class Step:
    """Calls that overlap, after `idle_s` seconds of rest. `close_after_s`: when the engine is closed under them."""

    idle_s: float
    calls: tuple[Call, ...]
    close_after_s: float | None = None


@dataclass(frozen=True)
class Trial:
    """One simulated run, without what the production code does."""

    seed: int
    servers: tuple[Server, ...]
    config: dict[str, Any]
    steps: tuple[Step, ...]
    poisoned: bool = False
    """Whether its servers have only the faults that poisoned samples provoke. Then all other samples must be scored."""

    def samples(self) -> Iterator[Sample]:
        """All samples, in the order of the calls."""
        return (sample for step in self.steps for call in step.calls for sample in call.samples)

    def describe(self) -> str:
        """All drawn choices as text."""
        lines = [f"trial {self.seed}{', with poisoned samples' if self.poisoned else ''}"]
        lines += [f"  {server}" for server in self.servers]
        lines += [f"  {node}: {json.dumps(value)}" for node, value in self.config.items()]
        for number, step in enumerate(self.steps):
            lines.append(f"  step {number}: after {step.idle_s} s, closed after {step.close_after_s} s")
            lines += [f"    {len(call.samples)} samples: {call}" for call in step.calls]
        return "\n".join(lines)


def judge_of(config: Mapping[str, Any], sample: Sample) -> str:
    """Name of the judge of `sample` under a configuration."""
    routes: dict[str, Any] = config["routes"]
    if not routes:
        return str(next(iter(config["judges"])))
    route = next(route for pattern, route in routes.items() if fnmatchcase(sample.data_source, pattern))
    return str(route["judge"] if isinstance(route, dict) else route)


def random_trial(seed: int) -> Trial:
    """The trial of this seed. The same seed gives the same trial, on every machine."""
    rng = random.Random(f"trial {seed}")
    servers = tuple(_servers(rng, seed))
    config = _config(rng, seed, servers)
    samples = _Samples(rng, seed)
    count = rng.choice((1, 1, 2, 2, 3))
    steps = [_step(rng, samples, first=number == 0) for number in range(count)]
    if rng.random() < 0.15:
        last = steps[-1]
        steps[-1] = Step(last.idle_s, last.calls, close_after_s=_some_seconds(rng))
    trial = Trial(seed, servers, config, tuple(steps))
    return _with_priorities(_poisoned(trial) if samples.poisoned else trial)


def _with_priorities(trial: Trial) -> Trial:
    """The trial, for some seeds with priorities by split, judge, route and call, and latency-sensitive routes.

    Their generator is apart, so the servers, judges and samples of a seed stay as they were.
    """
    rng = random.Random(f"priorities {trial.seed}")
    if rng.random() >= PRIORITIES_SHARE_OF_TRIALS:
        return trial
    steps = tuple(
        replace(step, calls=tuple(_with_drawn_priority(rng, call) for call in step.calls)) for step in trial.steps
    )
    config = trial.config
    config["engine"]["priority"] = {split: rng.choice(_PRIORITIES) for split in ("train", "validation")}
    for judge in config["judges"].values():
        if rng.random() < 0.3:
            judge["priority"] = rng.choice(_PRIORITIES)
    for pattern, judge in config["routes"].items():
        route = {"judge": judge, "latency_sensitive": rng.random() < 0.4}
        if rng.random() < 0.4:
            route["priority"] = rng.choice(_PRIORITIES)
        config["routes"][pattern] = route
    return replace(trial, steps=steps)


def _with_drawn_priority(rng: random.Random, call: Call) -> Call:
    priority = rng.choice((None, None, call.priority or 0, 7))
    samples = tuple(replace(sample, split="val" if rng.random() < 0.3 else "train") for sample in call.samples)
    return replace(call, priority=None if call.kind == "stream" else priority, samples=samples)


def _poisoned(trial: Trial) -> Trial:
    """The trial with nothing but poison that keeps a sample from its verdict: servers with their limits, and without
    faults, stragglers, errors, invalid replies and false announcements; no short deadline, and no caller that leaves.
    The servers stop working on requests that are cancelled: otherwise one that hangs takes all places of a server, and
    its 429s to the others then look as those to a sample that it never accepts.
    """
    servers = tuple(
        replace(
            server,
            faults=(),
            straggler_share=0.0,
            error_share=0.0,
            invalid_share=0.0,
            announces=None if server.announces == "wrong" else server.announces,
            seconds_per_unit=min(server.seconds_per_unit, _SLOWEST_S_PER_UNIT),
            noise=min(server.noise, _WIDEST_NOISE),
            declared=True,
            declares_window=True,
            cancel_frees=True,
        )
        for server in trial.servers
    )
    for server in servers:
        trial.config["sources"][server.name] |= {
            "limits": server.limits(),
            "timeouts": {"total_s": _PATIENT_TIMEOUT_S},
        }
    trial.config["engine"]["deadline_s"] = _PATIENT_DEADLINE_S
    steps = tuple(
        Step(
            step.idle_s,
            tuple(replace(call, deadline_s=None, cutoff=None, cancel_after_s=None) for call in step.calls),
        )
        for step in trial.steps
    )
    return replace(trial, servers=servers, steps=steps, poisoned=True)


def _servers(rng: random.Random, seed: int) -> Iterator[Server]:
    """Random servers, some with token limits that a few samples use up; in some trials some take several calls in a
    request.
    """
    own = random.Random(f"servers {seed}")
    batched = own.random() < BATCHES_SHARE_OF_TRIALS
    for server in random_servers(rng):
        per_minute = own.uniform(1, 5) * _LARGEST_TOKENS * 60 / server.window_s
        tight = server.tokens_per_minute is not None and own.random() < 0.5
        batch = Batch(
            max_size=own.choice((2, 3, 8, 64)),
            max_wait_s=own.choice((0.0, 0.02, 1.0)),
            max_tokens=own.choice((None, None, 20_000)),
        )
        yield replace(
            server,
            tokens_per_minute=per_minute if tight else server.tokens_per_minute,
            batch=batch if batched and own.random() < 0.7 else None,
        )


def _config(rng: random.Random, seed: int, servers: tuple[Server, ...]) -> dict[str, Any]:
    names = [server.name for server in servers]
    judges = {f"j{number}": _judge(rng, names) for number in range(rng.choice((1, 1, 1, 2, 3)))}
    routes: dict[str, str] = {}
    if len(judges) > 1 or rng.random() < 0.2:
        patterns = ["math/*", "code", "chat", "*/hard"]
        rng.shuffle(patterns)
        routes = {pattern: rng.choice(list(judges)) for pattern in patterns[: rng.randint(1, 3)]}
        routes["*"] = rng.choice(list(judges))
    return {
        "sources": {
            server.name: {
                **server.source(),
                "timeouts": {"total_s": rng.choice((120.0, 120.0, 20.0, rng.uniform(1, 60)))},
                "weight": rng.choice((1.0, 1.0, rng.uniform(0.1, 10))),
            }
            for server in servers
        },
        "judges": judges,
        "routes": routes,
        "engine": {
            "seed": seed,
            "deadline_s": rng.choice((300.0, 60.0, rng.uniform(0.5, 30))),
            "max_attempts": rng.choice((6, 6, 1, 2, rng.randint(1, 12))),
            "scheduling": {
                "strategy": rng.choice(
                    ("earliest_finish", "earliest_finish", "earliest_finish", rng.choice(_STRATEGIES))
                ),
                "prefer": rng.choice(("speed", "speed", "cost")),
                "hedge": rng.random() < 0.8,
                "hedge_budget": rng.choice((0.25, 0.25, 0.02, 1.0)),
            },
        },
    }


def _judge(rng: random.Random, names: list[str]) -> dict[str, Any]:
    return {
        **JUDGE,
        "sources": rng.sample(names, rng.randint(1, len(names))) if rng.random() < 0.6 else list(names),
        "invalid_retries": rng.choice((1, 1, 0, 3)),
        "reward_range": list(rng.choice(((0.0, 1.0), (0.0, 1.0), (-1.0, 1.0)))),
        "on_invalid": rng.choice(("missing", "missing", "floor")),
    }


class _Samples:
    """Draws samples, each with another id; for some seeds a share of them is poisoned, with a few kinds of poison."""

    def __init__(self, rng: random.Random, seed: int) -> None:
        self._rng = rng
        self._seed = seed
        self._mean_bytes = rng.choice((200, 1500, 3000))
        self._next = 0
        self._poison = poison = random.Random(f"poison {seed}")
        self.poisoned = poison.random() < _POISONED_SHARE_OF_TRIALS
        drawn = [kind for kind in get_args(Poison) if kind != "throttled"]  # those would be tried for two hours
        self._kinds = poison.sample(drawn, poison.choice((1, 1, 2, 9)))
        self._share = poison.choice((0.05, 0.1, 0.3)) if self.poisoned else 0.0
        self._most = _MOST_ALIKE if set(self._kinds) & set(_LOOK_LIKE_THE_SOURCE) else _MOST_POISONED

    def draw(self, count: int) -> tuple[Sample, ...]:
        group_size = self._rng.choice((1, 4, 8))
        return tuple(self._one(number // group_size) for number in range(count))

    def _one(self, group: int) -> Sample:
        rng = self._rng
        name = f"{self._seed}-{self._next}"
        self._next += 1
        work = math.exp(0.6 * normal(1.0 - rng.random(), rng.random()) - 0.18)
        seen = work * math.exp(0.4 * normal(1.0 - rng.random(), rng.random()))
        length = min(round(self._mean_bytes * seen) + 1, _LARGEST_BYTES)
        return Sample(
            messages=[{"role": "user", "content": "?"}],
            response=EMPTY if rng.random() < 0.01 else f"{name} ".ljust(length, "x"),
            data_source=rng.choice(DATA_SOURCES),
            group_id=f"{self._seed}-{group}" if rng.random() < 0.95 else None,
            extras={"work": work, **self._poison_of_next()},
            id=name,
        )

    def _poison_of_next(self) -> dict[str, Any]:
        if not self._most or self._poison.random() >= self._share:
            return {}
        self._most -= 1
        return {POISON: self._poison.choice(self._kinds)}


def _step(rng: random.Random, samples: _Samples, *, first: bool) -> Step:
    idle_s = 0.0 if first else rng.choice((0.0, 1.0, rng.uniform(0, 20), rng.uniform(0, 150)))
    shape = rng.random()
    if shape < 0.45:
        calls = [_batch(rng, samples)]
    elif shape < 0.6:
        calls = [_batch(rng, samples), _batch(rng, samples, after_s=rng.choice((0.0, _some_seconds(rng))))]
    elif shape < 0.8:
        calls = _singles(rng, samples)
    elif shape < 0.9:
        calls = [_stream(rng, samples)]
    else:
        calls = [_batch(rng, samples), *_singles(rng, samples), _stream(rng, samples)]
    return Step(idle_s, tuple(calls))


def _batch(rng: random.Random, samples: _Samples, *, after_s: float = 0.0) -> Call:
    return Call(
        "batch",
        samples.draw(_count(rng)),
        after_s,
        deadline_s=rng.choice((None, None, None, 0.0, rng.uniform(0.1, 120))),
        priority=rng.choice((0, 0, 0, 1, -3)),
        cutoff=(_some_seconds(rng), rng.choice((0.0, 0.5, 0.9, 1.0))) if rng.random() < 0.2 else None,
        cancel_after_s=_some_seconds(rng) if rng.random() < 0.07 else None,
    )


def _singles(rng: random.Random, samples: _Samples) -> list[Call]:
    spread_s = rng.choice((0.0, 1.0, 30.0, 120.0))
    doomed = rng.choice((0.0, 0.0, 0.1, 0.5))
    return [
        Call(
            "single",
            samples.draw(1),
            rng.uniform(0, spread_s),
            deadline_s=rng.choice((None, None, None, rng.uniform(0.1, 60))),
            priority=rng.choice((0, 0, 0, 2)),
            cancel_after_s=rng.choice((0.0, _some_seconds(rng))) if rng.random() < doomed else None,
        )
        for _ in range(_count(rng))
    ]


def _stream(rng: random.Random, samples: _Samples) -> Call:
    return Call(
        "stream",
        samples.draw(_count(rng)),
        priority=None,
        window=rng.choice((None, 1, rng.randint(2, 20))),
        gap_s=rng.choice((0.0, 0.01, 1.0)),
        cancel_after_s=_some_seconds(rng) if rng.random() < 0.15 else None,
    )


def _count(rng: random.Random) -> int:
    return rng.choice((rng.randint(1, 6), rng.randint(1, 20), rng.randint(1, 20), rng.randint(10, 70)))


def _some_seconds(rng: random.Random) -> float:
    return rng.choice((rng.uniform(0, 1), rng.uniform(0, 10), rng.uniform(0, 90)))
