"""Retries: jitter that doubles, a bound on failed attempts, a budget per source, and probes that are nobody's fault."""

from __future__ import annotations

import asyncio
import itertools
import random
from dataclasses import replace

import pytest

from qreward_plugins.errors import TransientError
from qreward_plugins.quotas.retries import FLOOR_PER_S, PER_SUCCESS, RESERVE
from qreward_plugins.samples import Cause, Scored
from qreward_plugins.scheduling.backoff import FIRST_BACKOFF_S, LONGEST_BACKOFF_S
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

RESET = TransientError("reset")


class Dice(random.Random):
    """Notes the range of every draw, and draws the share `lucky` of it."""

    def __init__(self, lucky):
        super().__init__(0)
        self.lucky = lucky
        self.ranges = []

    def uniform(self, low, high):
        self.ranges.append((low, high))
        return low + self.lucky * (high - low)


def retried(stage, *, lucky, max_attempts):
    """One sample among others that keep the source's breaker closed; return (its requests' times, draws, outcome)."""
    stage.add("a", behaviour=lambda number, request, now: RESET if request.size == 13 else 0.1)

    async def main():
        dice = Dice(lucky)
        dispatcher = stage.dispatcher(rng=dice, max_attempts=max_attempts)
        future = dispatcher.score(stage.sample(13), stage.judge, deadline_s=900)
        while not future.done():
            await asyncio.wait([dispatcher.score(stage.sample(10), stage.judge, deadline_s=900)])
        await dispatcher.aclose()
        return [sent.at for sent in stage.sent if sent.size == 13], dice.ranges, future.result()

    return run(main())


@pytest.mark.parametrize("lucky", [0.3, 1.0])
def test_the_same_source_is_asked_again_after_full_jitter(stage, lucky):
    at, draws, _ = retried(stage, lucky=lucky, max_attempts=9)
    assert draws[-1][1] == LONGEST_BACKOFF_S
    assert draws == [(0, min(FIRST_BACKOFF_S * 2**n, LONGEST_BACKOFF_S)) for n in range(8)]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    assert gaps == pytest.approx([lucky * high for _, high in draws], abs=0.01)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_a_sample_that_fails_everywhere_is_given_up_after_max_attempts(stage, most):
    at, _, outcome = retried(stage, lucky=0.5, max_attempts=most)
    assert (outcome.cause, outcome.reason, outcome.attempts, len(at)) == (Cause.INFRA, "exhausted", most, most)
    assert "reset" in outcome.detail


def test_another_source_is_asked_at_once(stage):
    for name in "abc":
        stage.add(name, behaviour=lambda number, request, now: RESET if number == 0 else 1.0)
    played = stage.play([10])
    assert played.outcomes[0].verdict.attempts == 4
    assert sorted(sent.source for sent in stage.sent[:3]) == ["a", "b", "c"]
    assert [sent.at for sent in stage.sent[:3]] == [0.0, 0.0, 0.0]
    assert 0.0 < stage.sent[3].at <= FIRST_BACKOFF_S * 4


def test_retries_come_back_no_faster_than_their_budget_allows(stage):
    # Half of 600 requests fail at `a` all at once; where else they may go at once, they may not all go at once.
    stage.add("a", limits={"concurrency": 300}, behaviour=lambda *_: 1.0)
    stage.add("b", limits={"concurrency": 900}, behaviour=lambda *_: 0.2)

    async def fails_late(request, *, on_sent):
        on_sent()
        await asyncio.sleep(1.0)
        raise RESET

    stage.sources["a"].send = fails_late
    played = stage.play([10] * 600, strategy="round_robin")
    assert played.all_scored
    retries = [sent.at for sent in stage.sent if sent.at >= 1.0]
    assert len(retries) == 300
    assert sum(at < 1.05 for at in retries) == pytest.approx(RESERVE, abs=2)
    for seconds in (1, 5, 10, 15):
        assert sum(at <= 1 + seconds for at in retries) <= RESERVE + FLOOR_PER_S * seconds + 1
    assert played.finished_at == pytest.approx(1 + (300 - RESERVE) / FLOOR_PER_S + 0.2, abs=1.0)


def test_successes_earn_retries(stage):
    stage.add("a", limits={"concurrency": 50})
    budget = stage.upstreams["a"].retries
    for _ in range(100):
        budget.withdraw(0.0)
    assert stage.play([10] * 50).all_scored
    assert budget.balance(0.0) == pytest.approx(FLOOR_PER_S * 1.0 + 50 * PER_SUCCESS)


def test_a_failed_probe_is_not_a_failure_of_the_sample(stage):
    # The source is down for 200 s: far longer than the attempts of a sample would last.
    stage.add("a", behaviour=lambda number, request, now: RESET if now < 200 else 1.0)
    played = stage.play([10], max_attempts=6, deadline_s=500)
    assert played.all_scored
    assert played.finished_at > 200
    assert played.outcomes[0].verdict.attempts > 7


def test_the_source_of_a_failure_is_named(stage):
    stage.add("a", behaviour=lambda *_: RESET)
    played = stage.play([10], max_attempts=3)
    assert (played.outcomes[0].source, played.outcomes[0].attempts) == ("a", 3)
    assert played.outcomes[0].reward is None


def test_a_stream_does_not_starve_a_sample_whose_reply_was_lost(stage):
    lost = 5
    stage.add(
        "a",
        timeout_s=20.0,
        limits={"concurrency": 4},
        behaviour=lambda number, request, now: 1e6 if number == lost else 3.0,
    )
    stage.knows("a", 3.0)
    took = []

    async def main():
        dispatcher = stage.dispatcher()

        async def submit_until(end):
            while dispatcher.now() < end:
                began = dispatcher.now()
                outcome = await dispatcher.score(stage.sample(), stage.judge, deadline_s=300)
                took.append((dispatcher.now() - began, isinstance(outcome, Scored)))

        await asyncio.gather(*[submit_until(200) for _ in range(8)])
        await dispatcher.aclose()

    run(main())
    assert all(scored for _, scored in took)
    # Its time limit, as long again behind the others, and its second attempt.
    assert 40 < max(seconds for seconds, _ in took) < 60


def test_a_sample_that_hangs_a_source_lets_all_go_first_that_were_there(stage):
    stage.add(
        "a",
        timeout_s=10.0,
        limits={"concurrency": 1},
        behaviour=lambda number, request, now: 1e6 if request.size == 66 else 2.0,
    )
    stage.knows("a", 2.0)
    played = stage.play([66, *[10] * 40], deadline_s=120, max_attempts=6)
    order = [request.size for request in stage.sent]
    assert order.count(10) == 40
    # Its second attempt could begin after 60 s otherwise: half of its time is over.
    assert [at for at, size in enumerate(order) if size == 66][:2] == [0, 41]
    assert sum(isinstance(outcome, Scored) for outcome in played.outcomes) == 40


def after_an_invalid_reply(stage, at, judged=20, part=4.0):
    """A sample is submitted at `at`. Source slow, which judged `judged` others, judges it only at the second try; the
    window of fast is used up for 60.15 s, and then allows `part` requests. Return its requests, and when it is scored.
    """

    def judges(request):
        return Reply(text="1" if [sent.source for sent in stage.sent].count("slow") > 1 else "bad")

    stage.add("slow", behaviour=lambda *_: 0.2, answer=judges)
    stage.add("fast", behaviour=lambda *_: 0.05, limits={"requests_per_minute": 4}, requests_per_window=4)
    stage.knows("slow", 0.2)
    stage.knows("fast", 0.05)
    for _ in range(judged):
        stage.upstreams["slow"].health.judged(True, 0.0, probe=False, alternative=False)
    only_fast = replace(stage.judge, sources=("fast",))

    async def main():
        dispatcher = stage.dispatcher()
        await asyncio.gather(*(dispatcher.score(stage.sample(10), only_fast, deadline_s=60) for _ in range(4)))
        await asyncio.sleep(at - asyncio.get_running_loop().time())
        stage.upstreams["fast"].quota.requests.limit = part
        outcome = await dispatcher.score(stage.sample(10), stage.judge, deadline_s=60)
        ended_at = asyncio.get_running_loop().time()
        await dispatcher.aclose()
        assert isinstance(outcome, Scored)
        return [sent.source for sent in stage.sent[4:]], ended_at

    return run(main())


@pytest.mark.parametrize("part", [4.0, 0.0], ids=["in 15 s", "other processes have its limit"])
def test_a_retry_after_an_invalid_reply_goes_back_to_its_source_if_another_one_answers_much_later(stage, part):
    sources, ended_at = after_an_invalid_reply(stage, at=45.0, part=part)
    assert sources == ["slow", "slow"]
    assert ended_at == pytest.approx(45.4)


def test_a_retry_after_an_invalid_reply_waits_a_little_for_another_source(stage):
    sources, ended_at = after_an_invalid_reply(stage, at=59.6)
    assert sources == ["slow", "fast"]
    assert ended_at < 60.5


def test_a_retry_after_an_invalid_reply_waits_longer_where_its_source_is_not_known_to_judge(stage):
    sources, _ = after_an_invalid_reply(stage, at=45.0, judged=0)
    assert sources == ["slow", "fast"]
