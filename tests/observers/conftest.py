"""Whole engines in virtual time, over sources that follow a script."""

from __future__ import annotations

import json
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample, Usage
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources.base import Reply


class Recorder:
    """An observer that keeps every event."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def __call__(self, event: Any) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if type(event) is kind]

    @property
    def kinds(self) -> list[str]:
        return [type(event).__name__ for event in self.events]


def answer(request: Any) -> Reply:
    verdict = {"id": request.nonce, "rationale": "it is right", "score": 5}
    return Reply(text=json.dumps(verdict), usage=Usage(100, 20), model="m")


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def make_engine():
    """An engine whose sources, given with their behaviour, answer in virtual time."""

    def make(observers=(), *, answers=answer, price=None, deadline_s=300.0, top=None, engine=None, **behaviours):
        behaviours = behaviours or {"a": lambda number, request, now: 1.0}
        tree = {
            "sources": {
                name: {
                    "kind": "openai",
                    "base_url": f"http://{name}.invalid/v1",
                    "model": "m",
                    "limits": {"concurrency": 8},
                    "price": price or {},
                }
                for name in behaviours
            },
            "judges": {"quality": {"kind": "llm"}},
            "engine": {"seed": 1, "deadline_s": deadline_s, "scheduling": {"hedge": False}, **(engine or {})},
            **(top or {}),
        }
        sources = {
            name: SimulatedSource(name, behaviour=behaviour, answer=answers) for name, behaviour in behaviours.items()
        }
        return RewardEngine(tree, sources=sources, observers=observers)

    return make


@pytest.fixture
def make_sample():
    def make(number: int = 0, **fields: Any) -> Sample:
        message = {"role": "user", "content": f"What is {number} plus 1?"}
        return Sample(
            [message], **{"response": f"It is {number + 1}.", "id": f"s{number}", "data_source": "m", **fields}
        )

    return make
