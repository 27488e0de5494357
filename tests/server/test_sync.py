"""Synchronous clients over the synchronous transport, from several threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import httpx
import httpx2
import openai
import pytest

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.engine.process_portals import close_process_portals
from qreward_plugins.server.transport import QRewardSyncTransport, QRewardTransport
from qreward_plugins.testing import Faults

from .sdks import ASKED, CALLERS_KEY, TEXT, server_of, tree_of


@pytest.fixture(autouse=True)
def portals():
    yield
    close_process_portals()


def client_of(transport, library=httpx2, sdk=openai.OpenAI, **options):
    return sdk(http_client=library.Client(transport=transport), api_key=CALLERS_KEY, **options)


@pytest.fixture(params=[httpx, httpx2], ids=lambda library: library.__name__)
def library(request):
    return request.param


def test_answers_and_streams(library):
    with server_of() as server, client_of(QRewardSyncTransport(tree_of(server)), library) as client:
        create = partial(client.chat.completions.create, model="gpt-5", messages=ASKED)
        assert create().choices[0].message.content == TEXT
        pieces = [chunk.choices[0].delta.content or "" for chunk in create(stream=True)]
        assert ("".join(pieces), len(pieces) > 5) == (TEXT, True)
        with ThreadPoolExecutor(8) as threads:
            futures = [threads.submit(create) for _ in range(16)]
            assert [future.result().choices[0].message.content for future in futures] == [TEXT] * 16


def test_errors_and_hanging_up():
    faults = Faults(script=["error_400", "stream_cut"])
    with ExitStack() as stack:
        server = stack.enter_context(server_of(faults=faults, stream_interval_s=0.01))
        client = stack.enter_context(client_of(QRewardSyncTransport(tree_of(server)), max_retries=0))
        create = partial(client.chat.completions.create, model="gpt-5", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match="injected fault error_400"):
            create()
        with pytest.raises(openai.APIConnectionError):
            list(create(stream=True))
        with create(stream=True) as stream:
            assert next(stream)
        server.wait_for(lambda report: report.in_flight == 0)
        server.hold()
        with pytest.raises(openai.APITimeoutError):
            create(timeout=0.05)
        server.wait_for(lambda report: report.in_flight == 0)


def test_a_portal_of_the_caller_is_shared_and_stays_open():
    with server_of() as server, RewardEngine(tree_of(server)).portal() as portal:
        for _ in range(2):
            with client_of(QRewardSyncTransport(portal)) as client:
                assert client.chat.completions.create(model="gpt-5", messages=ASKED).choices[0].message.content == TEXT
        assert portal.statistics().sources["s0"].answered == 2


def test_the_sources_of_a_reward_server_need_no_transport():
    for transport in (QRewardTransport, QRewardSyncTransport):
        with pytest.raises(ConfigurationError, match=r"their base URL is http://127\.0\.0\.1:9/v1"):
            transport({"engine": {"server": "http://127.0.0.1:9"}})


def test_wrong_uses():
    tree = tree_of("http://127.0.0.1:9/v1")
    with pytest.raises(TypeError, match="takes the portal of an engine"):
        QRewardSyncTransport(RewardEngine(tree))


def test_closing_with_requests_under_way(library):
    with ExitStack() as stack:
        server = stack.enter_context(server_of(stream_interval_s=0.1))
        threads = stack.enter_context(ThreadPoolExecutor(4))
        client = client_of(QRewardSyncTransport(tree_of(server)), library, max_retries=0)
        create = partial(client.chat.completions.create, model="gpt-5", messages=ASKED)
        stream = create(stream=True)
        assert next(stream)
        server.hold()
        asking = [threads.submit(create) for _ in range(3)]
        server.wait_for(lambda report: report.in_flight >= 4)  # the stream, and three
        close_process_portals()
        for each in asking:
            with pytest.raises(openai.InternalServerError, match="closed"):
                each.result()
        with pytest.raises((openai.APIConnectionError, library.RemoteProtocolError)):
            list(stream)
        stream.close()
        server.wait_for(lambda report: report.in_flight == 0)


def test_a_client_in_the_thread_of_its_engine():
    with server_of() as server, RewardEngine(tree_of(server)).portal() as portal:

        async def ask(engine):
            with client_of(QRewardSyncTransport(portal), max_retries=0) as client:
                return client.models.list()

        with pytest.raises(openai.InternalServerError, match="cannot wait for itself"):
            portal.run(ask)
