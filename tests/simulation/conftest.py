"""An exact server."""

from __future__ import annotations

from collections.abc import Callable

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
