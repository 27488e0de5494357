"""Scenarios: pure functions of name, number and seed, and what the engine meets in them."""

from __future__ import annotations

import asyncio
import math

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.config import Config, load_config
from qreward_plugins.judges import LLMJudge, Opening
from qreward_plugins.simulation import FAULTS, SCENARIOS, run, scenario, score_of

from ..kit import each_of, in_virtual_time


@each_of("name", [*SCENARIOS, *FAULTS])
def test_every_scenario_is_whole(name):
    made = scenario(name, 40, seed=3)
    samples = made.samples()
    assert (made.name, made.count, len(samples)) == (name, 40, 40)
    assert len({sample.id for sample in samples}) == 40
    assert set(load_config(made.config()).sources) == set(made.sources()) == {server.name for server in made.servers}
    assert len(made.arrivals()) == 40
    assert 0 < made.bound_s() < math.inf
    assert made == scenario(name, 40, seed=3)
    assert made.bound_s() == scenario(name, 40, seed=3).bound_s()


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="unequal-rates"):
        scenario("unequal")


@in_virtual_time
async def test_jobs_are_what_the_servers_will_count():
    made = scenario("tokens", 50)
    node = LLMJudge.Config.model_validate(made.config()["judges"]["quality"])
    judge = LLMJudge("quality", node, Opening(Config(), ("a",), b"k", {}.__getitem__))
    sources = made.sources()
    requests = [judge.request(sample, attempt=0) for sample in made.samples()]
    sending = [sources["a"].send(request, on_sent=lambda: None) for request in requests]
    replies = await asyncio.gather(*sending, return_exceptions=True)
    replied = [(reply, job) for reply, job in zip(replies, made.jobs(), strict=True) if hasattr(reply, "usage")]
    assert len(replied) > 40
    assert all(reply.usage.total_tokens == job.tokens for reply, job in replied)


def test_streamed_samples_come_over_a_minute():
    made = scenario("streamed", 500)
    arrivals = made.arrivals()
    assert arrivals == sorted(arrivals)
    assert 0 <= arrivals[0] < 2
    assert 58 < arrivals[-1] < 60
    assert set(scenario("equal", 500).arrivals()) == {0.0}


def played(made):
    """The outcomes of a scenario's samples, when the engine had all of them, and when requests came to the servers."""
    sources = made.sources()

    async def main():
        async with RewardEngine(made.config(), sources=sources) as engine:
            return await engine.score_all(made.samples()), asyncio.get_running_loop().time()

    return *run(main()), [source.arrivals for source in sources.values()]


@pytest.mark.parametrize(
    ("name", "seed", "most_s"),
    [
        ("hangs", 5000, 70.0),  # 128 if no attempt is given up for its age
        ("hangs-later", 5001, 120.0),  # 130 if overdue probes are waited for after a recovery
        ("nonsense", 5000, 60.0),  # 12 failed if samples go back to where most replies are invalid
    ],
)
def test_a_fault_costs_no_sample_and_little_time(name, seed, most_s):
    outcomes, makespan_s, _ = played(scenario(name, 256, seed=seed))
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert makespan_s < most_s


def test_the_engine_scores_a_scenario_and_repeats_itself():
    made = scenario("everything", 60, seed=2)
    outcomes, makespan_s, arrivals = played(made)
    for sample, outcome in zip(made.samples(), outcomes, strict=True):
        assert outcome.verdict.score == pytest.approx(score_of(sample.id) / 10)
    assert makespan_s >= made.bound_s()
    assert played(made) == (outcomes, makespan_s, arrivals)
