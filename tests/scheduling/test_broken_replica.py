"""A source with two servers, one of which refuses everything: it costs no sample, whatever the other one does."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import PermanentError, TransientError
from qreward_plugins.sources.base import Reply
from qreward_plugins.sources.replicas import Replicas, RoutingHints

REFUSES_AFTER_S = 0.005
"""A refusal takes no inference."""


@pytest.fixture
def add(stage):
    """Add the source: the seconds that an answer of the good server takes, and when it is down. Counts requests."""

    def add(answers_after_s: float, *, down: Callable[[float], bool] = lambda now: False, **limits) -> Counter[str]:
        source = stage.add("own", limits=limits)
        replicas = Replicas(("broken", "good"), Routing(strategies=("least_requests",)), name="own")
        asked: Counter[str] = Counter()

        async def send(request, *, on_sent):
            on_sent()
            loop = asyncio.get_running_loop()
            error: Exception | None = None
            with replicas.acquire(loop.time(), RoutingHints(refusal=request.refusal)) as lease:
                asked[lease.base_url] += 1
                if lease.base_url == "broken":
                    error = PermanentError("answered 400", status=400)
                elif down(loop.time()):
                    error = TransientError("answered 502", status=502)
                await asyncio.sleep(REFUSES_AFTER_S if lease.base_url == "broken" else answers_after_s)

            def read() -> Reply:
                if error is not None:
                    raise error
                return Reply(text="1")

            return lease.read(loop.time(), read)

        source.send = send
        return asked

    return add


def test_it_does_not_get_what_waits_for_the_other_one(stage, add):
    """It always has fewest requests under way, and each refusal costs a retry, which the retry budget puts off."""
    asked = add(2.0, concurrency=64)
    played = stage.play([10] * 512)
    assert played.all_scored
    assert asked["good"] == 512
    assert asked["broken"] < 64
    assert played.finished_at == pytest.approx(512 / 64 * 2.0, rel=0.1)


def test_it_does_not_decide_while_the_other_one_is_down(stage, add):
    """Nor does its refusal say that the source is up, or the failures meanwhile would count against the samples."""
    asked = add(0.5, down=lambda now: now < 20.0, concurrency=8)
    played = stage.play([10] * 64)
    assert played.all_scored
    assert asked["broken"] < 64
