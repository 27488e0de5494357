"""Embeddings over HTTP: a judge that compares with the ground truth, vectors for callers, and clients' own requests."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from qreward_plugins import ConfigurationError, RewardEngine, Sample, TextFailed
from qreward_plugins.planning import Lengths, plan
from qreward_plugins.server.server import RewardServer

from ..kit import each_of

pytestmark = pytest.mark.anyio
QUESTION = [{"role": "user", "content": "How much?"}]


def vector(text):
    """Counts the letters of a text."""
    counts = Counter(text)
    return [float(counts[letter]) for letter in "abcdefgh"]


class Embedder:
    """A server of embeddings. `items` makes the items of a reply out of its texts, `statuses` are those of the first
    replies.
    """

    def __init__(self, items=None, statuses=()):
        self.items = items or (
            lambda texts: [{"index": n, "embedding": vector(text)} for n, text in enumerate(texts)][::-1]
        )
        self.statuses = list(statuses)
        self.bodies = []

    async def answer(self, request):
        body = await request.json()
        self.bodies.append(body)
        status = self.statuses.pop(0) if self.statuses else 200
        usage = {"prompt_tokens": 3, "total_tokens": 3}
        reply = {"object": "list", "data": self.items(body["input"]), "model": body["model"], "usage": usage}
        return web.Response(status=status, text=json.dumps(reply), content_type="application/json")

    @asynccontextmanager
    async def tree(self, **judge):
        app = web.Application()
        app.router.add_post("/v1/embeddings", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        source = {"kind": "embeddings", "base_url": f"http://127.0.0.1:{runner.addresses[0][1]}/v1", "model": "small"}
        try:
            yield {"sources": {"e": source}, "judges": {"near": {"kind": "similarity", **judge}}, "engine": {"seed": 1}}
        finally:
            await runner.cleanup()


def sample(response, truth="abc", **fields):
    return Sample(QUESTION, response, truth, **fields)


async def scored(embedder, *samples, **judge):
    async with embedder.tree(**judge) as tree, RewardEngine(tree) as engine:
        return await engine.score_all(samples)


async def test_the_reward_is_the_cosine_with_the_ground_truth():
    embedder = Embedder()
    same, near, far = await scored(embedder, sample("cab"), sample("abd"), sample("gh"), correct_at=0.5)
    assert [each.reward for each in (same, near, far)] == pytest.approx([1.0, 2 / 3, 0.0])
    assert near.verdict.components == {"cosine": near.reward}
    assert [each.verdict.correct for each in (same, near, far)] == [True, True, False]
    assert {"model": "small", "input": ["cab", "abc"]} in embedder.bodies
    # They are mapped and clipped, and of several ground truths the nearest counts.
    keys = {"score_range": [0.5, 0.75], "reward_range": [-1, 1]}
    samples = [*map(sample, ("abc", "abd", "g")), sample("abc", truth=["gh", "cab"])]
    rewards = [each.reward for each in await scored(embedder, *samples, **keys)]
    assert rewards == pytest.approx([1.0, 2 * (2 / 3 - 0.5) / 0.25 - 1, -1.0, 1.0])


async def test_it_sees_the_answer_and_not_the_thoughts_or_control_tokens_and_asks_nothing_without_a_text():
    embedder = Embedder()
    samples = sample(" "), sample("<think>abc"), sample("abc", truth=None), sample("abc", truth=[])
    shown = sample("<think>ggg</think>abc <|im_end|>")
    *empty, untrue, none, _ = await scored(embedder, *samples, shown)
    assert [each.reward for each in empty] == [0.0, 0.0]
    assert (untrue.label, "no ground truth" in untrue.detail, none.label) == ("infra/input", True, "infra/input")
    (body,) = embedder.bodies
    assert body["input"][1] == "abc"
    assert body["input"][0].startswith("abc ")
    assert "<|im_end|>" not in body["input"][0]


@each_of("numbers", [[0.0, 0.0], [], [True, False], "AAAA", [float("nan"), 1.0], [1e300, 1.0], None])
async def test_what_is_no_vector_is_no_reward(numbers):
    for items in (lambda texts: [{"embedding": numbers}] * len(texts), lambda texts: [{"embedding": [1.0]}]):
        (outcome,) = await scored(Embedder(items), sample("abc"))
        assert outcome.reward is None


async def test_a_fault_costs_another_try_and_a_journal_answers_another_mapping(tmp_path):
    embedder = Embedder(statuses=[500])
    async with embedder.tree() as tree:
        tree["engine"]["journal"] = {"path": str(tmp_path / "journal.sqlite")}
        async with RewardEngine(tree) as engine:
            (first,) = await engine.score_all([sample("abd")])
        tree["judges"]["near"]["score_range"] = [0.0, 0.8]
        async with RewardEngine(tree) as engine:
            (second,) = await engine.score_all([sample("abd")])
    assert (first.reward, second.reward) == pytest.approx((2 / 3, 2 / 3 / 0.8))
    assert (first.verdict.attempts, second.verdict.cached, len(embedder.bodies)) == (2, True, 2)


async def test_it_is_asked_by_its_own_kind_of_judge_only():
    async with Embedder().tree() as tree:
        planned = await asyncio.to_thread(plan, tree, samples=16, seeds=1, lengths=Lengths(rollouts=(sample("abc"),)))
        assert planned.sources[0].requests == 16
    source, similar = tree["sources"]["e"], {"kind": "similarity"}
    chat = {"kind": "openai", "base_url": "http://h.invalid/v1", "model": "m"}
    for given, judge, says in (
        (chat, similar, "embeddings"),
        (source, {"kind": "llm"}, "no source of kind openai"),
        (source, {**similar, "score_range": [1, 0]}, "judges.near.score_range"),
        ({**source, "parameters": {"input": "x"}}, similar, "parameters.input"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            RewardEngine({"sources": {"e": given}, "judges": {"near": judge}})


async def test_a_client_s_own_request_goes_through_the_proxy():
    embedder = Embedder()
    async with (
        embedder.tree() as tree,
        RewardEngine(tree) as engine,
        RewardServer(engine, port=0) as server,
        aiohttp.ClientSession() as client,
    ):
        body = {"model": "small", "input": ["abc"], "encoding_format": "float"}
        async with client.post(f"{server.url}/v1/embeddings", json=body) as reply:
            got = await reply.json()
            assert (reply.status, got["data"][0]["embedding"][:2]) == (200, [1.0, 1.0]), got
    assert [each["input"] for each in embedder.bodies] == [["abc"]]


async def test_vectors_for_callers_are_in_order_and_equal_texts_are_sent_once():
    embedder = Embedder()
    async with embedder.tree() as tree, RewardEngine(tree) as engine:
        texts = [letter * count for letter in "abcde" for count in range(1, 21)]
        found = await engine.embed_all("e", [*texts, "ab", "", "ab", None])
        assert await engine.embed("e", "gh") == vector("gh")
        assert await engine.embed_all("e", []) == []
        with pytest.raises(TextFailed, match="empty"):
            await engine.embed("e", "")
    assert found[:101] == [vector(text) for text in [*texts, "ab"]]
    assert found[102] == found[100]
    assert [found[place].reason for place in (101, 103)] == ["input", "input"]
    assert sorted(len(body["input"]) for body in embedder.bodies) == [1, 5, 32, 32, 32]
