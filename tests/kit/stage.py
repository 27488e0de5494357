"""Whole engines in virtual time, over sources that follow a script, and judges without an engine."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from qreward_plugins import (
    BatchReport,
    EngineStatistics,
    Outcome,
    QRewardError,
    RewardEngine,
    Sample,
    Scored,
    Usage,
    Verdict,
)
from qreward_plugins.judges import Judge, JudgeFailed
from qreward_plugins.scheduling.calls import Answer, CallFailed, Unanswered
from qreward_plugins.simulation import SimulatedSource, run
from qreward_plugins.sources import Reply, Request

from .configs import make_config
from .journals import MemoryJournal
from .leaks import tasks_left

T = TypeVar("T")
NEVER_S = 1e6

Behaviour = Callable[[int, Any, float], Any]
"""(number of the request from 0, request, time) -> seconds until its answer, or the error it ends with."""


def takes(seconds: float) -> Behaviour:
    return lambda number, request, now: seconds


def fails(error: QRewardError, *, times: float = float("inf"), seconds: float = 1.0) -> Behaviour:
    """The first `times` requests end with `error`, and the others take `seconds`."""
    return lambda number, request, now: error if number < times else seconds


def hangs(number: int, request: Any, now: float) -> float:
    return NEVER_S


def now() -> float:
    """The time of the running event loop."""
    return asyncio.get_running_loop().time()


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run an async test in virtual time."""

    @functools.wraps(test)
    def runs(*args: Any, **fixtures: Any) -> None:
        run(test(*args, **fixtures))

    return runs


def scored_text(request: Any, score: float = 5.0, **fields: Any) -> Reply:
    """A judge's reply with a valid verdict."""
    verdict = {"id": request.nonce, "rationale": "it is right", "score": score, **fields}
    return Reply(text=json.dumps(verdict), usage=Usage(100, 20), model="m")


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type[T]) -> list[T]:
        return [event for event in self.events if type(event) is kind]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


class Sent(NamedTuple):
    """A request that reached a source."""

    at: float
    source: str
    id: str | None


@dataclass(frozen=True)
class Played:
    """What became of samples that were handed in at once."""

    outcomes: list[Outcome]
    finished_s: float
    report: BatchReport | None
    statistics: EngineStatistics

    @property
    def all_scored(self) -> bool:
        return all(isinstance(outcome, Scored) for outcome in self.outcomes)

    @property
    def rewards(self) -> list[float | None]:
        return [outcome.reward for outcome in self.outcomes]

    @property
    def shares(self) -> Counter[str]:
        """How many verdicts came from each source."""
        return Counter(outcome.verdict.source for outcome in self.outcomes if isinstance(outcome, Scored))


@dataclass
class Stage:
    """Engines over simulated sources. After each run, no task, no request and no open source may be left.

    `sources`: by name the seconds of each answer, or a behaviour, or a `SimulatedSource`. `answer` makes a reply.
    `tree`: another configuration than one LLM judge; `options` are those of `make_config`. `journal` answers what it
    knows, and records the rest.
    """

    sources: Mapping[str, Any] = field(default_factory=lambda: {"a": 1.0})
    answer: Callable[[Any], Reply] = scored_text
    tree: Mapping[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    journal: MemoryJournal | None = None
    sent: list[Sent] = field(default_factory=list)
    simulated: dict[str, SimulatedSource] = field(default_factory=dict)

    @property
    def sent_by_source(self) -> Counter[str]:
        return Counter(each.source for each in self.sent)

    def engine(self, observers: Iterable[Any] = ()) -> RewardEngine:
        """A new engine."""
        self.simulated = {name: self._source(name, given) for name, given in self.sources.items()}
        tree = self.tree or make_config([*self.sources], **self.options)
        engine = RewardEngine(tree, sources=self.simulated, observers=observers)
        if self.journal is not None:
            engine._lifetime.journal, engine._lifetime.reuse = self.journal, True  # type: ignore[assignment]
        return engine

    def run(self, main: Callable[[RewardEngine], Awaitable[T]], *observers: Any, loop: Any = None) -> T:
        """Run `main(engine)` in virtual time."""

        async def runs() -> T:
            async with self.engine(observers) as engine:
                returned = await main(engine)
            assert tasks_left() == []
            return returned

        returned = run(runs(), loop=loop)
        assert {name: source.in_flight for name, source in self.simulated.items() if source.in_flight} == {}
        assert all(source.closed for source in self.simulated.values())
        return returned

    def play(self, samples: Iterable[Sample], **options: Any) -> Played:
        """Score samples as one batch in virtual time. `options` are those of `score_all`."""

        async def main(engine: RewardEngine) -> Played:
            outcomes = await engine.score_all(samples, **options)
            return Played(outcomes, now(), engine.last_batch(), engine.statistics())

        return self.run(main)

    def _source(self, name: str, given: Any) -> SimulatedSource:
        source = given
        if not isinstance(given, SimulatedSource):
            behaviour = given if callable(given) else takes(given)
            source = SimulatedSource(name, behaviour=behaviour, answer=self.answer, model="m")
        told = source.behaviour

        def noted(number: int, request: Any, now: float) -> Any:
            sample = request.sample
            self.sent.append(Sent(now, name, sample and sample.id))
            return told(number, request, now)

        source.behaviour = noted
        return source


# Judges without an engine: what they ask, and what they make of the answers


SAMPLE = Sample([{"role": "user", "content": "?"}], "yes", step=250)


def asked(
    judge: Judge, step: int | None = 250, *, sample: Sample = SAMPLE, seen: list[Sample] | None = None, **says: Any
) -> tuple[Any, list[str], float]:
    """What a judge says if its leaves say this (a score, a verdict, why there is none, or an error; after so many
    seconds, if it is a pair; one after the other, if it is a list), whom it has asked in which order, and when it had
    its verdict. No task may be left. `seen` gets the samples that the leaves were asked about.
    """
    order: list[str] = []

    async def ask(call: Any) -> Any:
        order.append(call.name)
        if seen is not None:
            seen.append(call.request(0).sample)
        said = says[call.name]
        said = said.pop(0) if isinstance(said, list) else said
        seconds, said = said if isinstance(said, tuple) else (1.0, said)
        await asyncio.sleep(seconds)
        if isinstance(said, Unanswered):
            raise CallFailed(said)
        if isinstance(said, BaseException):
            raise said
        verdict = said if isinstance(said, Verdict) else Verdict(said, correct=said >= 0.5)
        return Answer(verdict, "f")

    async def main() -> Any:
        try:
            said: Any = await judge.judge(dataclasses.replace(sample, step=step), ask)
        except JudgeFailed as error:
            said = error.failed
        except RuntimeError as error:
            said = error
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return said, asyncio.get_running_loop().time()

    said, at = run(main())
    return said, order, at


def told(request: Request) -> str:
    """What a language model is told by a request."""
    assert request.messages[-1]["role"] == "user"
    return str(request.messages[-1]["content"])
