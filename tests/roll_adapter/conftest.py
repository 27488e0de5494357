"""ROLL's few names without ROLL, and a judge server on loopback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from qreward_plugins.testing import JudgeServer, roll_stand_in
from tests.kit import by_word, make_config


@pytest.fixture(autouse=True, scope="module")
def roll() -> Iterator[None]:
    """The stand-in is there for the tests of this folder only; what is imported under it keeps the names it has."""
    with roll_stand_in(over_installed=True):
        yield


@pytest.fixture
def judge() -> Iterator[JudgeServer]:
    with JudgeServer(by_word) as server:
        yield server


@pytest.fixture
def make_tree(judge: JudgeServer) -> Callable[..., dict[str, Any]]:
    """A configuration that points to the judge and gives up at the first failure."""
    # Retries and hedges of a busy machine would be more invalid replies than valid ones, which is the judge's fault.
    once, engine = {"invalid_retries": 0}, {"max_attempts": 1, "seed": 1, "deadline_s": 20.0}

    def make(**more: Any) -> dict[str, Any]:
        return {**make_config({"judge": judge}, judge=once, engine=engine), **more}

    return make


LOOP = "roll_adapter.QRewardRolloutLoop"


@pytest.fixture
def train(make_tree: Callable[..., dict[str, Any]]) -> Iterator[Callable[..., Any]]:
    """A trainer with one domain, its `QRewardWorker` and our rollout loop, two prompts of four responses a step."""
    from qreward_plugins.testing import FakeRollTrainer

    made: list[Any] = []

    def make(respond: Any, *, tree: dict[str, Any] | None = None, reward: Any = None, **flags: Any) -> Any:
        defaults: dict[str, Any] = {"adv_estimator": "grpo", "rollout_batch_size": 2, "timeout_s": 30.0}
        defaults["user_defined_rollout_loop_cls"] = LOOP
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
