"""429s in virtual time: what a sample that is always throttled, a storm, and an outage cost the others."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from qreward_plugins import Outcome, RewardEngine, Sample, Scored
from qreward_plugins.simulation import run
from qreward_plugins.simulation.scenarios import Scenario
from qreward_plugins.simulation.servers import Fault, Server
from qreward_plugins.simulation.simulated_server import SimulatedServer


@dataclass
class Played:
    """What became of a batch: outcomes, when each came, in seconds from the start, and the servers."""

    outcomes: list[Outcome]
    ended_s: list[float]
    servers: dict[str, SimulatedServer]

    @property
    def throttled(self) -> int:
        return sum(server.throttled for server in self.servers.values())


def play(
    *servers: Server, samples: int, seed: int = 0, poisoned: Sequence[int] = (), at_s: float = 0.0, **engine
) -> Played:
    """Score a batch at `at_s`, in virtual time. `poisoned`: numbers of samples that every server throttles."""
    played = Scenario("throttled", "", servers, samples, seed=seed)
    batch = [
        replace(sample, extras={**sample.extras, "poison": "throttled"}) if number in poisoned else sample
        for number, sample in enumerate(played.samples())
    ]

    async def main() -> Played:
        sources = played.sources()
        loop = asyncio.get_running_loop()
        async with RewardEngine(
            played.config(**{"deadline_s": 600.0, "max_attempts": 6, **engine}), sources=sources
        ) as scores:
            started_s = loop.time()

            async def one(sample: Sample) -> tuple[Outcome, float]:
                outcome = await scores.score(sample)
                return outcome, loop.time() - started_s

            if at_s:  # it has scored others before
                await scores.score_all(Scenario("before", "", servers, 64, seed=seed + 1).samples())
                await asyncio.sleep(started_s + at_s - loop.time())
                started_s = loop.time()
            ended = await asyncio.gather(*map(one, batch))
        return Played([outcome for outcome, _ in ended], [at for _, at in ended], sources)

    return run(main())


@functools.cache
def ended_alone_s(server: Server, samples: int) -> float:
    """When the last of so many healthy samples is scored."""
    return max(play(server, samples=samples).ended_s)


@pytest.mark.parametrize("retry_after", ["seconds", "none"])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("count", [1, 10])
def test_a_sample_that_is_always_throttled_costs_the_others_nothing(count, declared, retry_after):
    """As by OpenAI, which answers "Request too large" with 429 (promise P11)."""
    server = Server("a", requests_per_minute=600, concurrency=64, declared=declared, retry_after=retry_after)
    poisoned = [97 * number % 512 for number in range(count)]
    beside = play(server, samples=512, poisoned=poisoned)
    healthy = [number for number in range(512) if number not in poisoned]
    assert all(isinstance(beside.outcomes[number], Scored) for number in healthy)
    assert max(beside.ended_s[number] for number in healthy) <= 1.05 * ended_alone_s(server, 512)
    assert not any(isinstance(beside.outcomes[number], Scored) for number in poisoned)  # nor a floor


@pytest.mark.parametrize(("places", "count", "retry_after"), [(4, 4, "seconds"), (16, 32, "none")])
def test_samples_that_are_always_throttled_do_not_keep_all_places(places, count, retry_after):
    """They are the first of the batch, as long ones are, and no fewer than the source has places."""
    server = Server("a", requests_per_minute=600, concurrency=places, retry_after=retry_after)
    beside = play(server, samples=128, poisoned=range(count))
    assert all(isinstance(outcome, Scored) for outcome in beside.outcomes[count:])
    assert max(beside.ended_s[count:]) <= ended_alone_s(server, 128) + 120.0


@pytest.mark.parametrize("seconds_per_unit", [1.0, 3.0])
def test_an_undeclared_window_is_found_without_a_storm(seconds_per_unit):
    server = Server(
        "a", requests_per_minute=600, declared=False, straggler_share=0.02, seconds_per_unit=seconds_per_unit
    )
    played = play(server, samples=1536)
    assert all(isinstance(outcome, Scored) for outcome in played.outcomes)
    assert played.throttled <= 50


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize(("outage_s", "deadline_s"), [(6.0, 8.0), (10.0, 12.0), (5.0, 14.0)])
def test_a_source_that_is_well_again_after_429s_without_retry_after_is_used_at_once(
    outage_s, deadline_s, declared, caplog
):
    caplog.set_level("INFO", "qreward_plugins")
    limits = {"requests_per_minute": 600.0, "concurrency": 64} if declared else {}
    server = Server(
        "a",
        **limits,
        declared=declared,
        retry_after="none",
        seconds_per_unit=0.15,
        noise=0.0,
        faults=(Fault(100.0, 100.0 + outage_s, "throttle"),),
    )
    played = play(server, samples=32, at_s=100.0, deadline_s=deadline_s)
    assert sum(not isinstance(outcome, Scored) for outcome in played.outcomes) <= 1
    assert "a minute" not in caplog.text
