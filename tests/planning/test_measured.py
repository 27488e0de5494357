"""A plan made from a journal against the step itself: the same engine, over servers in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.planning import Plan, plan
from qreward_plugins.planning.recorded import read_recorded
from qreward_plugins.simulation import Luck, Server, SimulatedServer, run

from ..kit import record

WINDOW_S = 60.0


def measured(config, servers, count, *, seed=0):
    """Two steps of one run: the outcomes of the first, which go into the journal, and the time of the second."""

    def samples(step):
        return [
            Sample([{"role": "user", "content": "?"}], "x" * 400, id=f"{step} {n}", extras={"work": 1})
            for n in range(count)
        ]

    async def main():
        luck = Luck(seed)
        sources = {name: SimulatedServer(server, luck) for name, server in servers.items()}
        async with RewardEngine({**config, "engine": {"seed": seed, "deadline_s": 36_000}}, sources=sources) as engine:
            first = samples("first")
            outcomes = await engine.score_all(first)
            await asyncio.sleep(2 * WINDOW_S)
            await engine.score_all(samples("second"))
            return list(zip(first, outcomes, strict=True)), engine.last_batch().makespan_s

    return run(main())


def planned(config, path, count) -> Plan:
    with_journal = {**config, "engine": {"journal": {"path": str(path)}, "deadline_s": 36_000}}
    return plan(with_journal, samples=count, seeds=2, advise=False)


CASES = {
    "requests": (
        {"a": {"requests_per_minute": 120, "concurrency": 64}},
        {"a": Server("a", seconds_per_unit=4.0, concurrency=64, requests_per_minute=120)},
        250,
        "requests",
    ),
    "two speeds": (
        {"a": {"concurrency": 8}, "b": {"concurrency": 16}},
        {
            "a": Server("a", seconds_per_unit=1.0, concurrency=8, straggler_share=0.01),
            "b": Server("b", seconds_per_unit=6.0, concurrency=16, error_share=0.02),
        },
        180,
        "places",
    ),
}


@pytest.mark.parametrize(("limits", "servers", "count", "bottleneck"), CASES.values(), ids=CASES.keys())
def test_a_plan_from_a_journal_is_within_a_tenth_of_the_step(tmp_path, tree, limits, servers, count, bottleneck):
    """Most of what the journal holds of these steps is waiting: 120 samples for 8 places."""
    config, path = tree(**limits), tmp_path / "verdicts.sqlite"
    outcomes, step_s = measured(config, servers, count)
    record(path, outcomes)
    found = planned(config, path, count)
    assert found.step_s.p50 == pytest.approx(step_s, rel=0.1)
    assert found.bottleneck.resource == bottleneck


def test_noise_is_taken_from_the_journal(tmp_path, tree):
    config, path = tree(a={"concurrency": 64}), tmp_path / "verdicts.sqlite"
    outcomes, _ = measured(config, {"a": Server("a", seconds_per_unit=2.0, concurrency=64, noise=0.5)}, 200)
    record(path, outcomes)
    found = read_recorded(str(path), ["a"])["a"]
    assert found.latency_s == pytest.approx(2.05, rel=0.07)
    assert found.deviation == pytest.approx(0.5, abs=0.06)
    notes = " ".join(planned(config, path, 16).notes)
    assert f"spread with a sigma of {found.deviation:.2g}" in notes
    assert "from the journal" in notes


def test_a_latency_is_given_or_from_the_journal_or_assumed(tmp_path, tree, exact_plan):
    config, path = tree(a={"concurrency": 8}, b={"concurrency": 8}, c={}), tmp_path / "verdicts.sqlite"
    servers = {name: Server(name, seconds_per_unit=1.0, concurrency=8) for name in "ab"}
    both = {**config, "sources": {name: config["sources"][name] for name in "ab"}}
    record(path, measured(both, servers, 160)[0])
    found = exact_plan({**config, "engine": {"journal": {"path": str(path)}}}, 16, lengths=None, latency_s={"b": 2.0})
    assert [use.latency_from for use in found.sources] == ["journal", "given", "assumed"]
    assert [each.name for each in tmp_path.iterdir()] == ["verdicts.sqlite"]
