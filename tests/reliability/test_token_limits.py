"""Token limits as strict servers count them: a prompt when it arrives, a completion when it is written.

In virtual time, with answers that outlast the window in which they were asked for.
"""

from __future__ import annotations

import asyncio

import pytest

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.errors import Throttled
from qreward_plugins.samples.spent import Usage
from qreward_plugins.simulation import run
from qreward_plugins.simulation.strict_limits import SlidingWindow
from qreward_plugins.sources import Reply

WINDOW_S = 10.0
TOKENS = 100_000
COMPLETION = 1_500
LOTS = 10**9


class StrictSource:
    """Takes `seconds(request)` for an answer of `COMPLETION` tokens, and books what goes over `TOKENS` a window.

    Every `rejected`-th request is throttled, with its prompt charged all the same.
    """

    name, model, slots = "a", "judge", None

    def __init__(self, seconds, rejected=0):
        self._seconds = seconds
        self._rejected = rejected
        self._window = SlidingWindow(LOTS, WINDOW_S)
        self.requests = 0
        self.most = 0

    async def send(self, request, *, on_sent):
        on_sent()
        self.requests += 1
        prompt = request.size // 4
        self._charge(prompt)
        if self._rejected and self.requests % self._rejected == 0:
            raise Throttled("429", retry_after_s=0.0)
        await asyncio.sleep(self._seconds(request))
        self._charge(COMPLETION)
        return Reply(text=f'{{"id": "{request.nonce}", "score": 0.5}}', usage=Usage(prompt, COMPLETION))

    async def aclose(self):
        pass

    def _charge(self, tokens):
        now = asyncio.get_running_loop().time()
        self._window.take(tokens, now)
        self.most = max(self.most, LOTS - self._window.announced(now).remaining)


@pytest.fixture
def score(make_config):
    def score(source, lengths):
        limits = {"tokens_per_minute": TOKENS * 60 / WINDOW_S, "window_s": WINDOW_S, "concurrency": 1000}
        tree = make_config({"a": "http://localhost"}, limits={"a": limits}, judge={"max_tokens": COMPLETION + 100})

        async def main():
            async with RewardEngine(tree, sources={"a": source}) as engine:
                question = [{"role": "user", "content": "?"}]
                outcomes = await engine.score_all(Sample(question, "x" * length) for length in lengths)
                return outcomes, asyncio.get_running_loop().time()

        outcomes, finished_s = run(main())
        assert all(isinstance(outcome, Scored) for outcome in outcomes)
        return finished_s

    return score


def test_a_completion_is_counted_when_it_comes(score):
    # The long ones are sent first and answered last, when the short ones of the next window are.
    source = StrictSource(lambda request: 13.0 if len(request.sample.response) > 1000 else 1.0)
    finished_s = score(source, [3000] * 60 + [300] * 300)
    assert source.most <= TOKENS
    # About 750,000 tokens, so 75 s at least. The first answers take 13 s, and until they come a byte may be a token.
    assert finished_s < 100


def test_the_prompts_of_rejected_requests_are_counted(score):
    source = StrictSource(lambda request: 0.1, rejected=2)
    score(source, [30_000] * 60)
    assert source.most <= TOKENS
    assert source.requests > 100
