"""Random trees of judges over sources that fail in every way, with cut-offs and journals: each sample has one outcome
in time, and nothing is left.

QREWARD_TREES=10000 plays so many seeds, a few minutes; the default run plays forty.
"""

from __future__ import annotations

import json
import os
import random
from contextlib import suppress
from typing import Any

import pytest

from qreward_plugins import (
    ConfigurationError,
    Cutoff,
    Failed,
    Outcome,
    PermanentError,
    Sample,
    Scored,
    TransientError,
    Usage,
)
from qreward_plugins.config import load_config
from qreward_plugins.errors import Throttled
from qreward_plugins.judges import JudgeRouter
from qreward_plugins.judges.fence import read_fences
from qreward_plugins.sources import Reply

from ..kit import MemoryJournal, Stage, make_config, make_sample
from ..kit.stage import NEVER_S

SEEDS = int(os.environ.get("QREWARD_TREES", "40"))
DEADLINE_S = 60.0
LEAVES = ("a", "b", "c")


def tree(rng: random.Random, depth: int, judges: dict[str, Any]) -> str:
    """Add a random tree of judges, and return the name of its root."""
    name = f"j{len(judges)}"
    if depth == 0 or rng.random() < 0.2:
        return rng.choice(LEAVES)
    if rng.random() < 0.25:
        judges[name] = {"kind": "rank", "judge": rng.choice(LEAVES), "list_size": rng.choice((2, 3, 8))}
        return name
    judges[name] = {}
    parts = list(dict.fromkeys(tree(rng, depth - 1, judges) for _ in range(3)))
    within = {"within_s": rng.choice((2.0, 20.0))} if rng.random() < 0.3 else {}
    if len(parts) < 2:
        judges[name] = {"kind": "sum", "weights": {parts[0]: 1.0}}
        return name
    judges[name] = {
        "sum": {
            "kind": "sum",
            "weights": {
                part: rng.choice((0.5, {"weight": {0: 1, 9: 2}}, {"weight": 1, "optional": True}))
                for part in parts[:-1]
            }
            | {parts[-1]: 1.0},
        },
        "gate": {
            "kind": "gate",
            "when": parts[0],
            "at_least": 0.5,
            "then": parts[1],
            "otherwise": rng.choice((0, 0.5)),
        },
        "cascade": {
            "kind": "cascade",
            "stages": [{"judge": part, "decides": {"above": 0.9, "below": 0.1}} | within for part in parts[:-1]]
            + [{"judge": parts[-1]}],
        },
        "panel": {"kind": "panel", "judges": parts, "quorum": 1, "reduce": rng.choice(("mean", "median", "min"))},
        "screen": {
            "kind": "screen",
            "judge": parts[0],
            "monitor": parts[1],
            "at": 0.9,
            "on": rng.choice(("mask", "floor")),
        },
    }[rng.choice(("sum", "gate", "cascade", "panel", "screen"))]
    return name


class Play:
    """One seed: a tree, sources and samples."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.faults = {name: rng.choice((0.0, 0.0, 0.2, 0.6)) for name in LEAVES}
        config = make_config(
            LEAVES,
            limits={name: {"concurrency": rng.choice((2, 16))} for name in LEAVES},
            engine={"deadline_s": DEADLINE_S, "seed": seed},
        )
        leaves = {name: {"kind": "llm", "sources": name, "score_range": [0, 1], "correct_at": 0.5} for name in LEAVES}
        while True:
            judges: dict[str, Any] = {}
            self.root = tree(rng, 3, judges)
            self.tree = {**config, "judges": {**leaves, **judges}, "routes": {"*": self.root}}
            with suppress(ConfigurationError):  # a tree that makes no sense; another one is drawn
                self.judge = JudgeRouter(load_config(self.tree), key=b"a key that nobody knows").judges[self.root]
                break
        self.samples = [self._sample(number) for number in range(rng.randint(1, 24))]
        self.journal = MemoryJournal() if rng.random() < 0.3 else None
        self.cutoff = Cutoff(rng.uniform(0, 10), rng.random()) if rng.random() < 0.3 else None

    def _sample(self, number: int) -> Sample:
        rng = self.rng
        response = rng.choice(("", "same", f"{number} is it", f"{number} again"))
        split = rng.choice((None, "train", "train", "val"))
        group = rng.choice((None, "x", "y", "z"))
        question = [{"role": "user", "content": f"Question {group}"}]
        given = {"messages": question, "ground_truth": group, "group_id": group, "step": 4, "split": split}
        return make_sample(number, response=response, **given)

    def behaviour(self, name: str) -> Any:
        rng = random.Random(f"{self.root} {name}")

        def takes(number: int, request: Any, now: float) -> Any:
            if rng.random() >= self.faults[name]:
                return rng.uniform(0.1, 4.0)
            return rng.choice(
                (TransientError("down"), Throttled("slowly", retry_after_s=3.0), PermanentError("no"), NEVER_S, 30.0)
            )

        return takes

    def answer(self, request: Any) -> Reply:
        rng = random.Random(f"{request.nonce}")
        _, blocks = read_fences(request.messages[-1]["content"])
        listed = [label.removeprefix("response_") for label in blocks if label.startswith("response_")]
        numbers = {label: rng.choice((0.0, 0.05, 0.3, 0.6, 0.95, 1.0)) for label in listed or ("score",)}
        said = {"scores": numbers} if listed else numbers
        if rng.random() < self.faults[request.judge] / 2:
            said = rng.choice(({}, {"score": "high"}, {"scores": {"1": 0.5}}, {"score": float("nan")}))
        text = json.dumps({"id": request.nonce, "rationale": "so", **said})
        return Reply(text=text, usage=Usage(10, 5), model="m")

    def outcomes(self) -> list[Outcome]:
        sources = {name: self.behaviour(name) for name in LEAVES}
        stage = Stage(sources, answer=self.answer, tree=self.tree, journal=self.journal)
        return stage.play(self.samples, cutoff=self.cutoff).outcomes


def latency_s(outcome: Outcome) -> float:
    return (outcome.verdict if isinstance(outcome, Scored) else outcome).latency_s


def told(outcomes: list[Outcome]) -> list[Any]:
    return [(outcome.reward, getattr(outcome, "label", ""), latency_s(outcome)) for outcome in outcomes]


@pytest.mark.parametrize("part", range(4))
def test_every_sample_of_a_tree_has_one_outcome_in_time(part: int) -> None:
    for seed in range(part, SEEDS, 4):
        play = Play(seed)
        outcomes, judge = play.outcomes(), play.judge
        assert len(outcomes) == len(play.samples), seed
        for outcome in outcomes:
            assert latency_s(outcome) <= DEADLINE_S + 1e-6, seed
            if isinstance(outcome, Failed):
                assert outcome.reward is None, seed
                continue
            assert isinstance(outcome, Scored), seed
            low, high = judge.reward_range
            assert low - 1e-9 <= outcome.reward <= high + 1e-9, seed
            assert (outcome.verdict.basis == "floor") == (outcome.verdict.failure is not None), seed
            assert set(outcome.verdict.components) <= set(judge.component_names()), seed
            assert outcome.verdict.judge == judge.name, seed
        if seed % 5 == 0:
            assert told(Play(seed).outcomes()) == told(outcomes), seed
