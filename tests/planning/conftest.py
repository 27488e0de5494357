"""Configurations to plan with, and assumptions without any chance in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.planning import Assumptions, Lengths, Plan, plan


@pytest.fixture
def tree() -> Callable[..., dict[str, Any]]:
    """A configuration with one LLM judge over sources given by name with their limits; `prices` by name."""

    def make(prices: dict[str, Any] | None = None, judge: dict[str, Any] | None = None, **sources: Any):
        return {
            "sources": {
                name: {
                    "kind": "openai",
                    "base_url": "http://planned.invalid/v1",
                    "model": "judge",
                    "limits": limits,
                    "price": (prices or {}).get(name, {}),
                }
                for name, limits in sources.items()
            },
            "judges": {"quality": {"kind": "llm", **(judge or {})}},
        }

    return make


@pytest.fixture
def exact_plan() -> Callable[..., Plan]:
    """A plan in which every request takes exactly its latency, 1 s unless it is given."""

    def make(config: Any, samples: int, *, latency_s: Any = None, tokens: float = 100, seeds: int = 1, **further: Any):
        assumed = {"exact": True, **further.pop("assumed", {})}
        return plan(
            config,
            samples=samples,
            lengths=further.pop("lengths", Lengths(tokens, 0.0)),
            assumptions=Assumptions(latency_s=latency_s or {"*": 1.0}, **assumed),
            seeds=seeds,
            **{"advise": False, **further},
        )

    return make
