"""ROLL's few names without ROLL, and a judge server on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qreward_plugins.testing import JudgeServer, roll_stand_in


@pytest.fixture(autouse=True, scope="module")
def roll() -> Iterator[None]:
    """The stand-in is there for the tests of this folder only; what is imported under it keeps the names it has."""
    with roll_stand_in(over_installed=True):
        yield


def score(call: Any) -> Any:
    """A number out of 10 is what the response says; `break` is an HTTP 500, `nan` a verdict with a NaN, `nonsense` one
    that is none.
    """
    response = call.blocks["response"].strip()
    if "break" in response:
        raise RuntimeError("the test asked for it")
    if "nan" in response:
        return float("nan")
    if "nonsense" in response:
        return "I would say seven"
    return float(response.split()[0])


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(score) as server:
        yield server


@pytest.fixture
def make_tree(judge: JudgeServer) -> Callable[..., dict[str, Any]]:
    """A configuration that points to the judge and gives up at the first failure."""

    def make(**more: Any) -> dict[str, Any]:
        return {
            "sources": {"judge": {"kind": "openai", "base_url": judge.base_url, "model": "judge"}},
            "judges": {"quality": {"kind": "llm"}},
            "engine": {"max_attempts": 1, "seed": 1, "deadline_s": 20.0},
            **more,
        }

    return make


LOOP = "roll_adapter.QRewardRolloutLoop"


@pytest.fixture
def train(make_tree: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., Any]]:
    """A trainer with one domain, its `QRewardWorker` and our rollout loop, two prompts of four responses a step."""
    from qreward_plugins.testing import FakeRollTrainer

    made: list[Any] = []

    def make(respond: Any, *, tree: dict[str, Any] | None = None, reward: Any = None, **flags: Any) -> Any:
        defaults: dict[str, Any] = {
            "adv_estimator": "grpo",
            "rollout_batch_size": 2,
            "user_defined_rollout_loop_cls": LOOP,
            "timeout_s": 30.0,
        }
        worker = {"worker_cls": "roll_adapter.QRewardWorker", "reward_manager_config": [make_tree(**(tree or {}))]}
        made.append(FakeRollTrainer({"judged": {**worker, **(reward or {})}}, respond=respond, **{**defaults, **flags}))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()


@pytest.fixture
def words() -> Callable[..., Any]:
    """Responses by their place in the group: `words("1", "2", "break", "4")`."""

    def make(*texts: str) -> Any:
        return lambda draft, rng: texts[draft.number % len(texts)]

    return make
