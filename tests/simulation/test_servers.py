"""Descriptions of servers: what can be enforced, what a client is told, how faults divide time."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from qreward_plugins.config import Limits, Price
from qreward_plugins.simulation import Fault, Server
from qreward_plugins.simulation.servers import phases, random_faults

from ..kit import each_of


def test_limits_and_prices_are_what_the_configuration_takes():
    server = Server("a", requests_per_minute=300, tokens_per_minute=9e5, concurrency=8, window_s=10.0)
    limits = Limits.model_validate(server.limits())
    assert (limits.requests_per_minute, limits.tokens_per_minute, limits.concurrency) == (300, 9e5, 8)
    assert (limits.window_s, limits.window) == (10.0, "auto")
    bucket = {"requests_per_minute": 300, "window": "bucket", "burst": 5}
    limits = Limits.model_validate(Server("a", **bucket, declares_window=True).limits())
    assert (limits.window, limits.burst) == ("bucket", 5)
    assert Server("a", requests_per_minute=300, concurrency=8, declared=False).limits() == {}
    price = Price.model_validate(Server("a", price_per_request=0.1, price_per_million_tokens=2).source()["price"])
    assert (price.per_request, price.input_per_million, price.output_per_million) == (0.1, 2, 2)


def test_what_cannot_be_enforced_is_refused():
    with pytest.raises(ValueError, match="less than one request"):
        Server("a", requests_per_minute=30, window_s=1.0)
    with pytest.raises(ValueError, match="start_s < end_s"):
        Fault(5, 5, "hang")


@each_of("seed", range(20))
def test_phases_agree_with_the_faults_at_every_moment(seed):
    rng = random.Random(seed)
    faults = random_faults(rng) + random_faults(rng)
    found = phases(faults)
    assert (found[0].start_s, found[-1].end_s) == (0, math.inf)
    for before, after in itertools.pairwise(found):
        assert before.end_s == after.start_s
    for _ in range(100):
        now = rng.uniform(0, 300)
        phase = next(phase for phase in found if phase.start_s <= now < phase.end_s)
        present = [fault for fault in faults if fault.start_s <= now < fault.end_s]
        kinds = {fault.kind for fault in present}
        assert phase.dead == bool(kinds & {"refuse", "hang"})
        assert phase.hangs == ("hang" in kinds and "refuse" not in kinds)
        assert phase.closed == bool(kinds & {"refuse", "hang", "throttle"})
        slowness = math.prod(fault.factor for fault in present if fault.kind == "slow")
        assert phase.speed == pytest.approx(0 if phase.dead else 1 / slowness)
