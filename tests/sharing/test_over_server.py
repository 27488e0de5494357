"""Limits that engines share over a reward server: its own requests and theirs come out of one limit."""

from __future__ import annotations

import asyncio
import io
import logging
import shutil
import tempfile

import aiohttp
import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import KeeperSilent
from qreward_plugins.server.server import RewardServer
from qreward_plugins.sharing.messages import Report
from qreward_plugins.sharing.server_channel import ServerChannel
from qreward_plugins.sharing.wire import MOST_BYTES
from qreward_plugins.testing import JudgeServer, ServerLimits

pytestmark = pytest.mark.anyio
PER_WINDOW, WINDOW_S, SLACK_S = 60, 1.0, 0.5
TOKEN = "a long random text"


@pytest.fixture
def directory():
    """A private directory with a path that is short enough for a socket."""
    made = tempfile.mkdtemp(prefix="qr")
    yield made
    shutil.rmtree(made, ignore_errors=True)


def tree(base_url, **engine):
    window_s = WINDOW_S + SLACK_S
    limits = {"requests_per_minute": PER_WINDOW * 60 / window_s, "window_s": window_s, "window": "sliding"}
    return {
        "sources": {"a": {"kind": "openai", "base_url": base_url, "model": "judge", "limits": limits}},
        "judges": {"quality": {"kind": "llm", "score_range": [0, 1], "max_tokens": 64}},
        "engine": {"seed": 7, "scheduling": {"hedge": False}, **engine},
    }


def samples(first, count):
    prompt = [{"role": "user", "content": "Which number?"}]
    return [Sample(prompt, f"It is {number}.", id=str(number)) for number in range(first, first + count)]


def a_report(number=1):
    return Report("worker", number, {})


async def test_a_server_and_the_engines_that_reach_it_keep_one_limit_also_when_it_restarts(directory, monkeypatch):
    monkeypatch.setenv("QREWARD_TEST_TOKEN", TOKEN)
    theirs = ServerLimits(requests_per_minute=PER_WINDOW * 60 / WINDOW_S, window_s=WINDOW_S)
    with JudgeServer(limits=theirs) as judge:
        own = tree(judge.base_url, shared="machine", shared_directory=directory)
        async with RewardEngine(own) as engine, RewardServer(engine, port=0, token=TOKEN) as server:
            port = int(server.url.rpartition(":")[2])
            over = {"url": server.url, "token_env": "QREWARD_TEST_TOKEN"}
            far = RewardEngine(tree(judge.base_url, shared="server", shared_server=over))
            outcomes = await asyncio.gather(engine.score_all(samples(0, 90)), far.score_all(samples(100, 90)))
            assert all(outcome.reward is not None for batch in outcomes for outcome in batch)
            assert far.statistics().limits_kept_by == f"the reward server at {server.url}"
            assert engine.statistics().limits_kept_by == "this process"
            going_on = asyncio.ensure_future(far.score_all(samples(200, 90)))
            await asyncio.sleep(0.3)
            await engine.aclose()
        # The server is gone, and comes back in the middle of a batch.
        async with RewardEngine(own) as engine, RewardServer(engine, port=port, token=TOKEN):
            outcomes = await asyncio.gather(engine.score_all(samples(300, 60)), going_on)
            assert all(outcome.reward is not None for batch in outcomes for outcome in batch)
            await far.aclose()
        report = judge.report()
    assert report.violations_total == 0, report.violations[:5]
    assert report.requests == 330


async def test_a_server_that_shares_nothing_says_so_and_it_is_in_the_log(caplog):
    async with RewardEngine(tree("http://127.0.0.1:9/v1")) as engine, RewardServer(engine, port=0) as server:
        channel = ServerChannel(server.url)
        with caplog.at_level(logging.ERROR, "qreward_plugins.sharing"):
            for number in (1, 2):
                with pytest.raises(KeeperSilent, match=r"409.*shared: machine"):
                    await channel.exchange(a_report(number))
        await channel.aclose()
    assert [record.levelname for record in caplog.records] == ["ERROR"]  # once


async def test_who_may_share_and_what_is_refused(directory):
    settings = tree("http://127.0.0.1:9/v1", shared="machine", shared_directory=directory)
    async with RewardEngine(settings) as engine, RewardServer(engine, port=0, token=TOKEN) as server:
        stranger, friend = ServerChannel(server.url), ServerChannel(server.url, token=TOKEN)
        with pytest.raises(KeeperSilent, match="401"):
            await stranger.exchange(a_report())
        answer = await friend.exchange(a_report()._replace(leaves=False))
        assert answer is not None
        assert "the reward server at" in await friend.describe()
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session:
            for body in (b"", b"{}", b"[]", b'{"report": {"worker": 1}}', b"x" * (MOST_BYTES + 1)):
                async with session.post(f"{server.url}/limits", data=io.BytesIO(body)) as reply:
                    assert reply.status == 422, body[:20]
                    assert TOKEN not in await reply.text()
            async with session.get(f"{server.url}/openapi.json") as reply:
                assert "/limits" in (await reply.json())["paths"]
        assert await friend.exchange(a_report(2)._replace(leaves=True)) is None
        await stranger.aclose()
        await friend.aclose()


async def test_a_server_that_cannot_be_reached_is_a_silent_keeper_and_in_the_log(caplog):
    channel = ServerChannel("http://127.0.0.1:9", token=TOKEN)
    for number in (1, 2):
        with pytest.raises(KeeperSilent, match="cannot be reached") as caught:
            await channel.exchange(a_report(number))
        assert TOKEN not in str(caught.value)
    (record,) = caplog.records
    assert (record.levelname, "no request is sent" in record.getMessage()) == ("WARNING", True)
    await channel.end_keeper()
    await channel.aclose()
