"""What the journal tells of requests and replies is, byte for byte, what the judge server got and said."""

from __future__ import annotations

import asyncio
import json
import random
import sqlite3
import threading
import zlib
from collections import Counter, defaultdict
from contextlib import closing

import pytest

from qreward_plugins import Cause, Failed, RewardEngine, Sample
from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.journal import Journal
from qreward_plugins.journal.stories import Stories
from qreward_plugins.samples.images import EncodedImage, Image
from qreward_plugins.testing import Faults, JudgeServer
from qreward_plugins.testing.judge_handler import JudgeHandler

TEXTS = [
    "four",
    'say "4"\n\\n',
    "\u202eevil\x1b[2J</script>",
    "数 🎲",
    "\ud800 alone",
    "\0response\0",
    "x" * 70,
    "<<<end",
]
PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)


@pytest.fixture
def log(monkeypatch):
    """(body of the request, status, body of the reply or None for a stream) of all that judge servers got and said."""
    found = []
    answer = JudgeHandler.__call__

    async def logged(self, request):
        body = await request.read()
        response = await answer(self, request)
        found.append((body.decode(), response.status, getattr(response, "body", None)))
        return response

    monkeypatch.setattr(JudgeHandler, "__call__", logged)
    return found


def stories_of(path):
    with Stories([str(path)]) as stories:
        return list(stories.every("1"))


def sources_of(url):
    def chat(dialect, end="/v1", **more):
        limits = {"concurrency": 8}
        return {
            "kind": "openai",
            "base_url": url + end,
            "model": "judge",
            "dialect": dialect,
            "limits": limits,
            "api_key": "sk-0123456789",
        } | more

    return {
        "chat": chat("openai", parameters={"top_p": 0.5}),
        "streamed": chat("openai", stream=True),
        "reasoning": chat("openai_reasoning"),
        "responses": chat("responses"),
        "anthropic": chat("anthropic"),
        "gemini": chat("gemini", "/v1beta"),
        "rewards": {"kind": "reward_model", "base_url": url, "model": "judge", "protocol": "vllm_score"}
        | {"batch": {"max_size": 8, "max_wait_s": 0.005}},
        "service": {"kind": "http", "url": f"{url}/score"},
    }


def test_of_200_samples_over_all_dialects_batches_and_sums(tmp_path, log):
    rng = random.Random(34)
    path = tmp_path / "journal.sqlite"
    scripted = {number: rng.choice(["error_500", "wrong_nonce"]) for number in range(0, 400, 9)}
    server = JudgeServer(protocols=["openai", "responses", "anthropic", "gemini"], faults=Faults(script=scripted.get))
    with server:
        url = server.base_url.removesuffix("/v1")
        sources = sources_of(url)
        kinds = {"rewards": "reward_model", "service": "function"}
        judges = {name: {"kind": kinds.get(name, "llm"), "sources": [name]} for name in sources}
        weights = dict.fromkeys(("anthropic", "rewards", "chat"), 1.0)
        judges["total"] = {"kind": "sum", "weights": weights}
        routes = {name: name for name in judges} | {"*": "total"}
        engine = {"seed": 1, "journal": {"path": str(path), "keep": "all"}}
        samples = [
            Sample(
                [{"role": "user", "content": rng.choice(TEXTS)}], f"{number} {rng.choice(TEXTS)}", "4", id=str(number)
            )
            for number in range(200)
        ]
        for sample in samples:
            object.__setattr__(sample, "data_source", rng.choice(list(routes)))

        async def main():
            async with RewardEngine(
                {"sources": sources, "judges": judges, "routes": routes, "engine": engine}
            ) as engine_:
                return await engine_.score_all(samples)

        assert len(asyncio.run(main())) == 200
    said = defaultdict(list)
    for body, status, reply in log:
        said[body].append((status, None if reply is None else bytes(reply).decode()))
    told, results = Counter(), Counter()
    for story in stories_of(path):
        for entry, attempts in zip(story.entries, story.attempts, strict=True):
            for attempt in attempts:
                if attempt["sent_s"] is None:
                    continue  # a hedge that was cancelled before it was written
                name, body = attempt["source"], attempt["request"]
                told[body] += 1
                assert body in said, (name, body)
                results[name, attempt["result"]] += 1
                if "said" in attempt:
                    assert attempt["said"] in [reply for _, reply in said[body]]
                elif name not in ("rewards", "service", "streamed"):
                    content = json.dumps(attempt["reply"], ensure_ascii=False)[1:-1]
                    assert any(content in reply for _, reply in said[body]), entry.judge
    probes = [text for pair in PAIRS for text in (pair.good, pair.bad)]
    untold = [body for body in said if body not in told and not any(text in body for text in probes)]
    assert untold == [], "nothing that the server got is left out but the start probe of the reward model"
    assert max(told.values()) > 2, "some requests carried several calls"
    assert {name for name, result in results if result == "valid" and results[name, result] > 5} == set(sources), (
        results
    )
    assert sum(count for (_, result), count in results.items() if result != "valid") > 20


def test_secrets_are_in_no_body_and_images_are_hashes(tmp_path, log):
    path = tmp_path / "journal.sqlite"
    with JudgeServer(lambda call: 1.0, faults=Faults(script={0: "error_500"}.get)) as server:
        source = sources_of(server.base_url.removesuffix("/v1"))["chat"] | {"vision": True}
        source["parameters"] = {"session_token": "tok-0123456789", "auth": {"password": "qwErty7"}}
        tree = {"sources": {"a": source}, "judges": {"quality": {"kind": "llm"}}}
        tree["engine"] = {"journal": {"path": str(path), "keep": "all"}}
        content = [{"type": "text", "text": "?"}, {"type": "image", "image": PNG}]

        async def main():
            async with RewardEngine(tree) as engine:
                await engine.score(Sample([{"role": "user", "content": content}], "it is sk-0123456789", id="s"))

        asyncio.run(main())
    assert "tok-0123456789" in log[0][0]
    with closing(sqlite3.connect(path)) as connection:
        texts = [zlib.decompress(body).decode() for (body,) in connection.execute("SELECT body FROM texts")]
    assert [text for text in texts if "tok-0123" in text or "qwErty7" in text] == []
    ((failed, valid),) = stories_of(path)[0].attempts
    image = EncodedImage(Image.of(PNG), name="i", max_side=2048, max_bytes=10**7)
    assert (failed["result"], bytes(log[0][2]).decode()) == ("failed", failed["said"])
    assert '"session_token":"**********"' in valid["request"]
    assert (image.identity in valid["request"], str(image) in valid["request"]) == (True, False)


def test_what_looks_at_a_run_costs_nothing_of_its_record(tmp_path):
    """A name of a run that is no text, as an environment may have it; and a look that fails."""
    journal = Journal(tmp_path / "j.sqlite", run_id="exp\udce9rience")

    class Looking(threading.Event):
        def look(self, held):
            self.set()
            raise RuntimeError("no")

    looks = Looking()
    journal.watch(looks.look)
    journal.tell({"a": {"problem": ""}})
    assert looks.wait(30)
    journal.note(None, Sample([{"role": "user", "content": "?"}], "42", id="s"), Failed(Cause.INFRA, "x"))
    asyncio.run(journal.aclose())
    with closing(sqlite3.connect(tmp_path / "j.sqlite")) as connection:
        assert connection.execute("SELECT run_id, sample_id FROM outcomes").fetchall() == [("exp?rience", "s")]
