"""Sessions of the HTTP client: one for each event loop, however that loop ends and whoever asks first."""

from __future__ import annotations

import asyncio
import gc
import warnings

import pytest
from yarl import URL

from qreward_plugins.sources.aiohttp_client import AiohttpClient
from qreward_plugins.sources.http import Connecting
from qreward_plugins.testing import JudgeServer


@pytest.fixture
def server():
    with JudgeServer(lambda call: 0.5) as server:
        yield server


async def ask(client, server):
    url = URL(server.base_url + "/chat/completions")
    body = b'{"model": "m", "messages": [{"role": "user", "content": "?"}]}'
    return await client.post(url, body, on_sent=lambda: None, max_reply_bytes=10_000)


def test_after_a_loop_that_was_closed_hard_first_requests_at_once_share_one_session(server):
    client = AiohttpClient(Connecting("a", {}, {}, (), True, 5.0, {}))
    opened = []
    open_session = client._open_session
    client._open_session = lambda: opened.append(open_session()) or opened[-1]
    loop = asyncio.new_event_loop()
    loop.run_until_complete(ask(client, server))
    loop.close()

    async def main():
        replies = await asyncio.gather(*[ask(client, server) for _ in range(8)])
        await client.aclose()
        await asyncio.sleep(0.05)
        return replies

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the hard end of the first loop
        replies = asyncio.run(main())
        gc.collect()
    assert len(replies) == 8
    assert len(opened) == 2
    assert all(session.closed for session in opened[1:])
