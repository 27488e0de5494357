"""Configurations to plan with, and assumptions without any chance in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.planning import Assumptions, Lengths, Plan, plan, setting

from ..kit import make_config


@pytest.fixture
def tree() -> Callable[..., dict[str, Any]]:
    """A configuration with one LLM judge over sources given by name with their limits."""
    return lambda judge=None, source=None, **limits: make_config([*limits], limits=limits, judge=judge, source=source)


@pytest.fixture
def exact_plan(monkeypatch) -> Callable[..., Plan]:
    """A plan in which every request takes exactly its latency, 1 s unless it is given; `errors` fail."""

    def make(config: Any, samples: int, *, latency_s: Any = None, errors: float = 0.0, **further: Any):
        for name, value in {"SPREAD": 0.0, "STRAGGLERS": 0.0, "ERRORS": errors}.items():
            monkeypatch.setattr(setting, name, value)
        assumed = Assumptions(latency_s=latency_s or {"*": 1.0}, verdict_tokens=further.pop("verdict_tokens", None))
        further = {"lengths": Lengths(further.pop("tokens", 100), 0.0), "seeds": 1, "advise": False, **further}
        return plan(config, samples=samples, assumptions=assumed, **further)

    return make
