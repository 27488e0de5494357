"""A judge without words, and a stage for the dispatcher in virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from qreward_plugins.config.models import Limits, Price, Scheduling
from qreward_plugins.errors import InvalidVerdict
from qreward_plugins.quotas import Quota
from qreward_plugins.samples import Cause, Sample, Verdict
from qreward_plugins.scheduling import Dispatcher, Lane
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import Request


@dataclass
class PlainJudge:
    """Takes a reply's text as the score; "bad" is an invalid verdict."""

    sources: tuple[str, ...]
    name: str = "plain"
    invalid_retries: int = 1
    fingerprint: str = "plain"
    floors: dict = field(default_factory=dict)
    completion_tokens: int = 0

    def screen(self, sample):
        return None

    def request(self, sample, *, attempt):
        message = {"role": "user", "content": sample.response}
        return Request(sample, messages=(message,), max_completion_tokens=self.completion_tokens, nonce=str(attempt))

    def verdict(self, request, reply):
        if reply.text == "bad":
            raise InvalidVerdict("not a score")
        return Verdict(float(reply.text))

    def floor(self, cause: Cause):
        return self.floors.get(cause)

    def component_names(self):
        return ()


class Stage:
    """Sources, their lanes and a judge; `dispatcher()` and `samples()` inside a virtual-time run."""

    def __init__(self) -> None:
        self.sources: dict[str, SimulatedSource] = {}
        self.lanes: dict[str, Lane] = {}
        self.judge = PlainJudge(())

    def add(self, name: str, *, timeout_s: float = 60.0, limits: dict | None = None, **source) -> SimulatedSource:
        simulated = SimulatedSource(name, **source)
        quota = Quota(Limits.model_validate(limits or {}), source=name)
        self.sources[name] = simulated
        self.lanes[name] = Lane(simulated, quota, timeout_s=timeout_s, price=Price())
        self.judge.sources = (*self.judge.sources, name)
        return simulated

    def dispatcher(self, *, seed: int = 0, max_attempts: int = 6, **scheduling) -> Dispatcher:
        settings = Scheduling(**{"hedge": False, **scheduling})
        return Dispatcher(self.lanes, rng=random.Random(seed), max_attempts=max_attempts, settings=settings)

    def sample(self, size: int = 10) -> Sample:
        return Sample([{"role": "user", "content": "?"}], "x" * size)

    def idle(self) -> bool:
        """Whether nothing is held any more."""
        return all(source.in_flight == 0 for source in self.sources.values()) and all(
            lane.quota.in_flight == 0 for lane in self.lanes.values()
        )


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture(scope="session")
def new_stage() -> Callable[[], Stage]:
    return Stage
