"""`RewardClient`: the outcomes of the engine in the server, whatever happens on the way, and nothing else."""

from __future__ import annotations

import asyncio
import math
import time

import orjson
import PIL.Image
import pytest

from qreward_plugins import InputError, RewardServerError, Sample, Scored, Verdict
from qreward_plugins.client import RewardClient
from qreward_plugins.client.rows import ServerFacts, outcome_of_row
from qreward_plugins.samples.images import Image
from qreward_plugins.server.forms import result_of

from ..kit import each_of
from ..sources import wire
from .conftest import Peer, lines, replying

pytestmark = pytest.mark.anyio

ROW = result_of(Sample((), ""), Scored(Verdict(0.5)))
CLOSED = {**ROW, "reward": None, "outcome": "failed", "cause": "infra", "reason": "closed"}
FACTS = ServerFacts("f", (), False, 8).as_row()


def line(number=0, **changed):
    return {**ROW, "number": number, **changed}


async def test_every_field_of_a_sample_arrives(serve, sample):
    naming = {"group_id": "g", "step": 2, "split": "train", "id": "x"}
    turns = [{"role": "assistant", "content": "1", "end": 1}, {"role": "tool", "content": "", "end": 1}]
    given = [sample(1, turns=turns, ground_truth=[1], data_source="d", extras={"a": 1, "id": 2}, **naming), sample(0)]
    picture = PIL.Image.new("RGB", (3, 2), "red")
    parts = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    async with serve() as served, RewardClient(served.url) as client:
        await client.score_all(given)
        assert sorted(served.source.samples, key=lambda each: each.response, reverse=True) == given
        await client.score(Sample([{"role": "user", "content": parts}], "1", response_images=[Image.of(picture)]))
    got = served.source.samples[-1]
    seen = [Image.of(got.messages[0]["content"][0]).header, got.response_images[0].header]
    assert [(header.width, header.height) for header in seen] == [(3, 2), (3, 2)]


def test_what_a_reward_function_returned_and_steps_come_along():
    returned = {"score": 0.5, "note": "fine", "deep": [{"none": None}]}
    verdict = Verdict(0.5, returned=returned, steps=((2, 0.25), (5, 0.75)), dense=((2, 0.125), (5, 0.375)))
    row = orjson.loads(orjson.dumps(result_of(Sample((), ""), Scored(verdict))))
    arrived = outcome_of_row(row, latency_s=2.0).verdict
    assert (arrived.returned, arrived.latency_s) == (returned, 2.0)
    assert (arrived.steps, arrived.dense) == (verdict.steps, verdict.dense)


async def test_what_is_submitted_in_one_step_goes_in_one_request(serve, sample, monkeypatch):
    async with serve() as served, RewardClient(served.url) as client:

        async def requests():
            text = (await served.get("/metrics"))[1]
            counted = [each for each in text.splitlines() if each.startswith('qreward_http_requests_total{path="/sc')]
            return int(float(counted[0].split()[-1])) if counted else 0

        words = [number / 4096 for number in range(200)]
        alone = await asyncio.gather(
            *(client.score(sample(word)) for word in words), client.score(sample(1), priority=3)
        )
        assert [outcome.reward for outcome in alone] == [*words, 1.0]
        assert await requests() == 2  # one a priority
        monkeypatch.setattr("qreward_plugins.client.client.SAMPLES_A_REQUEST", 60)
        outcomes = await client.score_all(map(sample, words))
        assert [outcome.reward for outcome in outcomes] == words
        assert await requests() == 2 + 4
        monkeypatch.setattr("qreward_plugins.client.client.BYTES_A_REQUEST", 2_000)
        await client.score_all(map(sample, words[:40]))
        assert await requests() > 2 + 4 + 1


async def test_a_large_sample(serve, sample):
    async with serve(max_body_bytes=20_000) as served, RewardClient(served.url) as client:
        with pytest.raises(RewardServerError, match=r"413: the body is too large.*max_body_bytes") as error:
            await client.score(sample("y" * 30_000))
        assert error.value.reason == "input"
    async with serve() as served, RewardClient(served.url) as client:
        assert (await client.score(sample("y" * 2_000_000 + " 0.5"))).reward == 0.5


async def test_closing_fails_what_has_no_outcome(serve, sample):
    async with serve() as served:
        client = RewardClient(served.url)
        asked = [asyncio.ensure_future(client.score(sample("hold"))) for _ in range(2)]
        await served.source.holding.wait()
        asked.append(asyncio.ensure_future(client.score(sample(1))))
        await asyncio.sleep(0)
        await client.aclose()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        assert [str(error) for error in ended] == ["the client was closed"] * 3
        await served.source.cancelled.wait()


@pytest.mark.parametrize("turns", range(1, 8))
async def test_closing_fails_what_has_just_been_submitted(sample, turns):
    client = RewardClient("http://127.0.0.1:9")
    scoring = asyncio.ensure_future(client.score(sample(1)))
    for _ in range(turns):
        await asyncio.sleep(0)
    await client.aclose()
    with pytest.raises(RewardServerError, match="the client was closed"):
        await asyncio.wait_for(scoring, 10)


async def test_cancelling_ends_the_attempts_at_the_server(serve, sample):
    async with serve() as served, RewardClient(served.url) as client:
        asked = [asyncio.ensure_future(client.score(sample(word))) for word in ("hold", 1, "hold")]
        await served.source.holding.wait()
        asked[0].cancel()
        assert (await asked[1]).reward == 1.0
        assert not served.source.cancelled.is_set()  # the third of the request is wanted
        asked[2].cancel()
        await served.source.cancelled.wait()


async def test_a_sample_that_cannot_be_sent(serve, sample):
    async with serve() as served, RewardClient(served.url) as client:
        with pytest.raises(InputError, match="sample 1: ground_truth: it is of type set"):
            await client.score_all([sample(1), sample(1, ground_truth={1, 2})])
        with pytest.raises(TypeError, match="score_all takes several samples"):
            await client.score_all(sample(1))
        for deadline_s in (0, -1.0, math.nan, math.inf):
            with pytest.raises(InputError, match="deadline_s must be"):
                await client.score(sample(1), deadline_s=deadline_s)
        assert served.source.samples == []


# Servers that break


@each_of("first", [b"", lines(line(0), missing=9), lines(line(0)), lines(line(0), {**CLOSED, "number": 1})])
async def test_what_has_no_line_is_asked_for_again(sample, first):
    second = lines(line(0), line(1)) if not first else lines(line(0, reward=0.75))
    async with Peer(first, second) as peer, RewardClient(peer.url) as client:
        outcomes = await client.score_all([sample(1), sample(2)])
    assert [outcome.reward for outcome in outcomes] == [0.5, 0.75 if first else 0.5]
    assert [len(body["samples"]) for body in peer.bodies] == [2, 1 if first else 2]
    assert peer.bodies[0]["samples"][-1] == peer.bodies[1]["samples"][-1]


async def test_a_reply_that_breaks_off_after_the_last_line_is_whole(sample, caplog):
    async with Peer(lines(line(0), line(1), missing=9)) as peer, RewardClient(peer.url) as client:
        assert [outcome.reward for outcome in await client.score_all([sample(1), sample(2)])] == [0.5, 0.5]
        for request in list(client._requests):
            await request
        assert len(peer.bodies) == 1
    assert caplog.messages == []


@pytest.mark.parametrize("reply", [b"", lines({**CLOSED, "number": 0})], ids=["nothing", "it stops"])
async def test_a_server_whose_replies_always_break_off_is_given_up(sample, reply, caplog):
    """Each try costs the judge again."""
    async with Peer(reply or lines()) as peer, RewardClient(peer.url, retry_for_s=0.7) as client:
        with pytest.raises(RewardServerError, match="broke off its reply"):
            await client.score(sample(1))
        assert 2 <= len(peer.bodies) <= 5
    assert len(caplog.messages) == 1


async def test_a_busy_server_is_asked_until_the_deadline(sample):
    busy = replying({"error": {"detail": "full"}}, 429)
    async with Peer(busy) as peer, RewardClient(peer.url) as client:
        with pytest.raises(RewardServerError, match="answered 429: full") as error:
            await client.score(sample(1), deadline_s=1.0)
        assert error.value.reason == "unreachable"
        given = [body["deadline_s"] for body in peer.bodies]
        assert len(given) >= 2
        assert given == sorted(given, reverse=True)
        assert given[0] <= 0.95
    async with Peer(busy, busy, replying(b"", 503), lines(line())) as peer, RewardClient(peer.url) as client:
        assert (await client.score(sample(1), deadline_s=20)).reward == 0.5


@each_of("header", ["Retry-After: \u00b2", "Retry-After: " + "9" * 30, "Retry-After: 0"])
async def test_an_absurd_retry_after_ends_within_the_deadline_and_not_before(sample, header):
    began_at = time.monotonic()
    async with Peer(replying(b"{}", 429, header)) as peer, RewardClient(peer.url, retry_for_s=100) as client:
        with pytest.raises(RewardServerError, match="answered 429: "):
            await client.score(sample(1), deadline_s=0.3)
    assert time.monotonic() > began_at + 0.29


async def test_a_server_that_vanishes_is_left_without_a_deadline_too(sample, monkeypatch):
    monkeypatch.setattr("qreward_plugins.client.client.SILENT_AFTER_S", 0.1)
    async with Peer(None) as peer, RewardClient(peer.url, retry_for_s=0.1) as client:
        with pytest.raises(RewardServerError, match="cannot be reached"):
            await client.score(sample(1))


def test_a_server_of_something_else_is_said_to_be_that():
    with pytest.raises(RewardServerError, match="it has no 'version'; does `qreward serve` answer"):
        ServerFacts.of_row({"object": "list", "data": []})


NONSENSE = [
    lines(b"no JSON"),
    lines({"number": 0}),
    lines(line(7)),
    replying(ROW),
    replying(b"<html>", kind="text/html"),
    *(
        lines(line(**changed))
        for changed in (
            {"reward": True},
            {"reward": 1e39},
            {"components": {"a": None}},
            {"steps": [{"offset": "x", "score": None}]},
        )
    ),
]


@each_of("reply", NONSENSE)
async def test_a_server_that_answers_nonsense(sample, reply):
    """It costs the samples their rewards at once, with a reason, and nothing else."""
    async with Peer(reply) as peer, RewardClient(peer.url) as client:
        with pytest.raises(RewardServerError, match="cannot be read") as error:
            await client.score(sample(1))
    assert error.value.reason == "server_refused"
    assert len(peer.bodies) == 1


async def test_facts_without_end_are_refused():
    async with Peer(facts=[replying(b" " * 2**21)]) as peer, RewardClient(peer.url) as client:
        with pytest.raises(RewardServerError, match="longer than 1,048,576 bytes"):
            await client.facts()


@each_of("path", ["/facts", "/score"])
async def test_a_redirect_is_not_followed_and_no_cookie_is_kept(serve, sample, path):
    """The other server would get the samples, and its rewards would count."""
    cookies: list[str] = []

    def answer(exchange):
        cookies.extend(exchange.headers.get("cookie", ""))
        moved = {"Location": f"{other.url}{path}?session=s3cret", "Set-Cookie": "session=1; Path=/"}
        if path in exchange.head:
            exchange.reply(b"", "307 Moved", moved)
        else:
            exchange.reply(b"", "404 Not Found")

    async with serve() as other, wire.serving(answer) as here:
        url = here.url.replace("127.0.0.1", "localhost")  # cookies are kept for names, not for addresses
        async with RewardClient(url) as client:
            for _ in range(2):
                with pytest.raises(RewardServerError) as error:
                    await (client.facts() if path == "/facts" else client.score(sample(1)))
        assert other.source.samples == []
    assert f"the reward server at {url} answered 307: " in str(error.value)
    assert "redirects are not followed" in str(error.value)
    assert cookies == []


async def test_facts(serve):
    async with serve(judge={"correct_at": 0.5}) as served, RewardClient(served.url) as client:
        facts = await client.facts()
    assert (facts.components, facts.defines_correct, facts.window >= 1) == (("clarity",), True, True)
    for row, said in (
        ({**FACTS, "version": "9.9"}, r"has version 9\.9 of qreward-plugins, and this side .*; install the same"),
        ({**FACTS, "windows": 1}, "cannot be read"),
        ([], "cannot be read"),
        (b"<html>", "cannot be read"),
    ):
        async with Peer(facts=[replying(row)]) as peer, RewardClient(peer.url) as client:
            with pytest.raises(RewardServerError, match=said):
                await client.facts()
    async with Peer(facts=[replying(b"", 404)]) as peer, RewardClient(peer.url) as client:
        with pytest.raises(RewardServerError, match=r"404: no reward server \(`qreward serve`\) of this version"):
            await client.facts()


# The blocking client


@each_of("url", ["127.0.0.1:8080", "htp://h", "", "http://u:p@h", "http://h?k=1", 3, None])
def test_a_wrong_url_is_an_error_at_once(url):
    with pytest.raises(InputError, match="the URL of the reward server: "):
        RewardClient(url)
