"""The clients: the outcomes of the engine in the server, and nothing else."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qreward_plugins import Failed, InputError, RewardServerError, Sample, Scored
from qreward_plugins.client import SAMPLES_A_REQUEST, BlockingRewardClient, RewardClient

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
    assert served.source.samples == [given]


async def test_many_samples_go_in_several_requests_and_keep_their_order(serve):
    words = [number / 4096 for number in range(2 * SAMPLES_A_REQUEST + 1)]
    async with serve() as served, RewardClient(served.url) as client:
        outcomes = await client.score_all(map(sample, words))
    assert [outcome.reward for outcome in outcomes] == words


async def test_cancelling_ends_the_attempts_at_the_server(serve):
    async with serve() as served, RewardClient(served.url) as client:
        asked = asyncio.ensure_future(client.score(sample("hold")))
        await served.source.held.wait()
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


async def test_a_sample_that_json_cannot_express(serve):
    async with serve() as served, RewardClient(served.url) as client:
        with pytest.raises(InputError, match="sample 1 cannot be written as JSON"):
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


def test_the_blocking_client_must_be_opened():
    with pytest.raises(RewardServerError, match="open the client first"):
        BlockingRewardClient("http://127.0.0.1:9").score(sample(1))
