"""Whole engines with many samples: throttled sources and token limits in virtual time, and ten thousand samples through
real sockets.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from qreward_plugins import Cause, Failed, RewardEngine, Sample, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.simulation.scenarios import Scenario
from qreward_plugins.simulation.servers import Fault, Server
from qreward_plugins.simulation.strict_limits import SlidingWindow
from qreward_plugins.sources import Reply, Source
from qreward_plugins.testing import FaultKind, Faults, JudgeServerProcess, Latency

from ..kit import (
    connections_left,
    in_virtual_time,
    make_config,
    make_limits,
    make_sample,
    no_thread_left,  # noqa: F401 -- holds for each test
    now,
    overlap_of,
    tasks_left,
)

ZERO_TO_ONE = {"score_range": [0, 1], "max_tokens": 64}


def worded(number: int) -> Sample:
    """Sample `number`, with a response of its own and a length of its own."""
    response = f"It is number {number}. " + "word " * (number * 37 % 80)
    question = {"role": "user", "content": f"Write {number} as a word."}
    return make_sample(number, messages=[question], response=response, ground_truth=None)


def play(server: Server, *, samples: int, poisoned: Sequence[int] = (), at_s: float = 0.0, **engine):
    """Score a batch at `at_s`, in virtual time: its outcomes, when each came, in seconds from the start, and the 429s.
    `poisoned`: numbers of samples that the server throttles always.
    """
    played = Scenario("throttled", "", (server,), samples)
    batch = [
        replace(sample, extras={**sample.extras, "poison": "throttled"}) if number in poisoned else sample
        for number, sample in enumerate(played.samples())
    ]

    async def main():
        sources = played.sources()
        config = played.config(**{"deadline_s": 600.0, "max_attempts": 6, **engine})
        async with RewardEngine(config, sources=sources) as scores:
            started_s = now()

            async def one(sample: Sample):
                outcome = await scores.score(sample)
                return outcome, now() - started_s

            if at_s:  # it has scored others before
                await scores.score_all(Scenario("before", "", (server,), 64, seed=1).samples())
                await asyncio.sleep(started_s + at_s - now())
                started_s = now()
            outcomes, ended_s = zip(*await asyncio.gather(*map(one, batch)), strict=True)
        throttled = sum(sent.ending == "throttled" for sent in sources[server.name].record)
        return outcomes, ended_s, throttled

    return run(main())


@functools.cache
def ended_alone_s(server: Server, samples: int) -> float:
    """When the last of so many healthy samples is scored."""
    return max(play(server, samples=samples)[1])


@pytest.mark.parametrize("retry_after", ["seconds", "none"])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("count", [1, 10])
def test_a_sample_that_is_always_throttled_costs_the_others_nothing(count, declared, retry_after):
    """As by OpenAI, which answers "Request too large" with 429 (promise P11)."""
    server = Server("a", requests_per_minute=600, concurrency=64, declared=declared, retry_after=retry_after)
    poisoned = [97 * number % 512 for number in range(count)]
    outcomes, ended_s, _ = play(server, samples=512, poisoned=poisoned)
    healthy = [number for number in range(512) if number not in poisoned]
    assert all(isinstance(outcomes[number], Scored) for number in healthy)
    assert max(ended_s[number] for number in healthy) <= 1.05 * ended_alone_s(server, 512)
    assert not any(isinstance(outcomes[number], Scored) for number in poisoned)  # nor a floor


@pytest.mark.parametrize(("places", "count", "retry_after"), [(4, 4, "seconds"), (16, 32, "none")])
def test_samples_that_are_always_throttled_do_not_keep_all_places(places, count, retry_after):
    """They are the first of the batch, as long ones are, and no fewer than the source has places."""
    server = Server("a", requests_per_minute=600, concurrency=places, retry_after=retry_after)
    outcomes, ended_s, _ = play(server, samples=128, poisoned=range(count))
    assert all(isinstance(outcome, Scored) for outcome in outcomes[count:])
    assert max(ended_s[count:]) <= ended_alone_s(server, 128) + 120.0


@pytest.mark.parametrize("seconds_per_unit", [1.0, 3.0])
def test_an_undeclared_window_is_found_without_a_storm(seconds_per_unit):
    server = Server(
        "a", requests_per_minute=600, declared=False, straggler_share=0.02, seconds_per_unit=seconds_per_unit
    )
    outcomes, _, throttled = play(server, samples=1536)
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert throttled <= 50


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
    outcomes, _, _ = play(server, samples=32, at_s=100.0, deadline_s=deadline_s)
    assert sum(not isinstance(outcome, Scored) for outcome in outcomes) <= 1
    assert "a minute" not in caplog.text


# Token limits as strict servers count them: a prompt when it arrives, a completion when it is written


WINDOW_S = 10.0
TOKENS = 100_000
COMPLETION = 1_500
LOTS = 10**9


class StrictSource(Source):
    """Answers with `COMPLETION` tokens, slowly to long samples, and books the most tokens of any window."""

    name, model = "a", "judge"

    def __init__(self):
        self._window = SlidingWindow(LOTS, WINDOW_S)
        self.most = 0

    async def send(self, request, *, on_sent):
        on_sent()
        prompt = request.size // 4
        self._charge(prompt)
        await asyncio.sleep(13.0 if len(request.sample.response) > 1000 else 1.0)
        self._charge(COMPLETION)
        return Reply(text=f'{{"id": "{request.nonce}", "score": 0.5}}', usage=Usage(prompt, COMPLETION))

    def _charge(self, tokens):
        now = asyncio.get_running_loop().time()
        self._window.take(tokens, now)
        self.most = max(self.most, LOTS - self._window.announced(now).remaining)


@in_virtual_time
async def test_a_completion_is_counted_when_it_comes():
    limits = {"tokens_per_minute": TOKENS * 60 / WINDOW_S, "window_s": WINDOW_S, "concurrency": 1000}
    judge = {**ZERO_TO_ONE, "max_tokens": COMPLETION + 100}
    tree = make_config("a", limits={"a": limits}, judge=judge, total_s=60)
    source = StrictSource()
    async with RewardEngine(tree, sources={"a": source}) as engine:
        # The long ones are sent first and answered last, when the short ones of the next window are.
        samples = (Sample([{"role": "user", "content": "?"}], "x" * n) for n in [3000] * 60 + [300] * 300)
        outcomes, finished_s = await engine.score_all(samples), now()
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.most <= TOKENS
    # About 750,000 tokens, so 75 s at least. The first answers take 13 s, and until they come a byte may be a token.
    assert finished_s < 100


# Ten thousand samples


MANY = 10_000
MAX_ATTEMPTS = 6
INVALID_RETRIES = 1

# These end a source's service for good, or for five minutes: one of them would decide the whole run.
LEFT_OUT = {"error_401", "error_403", "error_404", "redirect", "redirect_loop", "error_429_huge"}
KINDS = {kind.value for kind in FaultKind if kind.stage not in ("stream", "list")} - LEFT_OUT
# A throttle stops a whole source for a second and an overdue reply holds a slot for three: one of each at each server.
RARE = {kind for kind in KINDS if kind.startswith(("error_429", "error_503_", "hang", "slow_"))}
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


def test_10000_samples_through_two_judges_with_20_percent_faults():
    samples = [worded(number) for number in range(MANY)]
    limits = {name: make_limits(**numbers) for name, numbers in LIMITS.items()}

    async def score(servers):
        tree = make_config(
            servers,
            limits={name: ours for name, (_, ours) in limits.items()},
            total_s=3,
            judge={**ZERO_TO_ONE, "invalid_retries": INVALID_RETRIES},
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
    assert len(outcomes) == MANY
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
    assert failures.total() < MANY / 50  # a sample fails when several attempts in a row do
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
    assert sum(attempts) == requests == statistics.attempts <= MANY + spoilt
    assert max(attempts) <= MAX_ATTEMPTS + 1 + INVALID_RETRIES + len(LIMITS) + throttled
    assert (statistics.submitted, statistics.scored) == (MANY, MANY - failures.total())
    assert statistics.failed_total == failures.total()
    assert statistics.waiting == at_the_end.waiting == 0
