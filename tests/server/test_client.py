"""The clients: the outcomes of the engine in the server, and nothing else."""

from __future__ import annotations

import asyncio
import json
import math
import threading

import PIL.Image
import pytest

from qreward_plugins import Failed, InputError, RewardServerError, Sample, Scored
from qreward_plugins.client import SAMPLES_A_REQUEST, BlockingRewardClient, RewardClient
from qreward_plugins.client.facts import ServerFacts
from qreward_plugins.samples.images import Image

pytestmark = pytest.mark.anyio


def sample(word: object, **fields) -> Sample:
    return Sample([{"role": "user", "content": "How much?"}], f"So much: {word}", **fields)


async def test_outcomes_are_those_of_the_engine(serve):
    samples = [sample(0.5, id="a"), sample("babble"), sample(1)]
    async with serve() as served, RewardClient(served.url) as client:
        over = await client.score_all(samples)
        here = await served.engine.score_all(samples)
    assert [type(outcome) for outcome in over] == [Scored, Failed, Scored]
    for outcome, expected in zip(over, here, strict=True):
        assert outcome.reward == expected.reward
        assert (outcome.failure and outcome.failure.label) == (expected.failure and expected.failure.label)
    first = over[0].verdict
    assert (first.judge, first.source, dict(first.components), first.attempts) == (
        "quality",
        "obedient",
        {"clarity": 0.25},
        1,
    )


async def test_every_field_of_a_sample_arrives(serve):
    given = sample(
        1, ground_truth=[1], data_source="d", group_id="g", step=2, split="train", extras={"a": 1, "id": 2}, id="x"
    )
    async with serve() as served, RewardClient(served.url) as client:
        await client.score(given)
        await client.score(sample(1, extras={"a": 1}, id="y"))
    assert served.source.samples == [given, sample(1, extras={"a": 1}, id="y")]


async def test_images_arrive(serve):
    picture = PIL.Image.new("RGB", (3, 2), "red")
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    given = Sample([{"role": "user", "content": parts}], "So much: 1", response_images=[Image.of(picture)])
    async with serve() as served, RewardClient(served.url) as client:
        assert (await client.score(given)).reward == 1.0
    (got,) = served.source.samples
    seen = [Image.of(got.messages[0]["content"][0]).header, got.response_images[0].header]
    assert [(header.width, header.height) for header in seen] == [(3, 2), (3, 2)]


async def test_many_samples_go_in_several_requests_and_keep_their_order(serve):
    words = [number / 4096 for number in range(2 * SAMPLES_A_REQUEST + 1)]
    async with serve() as served, RewardClient(served.url) as client:
        outcomes = await client.score_all(map(sample, words))
    assert [outcome.reward for outcome in outcomes] == words


async def test_cancelling_ends_the_attempts_at_the_server(serve):
    async with serve() as served, RewardClient(served.url) as client:
        asked = asyncio.ensure_future(client.score(sample("hold")))
        await served.source.holding.wait()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while not served.source.cancelled:  # noqa: ASYNC110 -- the event is on the other side of a socket
            await asyncio.sleep(0)


async def test_a_refusal_is_an_error_that_says_why(serve):
    async with serve(token="right") as served:
        async with RewardClient(served.url, token="wrong") as client:
            with pytest.raises(RewardServerError, match="answered 401: send the server's token") as error:
                await client.score(sample(1))
            assert error.value.status == 401
            assert "wrong" not in str(error.value)
        async with RewardClient(served.url, token="right") as client:
            assert (await client.score(sample(1))).reward == 1.0


async def test_a_server_that_is_away_is_asked_again(serve):
    async with RewardClient("http://127.0.0.1:9", retry_for_s=0) as client:
        with pytest.raises(RewardServerError, match="cannot be reached"):
            await client.score(sample(1))


class Answers:
    """A server on a socket. Its n-th connection is handled by the n-th function, and all later ones by the last."""

    def __init__(self, *handlers) -> None:
        self.handlers, self.bodies, self.tasks = handlers, [], []

    async def __aenter__(self) -> Answers:
        self._server = await asyncio.start_server(self._begin, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _begin(self, reader, writer) -> None:
        self.tasks.append(asyncio.ensure_future(self._serve(reader, writer)))

    async def _serve(self, reader, writer) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            if head.startswith(b"get /facts"):
                writer.write(await answer(FACTS)())
                return
            length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            self.bodies.append(json.loads(await reader.readexactly(length)))
            handler = self.handlers[min(len(self.bodies), len(self.handlers)) - 1]
            writer.write(await handler())
            await writer.drain()
        finally:
            writer.close()
            await writer.wait_closed()


FACTS = json.dumps(ServerFacts("f", (), False, 0.3, 64, 2**20).as_row()).encode()


def answer(body, status=200, *headers):
    """A handler that answers."""

    async def handler():
        lines = [f"HTTP/1.1 {status} X", f"Content-Length: {len(body)}", "Connection: close", *headers, "", ""]
        return "\r\n".join(lines).encode() + body

    return handler


async def whole_reply(serve):
    async with serve() as served:
        _, reply, _ = await served.post("/score", {"samples": [{"prompt": "?", "response": "So much: 0.5"}]})
    return json.dumps(reply).encode()


async def test_a_reply_that_was_cut_off_is_asked_for_again(serve):
    body = await whole_reply(serve)
    whole = answer(body)

    async def cut():
        return (await whole())[:-20]

    async with Answers(cut, whole) as server, RewardClient(server.url) as client:
        assert (await client.score(sample(1))).reward == 0.5
    assert server.bodies[0] == server.bodies[1]


async def test_the_time_in_which_the_server_works_leaves_the_time_for_trying_again(serve):
    async def lost():
        await asyncio.sleep(0.9)
        return b""

    body = await whole_reply(serve)
    async with Answers(lost, answer(body)) as server, RewardClient(server.url, retry_for_s=0.8) as client:
        assert (await client.score(sample(1))).reward == 0.5


async def test_the_deadline_holds_over_all_tries():
    busy = answer(b"{}", 429)
    async with Answers(busy) as server, RewardClient(server.url) as client:
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(RewardServerError, match="answered 429"):
            await client.score(sample(1), deadline_s=1.2)
        assert asyncio.get_running_loop().time() - began_at < 5
    given = [body["deadline_s"] for body in server.bodies]
    assert len(given) == 2
    assert given[1] < 0.8 < given[0] <= 1.2


async def test_a_server_that_hangs_is_left_after_the_deadline(monkeypatch):
    monkeypatch.setattr("qreward_plugins.client.client.REPLY_WITHIN_S", 0.1)

    async def hang():
        await asyncio.sleep(30)
        return b""

    async with Answers(hang) as server, RewardClient(server.url) as client:
        with pytest.raises(RewardServerError, match="TimeoutError"):
            await client.score(sample(1), deadline_s=0.2)


async def test_a_server_that_vanishes_is_left_after_its_own_deadline(monkeypatch):
    """Without a deadline of the caller, that of the server's configuration (here 0.3 s) bounds the wait."""
    monkeypatch.setattr("qreward_plugins.client.client.REPLY_WITHIN_S", 0.1)

    async def hang():
        await asyncio.sleep(30)
        return b""

    async with Answers(hang) as server, RewardClient(server.url) as client:
        began_at = asyncio.get_running_loop().time()
        with pytest.raises(RewardServerError, match="TimeoutError"):
            await client.score(sample(1))
        assert asyncio.get_running_loop().time() - began_at < 3


async def test_samples_of_a_server_that_stops_go_to_the_next_one(serve):
    whole = json.loads(await whole_reply(serve))["results"][0]
    closed = {**whole, "reward": None, "outcome": "failed", "cause": "infra", "reason": "closed"}
    first = answer(json.dumps({"results": [whole, closed]}).encode(), 207)
    second = answer(json.dumps({"results": [{**whole, "reward": 0.75}]}).encode())
    async with Answers(first, second) as server, RewardClient(server.url) as client:
        outcomes = await client.score_all([sample(1), sample(2)])
    assert [outcome.reward for outcome in outcomes] == [0.5, 0.75]
    assert [len(body["samples"]) for body in server.bodies] == [2, 1]


@pytest.mark.parametrize("deadline_s", [0, -1.0, math.nan, math.inf])
async def test_a_wrong_deadline(deadline_s):
    async with RewardClient("http://127.0.0.1:9") as client:
        with pytest.raises(InputError, match="deadline_s must be"):
            await client.score(sample(1), deadline_s=deadline_s)


async def test_an_absurd_retry_after_counts_as_none():
    busy = answer(b"{}", 429, "Retry-After: \u00b2")
    async with Answers(busy) as server, RewardClient(server.url, retry_for_s=0) as client:
        with pytest.raises(RewardServerError, match="answered 429"):
            await client.score(sample(1))


async def test_a_sample_that_json_cannot_express(serve):
    async with serve() as served, RewardClient(served.url) as client:
        with pytest.raises(InputError, match="sample 1: ground_truth: it is a set"):
            await client.score_all([sample(1), sample(1, ground_truth={1, 2})])
    assert served.source.samples == []


async def test_the_blocking_client_in_threads(serve):
    rewards = {}

    def ask(url: str, number: int) -> None:
        with BlockingRewardClient(url) as client:
            rewards[number] = [outcome.reward for outcome in client.score_all([sample(number), sample(1)])]

    async with serve() as served:
        threads = [threading.Thread(target=ask, args=(served.url, number)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    assert rewards == {number: [float(number), 1.0] for number in range(4)}


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "htp://h", "", "http://u:p@h", "http://h?k=1", 3, None])
def test_a_wrong_url_is_an_error_at_once(url):
    for client in (RewardClient, BlockingRewardClient):
        with pytest.raises(InputError, match="the URL of the reward server: "):
            client(url)


def test_the_blocking_client_must_be_opened():
    with pytest.raises(RewardServerError, match="open the client first"):
        BlockingRewardClient("http://127.0.0.1:9").score(sample(1))
