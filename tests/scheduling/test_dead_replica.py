"""A source with several servers, one of which dies under load: its calls go to the others, and the source stays up."""

from __future__ import annotations

import asyncio
import math
from collections import Counter

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import TransientError
from qreward_plugins.sources.base import Reply
from qreward_plugins.sources.replicas import Replicas, RoutingHints

ANSWER_S = 2.0


@pytest.fixture
def add(stage):
    """Add the source. `died` says when a server died, by its URL: its calls fail then, and all later ones at once,
    before the time `until`.
    """

    def add(died: dict[str, float], *, urls: tuple[str, ...] = ("dead", "good"), until: float = math.inf, **limits):
        source = stage.add("own", limits=limits)
        replicas = Replicas(urls, Routing(strategies=("least_requests",)), name="own")
        asked: Counter[str] = Counter()

        async def send(request, *, on_sent):
            on_sent()
            loop = asyncio.get_running_loop()
            with replicas.acquire(loop.time(), RoutingHints()) as lease:
                asked[lease.base_url] += 1
                now = loop.time()
                dies_at = died.get(lease.base_url, math.inf) if now < until else math.inf
                await asyncio.sleep(max(0.0, min(now + ANSWER_S, dies_at) - now))
                if dies_at < now + ANSWER_S:
                    error = TransientError("the server closed the connection without an answer")
                    lease.failed(loop.time(), error)
                    raise error
            return lease.read(loop.time(), lambda: Reply(text="1"))

        source.send = send
        return asked

    return add


def test_the_source_goes_on_when_one_of_its_servers_dies_under_load(stage, add, caplog):
    asked = add({"dead": 5.0}, concurrency=64)
    played = stage.play([10] * 512)
    assert played.all_scored
    assert not [line for line in caplog.messages if "source own is down" in line]
    assert played.finished_at == pytest.approx(512 / 64 * ANSWER_S, rel=0.2)
    assert asked["good"] + asked["dead"] < 512 + 64


@pytest.mark.parametrize("samples", [1, 8, 256])
def test_an_outage_of_all_servers_costs_no_sample(stage, add, caplog, samples):
    """Each failure of a server looks like that of one while the others have not failed yet."""
    urls = tuple(f"server-{number}" for number in range(8))
    asked = add(dict.fromkeys(urls, 1.0), urls=urls, until=40.0, concurrency=64)
    played = stage.play([10] * samples)
    assert played.all_scored
    assert any("source own is down" in line for line in caplog.messages)
    assert sum(asked.values()) < 2.5 * samples + 100
