"""An exact server, and mistakes in the production code, for proofs that a soak can fail."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from qreward_plugins.simulation import Server


@pytest.fixture(scope="session")
def exact() -> Callable[..., Server]:
    """A server without chance: no noise, no overhead, no network; one second for a unit of work."""

    def make(name: str = "a", **further) -> Server:
        return Server(
            name, **{"seconds_per_unit": 1.0, "overhead_s": 0.0, "noise": 0.0, "network_s": (0.0, 0.0), **further}
        )

    return make


Mutation = Callable[[Any], None]
"""Makes a mistake, by a `monkeypatch` that undoes it."""


def replaced(owner: Any, name: str, value: Any) -> Mutation:
    """A method is another one."""
    return lambda monkeypatch: monkeypatch.setattr(owner, name, value)


def wrapped(owner: Any, name: str, mutated: Callable[..., Any]) -> Mutation:
    """A method is `mutated`, whose first argument is the method."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(*given: Any, **named: Any) -> Any:
        return mutated(original, *given, **named)

    return replaced(owner, name, method)
