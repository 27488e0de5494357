"""P4 with requests of several calls: samples that fail every request that carries them."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from qreward_plugins.config import Batch
from qreward_plugins.errors import InvalidReply, PermanentError, SampleFault, TransientError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.scheduling.splitting import ALONE_AFTER

MAX_ATTEMPTS = 6
FAULTS = {
    "400": PermanentError("too long", status=400),
    "500": TransientError("500", status=500),
    "reset": TransientError("the connection was reset"),
    "garbled": InvalidReply("two results for three calls"),
    "sample": SampleFault("raised"),
    "hang": 1e6,
}


def requests_of_one(kind, size):
    """The bound of `Splitting` on the failed requests of several calls that a call is in."""
    once_excused = ALONE_AFTER + 1
    return {"400": int(math.log2(size)), "garbled": 1, "sample": 1}.get(kind, once_excused)


@pytest.mark.parametrize("bad", [1, 3, 8])
@pytest.mark.parametrize("places", [1, 3, 8])
@pytest.mark.parametrize("kind", FAULTS)
def test_innocent_calls_are_safe_beside_guilty_ones(new_stage, kind, places, bad):
    """With 8 guilty calls that hang in 8 requests at once, the source looks as if it had stopped answering."""
    rng = random.Random(f"{kind} {places} {bad}")
    size, count = 16, 150
    sizes = list(range(10, 10 + count + bad))  # unique, so that a size names a sample
    guilty = set(random.Random(1).sample(sizes, bad))
    rng.shuffle(sizes)
    stage = new_stage()
    tries, failed_together = Counter(), Counter()

    def takes(number, requests, now):
        carried = [len(request.sample.response) for request in requests]
        tries.update(carried)
        if not guilty.isdisjoint(carried):
            if len(carried) > 1:
                failed_together.update(carried)
            return FAULTS[kind]
        return 0.1 + 0.01 * len(requests)

    source = stage.add(
        "a",
        batch=Batch(max_size=size),
        limits={"concurrency": places},
        timeout_s=20.0,
        behaviour=lambda number, request, now: takes(number, [request], now),
        batch_behaviour=takes,
    )
    played = stage.play(sizes, deadline_s=30_000.0, max_attempts=MAX_ATTEMPTS)
    by_size = dict(zip(sizes, played.outcomes, strict=True))
    assert all(isinstance(outcome, Scored) for one, outcome in by_size.items() if one not in guilty)
    assert all(isinstance(by_size[one], Failed) for one in guilty)
    most = requests_of_one(kind, size)
    assert max(failed_together[one] for one in sizes) <= most
    assert max(tries[one] for one in sizes if one not in guilty) <= most + 1
    assert len(source.carried) <= count + len(guilty) * (most + 2 * MAX_ATTEMPTS)
