"""A hand that sends requests to simulated servers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from qreward_plugins.simulation import Luck, Server, SimulatedServer, Trace, run

from .asking import Answer, Ask, send


@pytest.fixture
def exact() -> Callable[..., Server]:
    """A server without chance: no noise, no overhead, no network; one second for a unit of work."""

    def make(name: str = "a", **further) -> Server:
        return Server(
            name, **{"seconds_per_unit": 1.0, "overhead_s": 0.0, "noise": 0.0, "network_s": (0.0, 0.0), **further}
        )

    return make


@pytest.fixture
def play() -> Callable[..., tuple[list[Answer], SimulatedServer]]:
    """Send `asks` to one server in virtual time; returns their answers in order, and the server as it is then."""

    def play(server: Server, asks: Sequence[Ask], *, seed: int = 0, trace: Trace | None = None):
        simulated = SimulatedServer(server, Luck(seed), trace=trace)

        async def main() -> list[Answer]:
            return list(await asyncio.gather(*(send(simulated, ask, number) for number, ask in enumerate(asks))))

        return run(main()), simulated

    return play
