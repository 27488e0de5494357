"""Embeddings over HTTP: a judge that compares with the ground truth, vectors for callers, and clients' own requests."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from aiohttp import web

from qreward_plugins import ConfigurationError, EngineError, RewardEngine, Sample, TextFailed
from qreward_plugins.journal.stories import Stories, Wanted
from qreward_plugins.planning import Lengths, plan
from qreward_plugins.server.server import RewardServer

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
    assert (same.reward, far.reward) == (pytest.approx(1.0), 0.0)
    one, other = np.array(vector("abd")), np.array(vector("abc"))
    assert near.reward == pytest.approx(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert near.verdict.components == {"cosine": near.reward}
    assert [each.verdict.correct for each in (same, near, far)] == [True, True, False]
    assert same.verdict.usage.prompt_tokens == 3
    assert {"model": "small", "input": ["cab", "abc"]} in embedder.bodies


async def test_cosines_are_mapped_and_clipped():
    rewards = await scored(
        Embedder(), *map(sample, ("abc", "abd", "g")), score_range=[0.5, 0.75], reward_range=[-1, 1], prefix=""
    )
    cosine = 2 / 3
    assert [each.reward for each in rewards] == pytest.approx([1.0, 2 * (cosine - 0.5) / 0.25 - 1, -1.0])


async def test_it_sees_the_answer_and_not_the_thoughts_or_control_tokens():
    embedder = Embedder()
    await scored(embedder, sample("<think>ggg</think>abc <|im_end|>"), prefix="query: ")
    (body,) = embedder.bodies
    assert body["input"][1] == "query: abc"
    assert body["input"][0].startswith("query: abc ")
    assert "<|im_end|>" not in body["input"][0]


async def test_without_a_text_nothing_is_asked():
    embedder = Embedder()
    empty, thought, untrue = await scored(embedder, sample(" "), sample("<think>abc"), sample("abc", truth=None))
    assert (empty.reward, thought.reward, embedder.bodies) == (0.0, 0.0, [])
    assert (untrue.label, "no ground truth" in untrue.detail) == ("infra/input", True)


@pytest.mark.parametrize(
    "item",
    [
        lambda n: {"embedding": [1.0] * (n + 1)},
        lambda n: {"embedding": [0.0, 0.0]},
        lambda n: {"embedding": []},
        lambda n: {"embedding": [True, False]},
        lambda n: {"embedding": [float("nan"), 1.0]},
        lambda n: {"embedding": [1e300, 1.0]},
        lambda n: {"embedding": "AAAA"},
        lambda n: {"index": [n], "embedding": None},
        lambda n: {},
    ],
)
async def test_what_is_no_vector_is_no_reward(item):
    (outcome,) = await scored(Embedder(lambda texts: [item(n) for n in range(len(texts))]), sample("abc"))
    assert outcome.reward is None
    (outcome,) = await scored(Embedder(lambda texts: [{"embedding": [1.0]}]), sample("abc"))
    assert outcome.reward is None


async def test_a_fault_costs_another_try_and_a_journal_answers_another_mapping(tmp_path):
    embedder = Embedder(statuses=[500])
    async with embedder.tree() as tree:
        tree["engine"]["journal"] = {"path": str(tmp_path / "journal.sqlite"), "keep": "all"}
        async with RewardEngine(tree) as engine:
            (first,) = await engine.score_all([sample("abd", id="s")])
        tree["judges"]["near"]["score_range"] = [0.0, 0.8]
        async with RewardEngine(tree) as engine:
            (second,) = await engine.score_all([sample("abd", id="s")])
    assert (first.reward, second.reward) == pytest.approx((2 / 3, 2 / 3 / 0.8))
    with Stories([str(tmp_path / "journal.sqlite")]) as stories:
        story = next(iter(stories.find(Wanted("s"), 1)[0]))
    assert ("2 embeddings of 8 numbers" in str(story), "[[" in str(story)) == (True, False)
    assert (first.verdict.attempts, second.verdict.cached, len(embedder.bodies)) == (2, True, 2)


async def test_it_is_asked_by_its_own_kind_of_judge_only():
    async with Embedder().tree() as tree:
        lengths = Lengths(rollouts=(sample("abc"),))
        planned = await asyncio.to_thread(plan, tree, samples=16, seeds=1, lengths=lengths)
        assert planned.sources[0].requests == 16
        chat = {"kind": "openai", "base_url": "http://h.invalid/v1", "model": "m"}
        for sources, judge, says in (
            ({"c": chat}, {"kind": "similarity"}, "embeddings"),
            (tree["sources"], {"kind": "llm"}, "no source of kind openai"),
            (tree["sources"], {"kind": "similarity", "score_range": [1, 0]}, "judges.near.score_range"),
            (tree["sources"], {"kind": "similarity", "score_range": [0, 10]}, "a cosine is from -1 to 1"),
            ({"e": {**tree["sources"]["e"], "parameters": {"input": "x"}}}, {"kind": "similarity"}, "parameters.input"),
            (
                {"e": {**tree["sources"]["e"], "parameters": {"stream": True}}},
                {"kind": "similarity"},
                r"Leave it out\.$",
            ),
        ):
            with pytest.raises(ConfigurationError, match=says):
                RewardEngine({"sources": sources, "judges": {"near": judge}})


async def test_vectors_for_callers_are_in_order_and_equal_texts_are_sent_once():
    embedder = Embedder()
    async with embedder.tree() as tree, RewardEngine(tree) as engine:
        texts = [letter * count for letter in "abcde" for count in range(1, 21)]
        found = await engine.embed_all("e", [*texts, "ab", "", "ab", None])
        assert await engine.embed("e", "gh") == vector("gh")
        assert await engine.embed_all("e", []) == []
        with pytest.raises(TextFailed, match="empty"):
            await engine.embed("e", "")
        with pytest.raises(EngineError, match="unknown source 'f'"):
            await engine.embed("f", "a")
    assert found[:101] == [vector(text) for text in [*texts, "ab"]]
    assert found[102] == found[100]
    assert [found[place].reason for place in (101, 103)] == ["input", "input"]
    assert sorted(len(body["input"]) for body in embedder.bodies) == [1, 5, 32, 32, 32]


async def test_a_text_that_is_refused_is_the_failure_of_no_other():
    embedder = Embedder(lambda texts: [{"embedding": [1.0]}] * (len(texts) + ("bad" in texts)))
    async with embedder.tree() as tree, RewardEngine(tree) as engine:
        found = await engine.embed_all("e", [*map(str, range(20)), "bad", *map(str, range(20, 40))])
        with pytest.raises(TypeError, match="several texts"):
            await engine.embed_all("e", "bad")
    assert isinstance(found.pop(20), TextFailed)
    assert found == [[1.0]] * 40


async def test_of_several_ground_truths_the_nearest_counts():
    several, none = await scored(Embedder(), sample("abc", truth=["gh", "cab"]), sample("abc", truth=[]))
    assert (several.reward, none.label) == (pytest.approx(1.0), "infra/input")


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
        async with client.post(f"{server.url}/v1/embeddings", json={**body, "stream": True}) as reply:
            assert (reply.status, "leave out `stream`" in await reply.text()) == (400, True)
        async with client.post(f"{server.url}/v1/chat/completions", json={**body, "messages": QUESTION}) as reply:
            assert reply.status == 404
    assert [each["input"] for each in embedder.bodies] == [["abc"]]


def test_a_cosine_is_never_beyond_one():
    async def main():
        items = [{"embedding": [0.1, 0.7, 1e-12]}, {"embedding": [0.1 * 3, 0.7 * 3, 3e-12]}]
        return (await scored(Embedder(lambda texts: items), sample("abc")))[0].reward

    assert asyncio.run(main()) <= 1.0
    assert math.isfinite(asyncio.run(main()))
