"""10,000 samples over two strict judges, every fifth reply spoilt: nothing is lost, broken or left behind.

The servers run in processes of their own, so that every connection, thread and task counted here is the client's.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter

from qreward_plugins import Cause, Failed, RewardEngine, Scored
from qreward_plugins.testing import FaultKind, Faults, JudgeServerProcess, Latency

from ..kit import connections_left, make_limits, overlap_of, tasks_left

SAMPLES = 10_000
MAX_ATTEMPTS = 6
INVALID_RETRIES = 1

# These end a source's service for good, or for five minutes: one of them would decide the whole run.
LEFT_OUT = {"error_401", "error_403", "error_404", "redirect", "redirect_loop", "error_429_huge"}
THROTTLES = {
    "error_429",
    "error_429_seconds",
    "error_429_date",
    "error_429_negative",
    "error_429_reset",
    "error_503_seconds",
}
OVERDUE = {"hang", "slow_headers", "slow_body"}
KINDS = {kind.value for kind in FaultKind if kind.stage not in ("stream", "list")} - LEFT_OUT

# A throttle stops a whole source for a second and an overdue reply holds a slot for three: one of each at each server.
RARE = THROTTLES | OVERDUE
RATES = {kind: 0.2 / (len(KINDS) - len(RARE)) for kind in sorted(KINDS - RARE)}
SCRIPTED = 3_000
"""Of so many requests to a server each has its own fault or none; those after them meet the rates."""

# What each server allows in any second: one is short of requests, the other of tokens.
LIMITS = {
    "a": {"requests": 560, "tokens": 400_000, "concurrency": 48},
    "b": {"requests": 800, "tokens": 215_000, "concurrency": 64},
}


def script(seed):
    rng = random.Random(seed)
    faults = rng.choices([None, *RATES], [0.8, *RATES.values()], k=SCRIPTED)
    for kind, place in zip(sorted(RARE), rng.sample(range(SCRIPTED), len(RARE)), strict=True):
        faults[place] = kind
    return faults


def judge_server(limits, seed):
    return JudgeServerProcess(
        limits=limits,
        faults=Faults(rates=RATES, script=script(seed), drip_interval_s=0.2, huge_bytes=2_000_000),
        latency=Latency(median_s=0.02, sigma=0.6),
        seed=seed,
    )


def test_10000_samples_through_two_judges_with_20_percent_faults(make_config, make_sample):
    samples = [make_sample(number) for number in range(SAMPLES)]
    limits = {name: make_limits(**numbers) for name, numbers in LIMITS.items()}

    async def score(servers):
        tree = make_config(
            {name: server.base_url for name, server in servers.items()},
            limits={name: ours for name, (_, ours) in limits.items()},
            total_s=3,
            judge={"invalid_retries": INVALID_RETRIES},
            # Without hedges every request is owed to a sample or to a reply that was spoilt.
            # Without a keeper, which a process that gets no processor for ten seconds loses touch with.
            engine={
                "max_attempts": MAX_ATTEMPTS,
                "deadline_s": 280,
                "shared": "off",
                "scheduling": {"hedge": False},
            },
        )
        async with RewardEngine(tree) as engine:
            outcomes = await engine.score_all(samples)
            statistics = engine.statistics()
        assert tasks_left() == []
        assert await asyncio.to_thread(connections_left, *(server.base_url for server in servers.values())) == []
        return outcomes, statistics, engine.statistics()

    with judge_server(limits["a"][0], 26) as a, judge_server(limits["b"][0], 36) as b:
        outcomes, statistics, at_the_end = asyncio.run(score({"a": a, "b": b}))
        reports = {"a": a.report(), "b": b.report()}

    # One outcome for each sample, its own: a number that the judge gave for it, or a cause and no number.
    assert len(outcomes) == SAMPLES
    failures = Counter()
    for sample, outcome in zip(samples, outcomes, strict=True):
        if isinstance(outcome, Scored):
            assert outcome.reward == overlap_of(sample)
            assert outcome.verdict.source in LIMITS
        else:
            assert isinstance(outcome, Failed)
            assert outcome.reward is None
            assert outcome.detail
            failures[outcome.cause] += 1
    assert set(failures) <= {Cause.VERDICT, Cause.INFRA}
    assert failures.total() < SAMPLES / 50  # a sample fails when several attempts in a row do
    assert failures[Cause.VERDICT] > 0

    # No limit was broken, and they were really used.
    for name, report in reports.items():
        assert report.violations_total == 0, report.violations[:5]
        assert report.refused == report.scorer_errors_total == report.in_flight == 0
        assert statistics.sources[name].peak_in_flight == LIMITS[name]["concurrency"]
    assert set().union(*(report.faults for report in reports.values())) == KINDS

    # Every attempt but the first is owed to a reply that was spoilt, or to a circuit that opened.
    attempts = [outcome.verdict.attempts if isinstance(outcome, Scored) else outcome.attempts for outcome in outcomes]
    requests = sum(source.requests for source in statistics.sources.values())
    spoilt = sum(
        source.throttled + source.permanent + source.invalid + source.transient + source.cancelled
        for source in statistics.sources.values()
    )
    throttled = sum(source.throttled for source in statistics.sources.values())
    assert sum(attempts) == requests == statistics.attempts <= SAMPLES + spoilt
    assert max(attempts) <= MAX_ATTEMPTS + 1 + INVALID_RETRIES + len(LIMITS) + throttled
    assert (statistics.submitted, statistics.scored) == (SAMPLES, SAMPLES - failures.total())
    assert statistics.failed_total == failures.total()
    assert statistics.waiting == at_the_end.waiting == 0
