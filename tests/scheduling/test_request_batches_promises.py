"""The promises with sources that take several calls in one request, over random sources, faults and callers."""

from __future__ import annotations

import asyncio
import random

import pytest

from qreward_plugins.config import Batch
from qreward_plugins.errors import InvalidReply, PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.sources.base import Reply

SEEDS = range(60)
POISON = 13
MAX_ATTEMPTS = 6


def add_source(stage, name, rng):
    """A source with random limits and faults. Some samples of size `POISON` break every request that carries them."""
    a_s, b_s = rng.choice((0.02, 0.2, 1.0)), rng.choice((0.0, 0.005, 0.05))
    errors, stragglers = rng.choice((0.0, 0.0, 0.1, 0.4)), rng.choice((0.0, 0.05))
    poison = rng.choice(
        (
            None,
            PermanentError("too long", status=400),
            TransientError("500", status=500),
            SourceUnusable("403", status=403),
            InvalidReply("garbled"),
            1e9,
        )
    )
    storm = rng.choice((None, None, (rng.uniform(0, 5), rng.uniform(5, 20))))
    outage = rng.choice((None, None, (rng.uniform(0, 5), rng.uniform(5, 30))))
    draws = random.Random(rng.random())

    def takes(number, requests, now):
        if outage and outage[0] <= now < outage[1]:
            return TransientError("refused")
        if storm and storm[0] <= now < storm[1]:
            return Throttled("429", status=429, retry_after_s=draws.choice((None, 0.5, 3.0)))
        if poison is not None and any(request.size == POISON for request in requests):
            return poison
        if draws.random() < errors:
            return TransientError("500", status=500)
        return (a_s + b_s * len(requests)) * (20 if draws.random() < stragglers else 1)

    concurrency = rng.choice((None, 1, 2, 8))
    per_minute = rng.choice((None, None, 60, 600))
    tokens = rng.choice((None, None, 30_000))
    limits = {"concurrency": concurrency, "requests_per_minute": per_minute, "tokens_per_minute": tokens}

    def results(right):
        drawn = draws.random()
        if drawn < 0.03:
            return right[1:]
        return [InvalidReply("NaN"), *right[1:]] if drawn < 0.06 else right

    return stage.add(
        name,
        batch=Batch(
            max_size=rng.choice((2, 3, 8, 64)),
            max_wait_s=rng.choice((0.0, 0.02, 1.0)),
            max_tokens=rng.choice((None, 1000)),
        ),
        timeout_s=rng.choice((10.0, 60.0)),
        limits={key: value for key, value in limits.items() if value is not None},
        requests_per_window=per_minute or float("inf"),
        tokens_per_window=tokens or float("inf"),
        concurrency=concurrency or float("inf"),
        behaviour=lambda number, request, now: takes(number, [request], now),
        batch_behaviour=takes,
        results=results,
        answer=lambda request: Reply(text="1", usage=Usage(request.size, 0)),
    )


def play(stage, seed):
    rng = random.Random(seed)
    sources = [add_source(stage, name, rng) for name in "abc"[: rng.randint(1, 3)]]
    if rng.random() < 0.3:
        stage.add("plain", behaviour=lambda *_: 0.5)
    poisoned = rng.random() < 0.5
    late = []

    async def main():
        dispatcher = stage.dispatcher(
            seed=seed,
            hedge=rng.random() < 0.7,
            max_attempts=MAX_ATTEMPTS,
            on_late=(lambda *_: late.append(1)) if rng.random() < 0.5 else None,
        )
        futures = []

        async def submit(delay_s, count, *, whole):
            await asyncio.sleep(delay_s)
            batch = dispatcher.batches.new([None] * count) if whole else None
            for _ in range(count):
                size = POISON if poisoned and rng.random() < 0.02 else rng.choice((5, 50, 300))
                deadline_s = rng.choice((20.0, 120.0))
                futures.append(dispatcher.score(stage.sample(size), stage.judge, deadline_s=deadline_s, batch=batch))
                if not whole:
                    await asyncio.sleep(rng.choice((0.0, 0.001, 0.03)))
            if batch is not None:
                dispatcher.batches.seal(batch)

        async def cancel():
            await asyncio.sleep(rng.uniform(0, 3))
            for future in rng.sample(futures, len(futures) // 10):
                future.cancel()

        work = [submit(rng.uniform(0, 2), rng.randint(1, 80), whole=rng.random() < 0.6) for _ in range(3)]
        await asyncio.gather(*work, cancel())
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0, 2))
            await dispatcher.aclose()
        outcomes = await asyncio.wait_for(asyncio.gather(*futures, return_exceptions=True), 130)
        assert dispatcher.stuck_jobs() == []
        await dispatcher.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return outcomes

    outcomes = run(main())
    return sources, outcomes, [source.arrivals for source in sources], [source.carried for source in sources]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_promises_hold(new_stage, seed):
    stage = new_stage()
    sources, outcomes, arrivals, carried = play(stage, seed)
    cancelled = [outcome for outcome in outcomes if isinstance(outcome, asyncio.CancelledError)]
    ended = [outcome for outcome in outcomes if isinstance(outcome, (Scored, Failed))]
    assert len(ended) + len(cancelled) == len(outcomes)  # P1
    assert all(outcome.reason != "bug" for outcome in ended if isinstance(outcome, Failed))
    for source in sources:
        assert source.violations == []  # P3
    assert stage.idle()  # P5
    assert all(upstream.live == {} for upstream in stage.upstreams.values())
    if seed % 10 == 0:
        again = play(new_stage(), seed)
        assert (arrivals, carried) == again[2:]  # P7
