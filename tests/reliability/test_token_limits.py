"""Token limits as strict servers count them: a prompt when it arrives, a completion when it is written.

In virtual time, with answers that outlast the window in which they were asked for.
"""

from __future__ import annotations

import asyncio

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.simulation.strict_limits import SlidingWindow
from qreward_plugins.sources import Reply

WINDOW_S = 10.0
TOKENS = 100_000
COMPLETION = 1_500
LOTS = 10**9


class StrictSource:
    """Answers with `COMPLETION` tokens, slowly to long samples, and books the most tokens of any window."""

    name, model, slots = "a", "judge", None

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

    async def aclose(self):
        pass

    def _charge(self, tokens):
        now = asyncio.get_running_loop().time()
        self._window.take(tokens, now)
        self.most = max(self.most, LOTS - self._window.announced(now).remaining)


def test_a_completion_is_counted_when_it_comes(make_config):
    limits = {"tokens_per_minute": TOKENS * 60 / WINDOW_S, "window_s": WINDOW_S, "concurrency": 1000}
    tree = make_config({"a": "http://localhost"}, limits={"a": limits}, judge={"max_tokens": COMPLETION + 100})
    source = StrictSource()

    async def main():
        async with RewardEngine(tree, sources={"a": source}) as engine:
            # The long ones are sent first and answered last, when the short ones of the next window are.
            samples = (Sample([{"role": "user", "content": "?"}], "x" * n) for n in [3000] * 60 + [300] * 300)
            return await engine.score_all(samples), asyncio.get_running_loop().time()

    outcomes, finished_s = run(main())
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert source.most <= TOKENS
    # About 750,000 tokens, so 75 s at least. The first answers take 13 s, and until they come a byte may be a token.
    assert finished_s < 100
