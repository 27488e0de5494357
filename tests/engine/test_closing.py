"""Closing an engine: whoever fails, hangs or is cancelled on the way, nothing is left open, and it ends."""

from __future__ import annotations

import asyncio
import logging

from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.simulation import SimulatedSource, run

SAMPLE = Sample([{"role": "user", "content": "?"}], "an answer")


class Closes(SimulatedSource):
    """Closes in one of several ways: "well", "slowly", "fails", "hangs", "swallows" (hangs, whoever cancels it)."""

    way = "well"
    calls = 0

    async def aclose(self):
        self.calls += 1
        if self.way == "slowly":
            await asyncio.sleep(1)
        if self.way == "fails":
            raise RuntimeError("no")
        if self.way in ("hangs", "swallows"):
            await stays(swallows=self.way == "swallows")
        await super().aclose()


async def stays(*, swallows):
    while True:
        try:
            await asyncio.sleep(1e4)
        except asyncio.CancelledError:
            if not swallows:
                raise


class Stays(Closes):
    """Is asked, never answers, and swallows every cancellation."""

    async def send(self, request, *, on_sent):
        on_sent()
        await stays(swallows=True)


def engine_of(sources, **engine):
    node = {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m"}
    tree = {"sources": dict.fromkeys(sources, node), "judges": {"q": {"kind": "llm"}}, "engine": {"seed": 1, **engine}}
    return RewardEngine(tree, sources=sources)


def others():
    return asyncio.all_tasks() - {asyncio.current_task()}


WAYS = st.sampled_from(["well", "slowly", "fails", "hangs", "swallows"])


@settings(max_examples=60, deadline=None)
@given(
    ways=st.lists(WAYS, min_size=1, max_size=4),
    stays=st.booleans(),
    samples=st.integers(0, 6),
    after_s=st.floats(0, 3),
    cancels=st.lists(st.floats(0, 30), max_size=3),
)
def test_whatever_fails_or_is_cancelled_closing_ends_and_leaves_nothing(ways, stays, samples, after_s, cancels):
    logging.getLogger("qreward_plugins").setLevel(logging.CRITICAL)
    sources = {f"s{n}": (Stays if stays and n == 0 else Closes)(f"s{n}") for n in range(len(ways))}
    for source, way in zip(sources.values(), ways, strict=True):
        source.way = way

    async def main():
        loop = asyncio.get_running_loop()
        engine = engine_of(sources)
        scoring = [asyncio.ensure_future(engine.score(SAMPLE, deadline_s=600)) for _ in range(samples)]
        await asyncio.sleep(after_s)
        for cancel_after_s in cancels:
            closing = asyncio.ensure_future(engine.aclose())
            loop.call_later(cancel_after_s, closing.cancel)
            await asyncio.gather(closing, return_exceptions=True)
        began_at = loop.time()
        await engine.aclose()
        assert loop.time() - began_at < 60
        await asyncio.gather(*scoring)
        assert others() == set()
        return engine

    engine = run(main())
    logging.getLogger("qreward_plugins").setLevel(logging.NOTSET)
    for upstream in engine.upstreams.values():
        assert upstream.quota.in_flight == 0
        assert not upstream.live
    for source in sources.values():
        assert source.closed or source.way not in ("well", "slowly")
