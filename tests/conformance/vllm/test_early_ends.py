"""What the early end of a stream saves: the tokens that vLLM generates for a judge that goes on talking."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from dataclasses import replace
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.sources import Reply

pytestmark = pytest.mark.anyio
CALLS = 4
MAX_TOKENS = 1000
# The model is so small that the server writes hundreds of tokens until a busy client sees the verdict.
TRIES = 8
# The weights are random, so a grammar writes the verdict and the text after it.
VERDICT = r'\{"id": "%s", "rationale": "It is right\.", "score": [0-9]\}[a-z]{2000}'


def generated(url: str) -> int:
    """Return how many tokens the server has generated since its start."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        found = re.findall(r"^vllm:generation_tokens_total\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(int(float(count)) for count in found)


def running(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        [count] = re.findall(r"^vllm:num_requests_running\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return float(count)


async def judged(url: str, dialect: str, *, stream: bool) -> tuple[list[Reply], list[float | None], int, float]:
    """Judge a few samples at once. Return replies, scores, the tokens that the server generated, and seconds."""
    node = {"kind": "openai", "base_url": f"{url}/v1", "model": "chat", "dialect": dialect, "stream": stream}
    judge = {"kind": "llm", "max_tokens": MAX_TOKENS, "instructions": "Is the response right?"}
    config: dict[str, Any] = {
        "sources": {"judge": {**node, "timeouts": {"total_s": 300}}},
        "judges": {"quality": judge},
        "engine": {"seed": 1},
    }
    samples = [Sample([{"role": "user", "content": f"{n} + 25?"}], f"It is {n + 25}.") for n in range(CALLS)]
    async with RewardEngine(config) as engine:
        leaf, source = engine.judges["quality"], engine.upstreams["judge"].source
        requests = []
        for sample in samples:
            request = leaf.request(sample, attempt=0)
            grammar = {"structured_outputs": {"regex": VERDICT % request.nonce}}
            requests.append(replace(request, parameters={"max_tokens": MAX_TOKENS, **grammar}))
        before, began = generated(url), time.monotonic()
        replies = await asyncio.gather(*(source.send(request, on_sent=lambda: None) for request in requests))
        seconds = time.monotonic() - began
        for _ in range(100):
            if not running(url):
                break
            await asyncio.sleep(0.1)
        scores = []
        for request, reply in zip(requests, replies, strict=True):
            # A reply that was cut off by its bound is no verdict; the early end saves this one, too.
            whole = replace(reply, finish_reason="stop")
            scores.append(leaf.verdict(request, whole).score)
        return replies, scores, generated(url) - before, seconds


@pytest.mark.parametrize("dialect", ["openai", "responses"])
async def test_the_server_stops_when_the_verdict_is_complete(served, dialect):
    url = served("chat")
    _, _, whole, whole_s = await judged(url, dialect, stream=False)
    assert whole == CALLS * MAX_TOKENS
    for _ in range(TRIES):
        replies, scores, cut, cut_s = await judged(url, dialect, stream=True)
        print(f"\n{dialect}: {whole} tokens in {whole_s:.1f} s, with streams {cut} tokens in {cut_s:.1f} s")
        assert all(reply.text.endswith("}") for reply in replies)
        assert all(score is not None and 0 <= score <= 1 for score in scores)
        # A client that waits for a core sees the verdict together with the end.
        if cut < 0.5 * whole:
            assert any(reply.ended_early for reply in replies)
            return
    raise AssertionError("no stream ended before half of the text was generated")
