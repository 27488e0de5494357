"""The SDKs of OpenAI, Anthropic and Google over a transport, against judge servers on loopback."""

from __future__ import annotations

import asyncio

import anthropic
import httpx
import httpx2
import openai
import pytest

from qreward_plugins.testing import Faults, ServerLimits

from .conftest import TEXT, Chat, Messages, open_client, server_of, tree_of, whole

pytestmark = pytest.mark.anyio


async def test_answers_and_streams(sdk):
    with server_of() as server:
        async with open_client(sdk, tree_of(server, dialect=sdk.dialect)) as client:
            assert await client.ask() == TEXT
            pieces = [piece async for piece in client.stream()]
            assert "".join(pieces) == TEXT
            assert len(pieces) > 5
            statistics = client.engine.statistics()
        report = server.report()
    assert (report.answered, report.connections) == (2, 1)
    assert statistics.waiting == 0


async def test_both_libraries(library):
    with server_of() as server:
        async with open_client(Chat, tree_of(server), library) as client:
            assert await client.ask() == TEXT
            assert "".join([piece async for piece in client.stream()]) == TEXT


async def test_google():
    from google import genai
    from google.genai import types

    with server_of(models=("judge",)) as server:
        tree = tree_of(f"{server.root_url}/v1beta", dialect="gemini")
        from qreward_plugins.server.transport import QRewardTransport

        async with httpx.AsyncClient(transport=QRewardTransport(tree)) as http:
            client = genai.Client(api_key="callers", http_options=types.HttpOptions(httpx_async_client=http))
            reply = await client.aio.models.generate_content(model="gpt-g", contents="Hi")
            assert reply.text == TEXT
            stream = await client.aio.models.generate_content_stream(model="gpt-g", contents="Hi")
            assert "".join([chunk.text or "" async for chunk in stream]) == TEXT
            with pytest.raises(genai.errors.ClientError, match=r"404 NOT_FOUND.*no model 'else'") as caught:
                await client.aio.models.generate_content(model="else", contents="Hi")
            assert caught.value.details["error"]["details"][0]["reason"] == "model_not_found"


@pytest.mark.parametrize("fault", ["error_401", "error_429", "error_500", "reset", "html", "error_in_200"])
async def test_another_source_answers_before_the_first_byte(sdk, fault):
    models = {"*": {"sources": ["s0", "s1"], "strategy": "least_requests"}}
    with server_of(faults=Faults(script=lambda n: fault)) as bad, server_of() as good:
        for stream in (False, True):
            async with open_client(sdk, tree_of(bad, good, models=models, dialect=sdk.dialect)) as client:
                assert await whole(client, stream) == TEXT
        assert bad.report().requests == 2
        assert good.report().requests == 2


async def test_a_dead_source_costs_little_and_its_circuit_opens():
    with server_of() as gone, server_of() as good:
        gone.stop()
        models = {"*": {"sources": ["s0", "s1"], "strategy": "round_robin"}}
        async with open_client(Chat, tree_of(gone, good, models=models)) as client:
            for _ in range(3):
                assert await asyncio.gather(*(client.ask() for _ in range(8))) == [TEXT] * 8
            statistics = client.engine.statistics()
    assert statistics.sources["s0"].state == "down"
    assert statistics.sources["s1"].state == "up"


async def test_limits_are_kept():
    limits = ServerLimits(requests_per_minute=240, concurrency=4, window_s=1.0)
    with server_of(limits=limits) as server:
        declared = {"requests_per_minute": 240, "concurrency": 4, "window_s": 1.0}
        async with open_client(Chat, tree_of(server, limits=declared)) as client:
            started = asyncio.get_running_loop().time()
            assert await asyncio.gather(*(client.ask() for _ in range(7))) == [TEXT] * 7
            took_s = asyncio.get_running_loop().time() - started
        report = server.report()
    assert took_s >= 1.0
    assert (report.violations_total, report.throttled, report.requests) == (0, 0, 7)


async def test_refusals_pass_through_without_blame(sdk):
    models = {"*": {"sources": ["s0", "s1"], "strategy": "round_robin"}}
    kinds = {Messages: (413, "error_413"), Chat: (400, "error_400")}
    library = anthropic if sdk is Messages else openai
    for status, fault in [kinds.get(sdk, (422, "error_422"))]:
        with server_of(faults=Faults(script=[fault] * 20)) as server, server_of() as other:
            async with open_client(sdk, tree_of(server, other, models=models, dialect=sdk.dialect)) as client:
                asked = await asyncio.gather(*(client.ask() for _ in range(40)), return_exceptions=True)
                refused = [error for error in asked if isinstance(error, library.APIStatusError)]
                assert len(refused) + asked.count(TEXT) == 40
                assert {error.status_code for error in refused} == {status}
                assert all(f"injected fault {fault}" in str(error.body) for error in refused)
                states = {name: source.state for name, source in client.engine.statistics().sources.items()}
            assert (server.report().requests, other.report().requests) == (20, 20)
        assert states == {"s0": "up", "s1": "up"}


async def test_what_the_engine_gave_up_is_an_error_in_the_form_of_the_sdk_and_is_not_retried(sdk):
    library = anthropic if sdk is Messages else openai
    with server_of(faults=Faults(script=lambda n: "error_500")) as server:
        async with open_client(sdk, tree_of(server, dialect=sdk.dialect, engine={"max_attempts": 1})) as client:
            for asked in (client.ask(), anext(client.stream())):
                with pytest.raises(library.InternalServerError, match="infra/exhausted: source 's0'") as caught:
                    await asked
                assert caught.value.status_code == 503
                assert caught.value.response.headers["x-should-retry"] == "false"
                assert caught.value.response.headers["x-qreward-source"] == "s0"
    assert server.report().requests == 2


async def test_time_is_up(sdk):
    library = anthropic if sdk is Messages else openai
    with server_of() as server:
        server.hold()
        tree = tree_of(server, dialect=sdk.dialect)
        hurry = {"X-QReward-Deadline-S": "0.05"}
        async with open_client(sdk, tree, max_retries=0) as client:
            with pytest.raises(library.InternalServerError, match="deadline") as caught:
                await client.ask(extra_headers=hurry)
            assert caught.value.status_code == 504
            # The client's own time limit is that of httpx.
            with pytest.raises(library.APITimeoutError):
                await client.ask(timeout=0.05)
            with pytest.raises(library.APITimeoutError):
                await anext(client.stream(timeout=0.05))
            await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
            assert client.engine.statistics().waiting == 0


async def test_a_stream_that_breaks_off_after_the_first_byte_is_an_error(sdk):
    for fault in ("stream_cut", "stream_reset", "stream_bad_json"):
        with server_of(faults=Faults(script=[fault])) as bad, server_of() as good:
            models = {"*": {"sources": ["s0", "s1"], "strategy": "least_requests"}}
            pieces = []

            async def read(client, pieces):
                async for piece in client.stream():
                    pieces.append(piece)

            async with open_client(sdk, tree_of(bad, good, models=models, dialect=sdk.dialect)) as client:
                with pytest.raises((openai.APIConnectionError, httpx2.RemoteProtocolError)):
                    await read(client, pieces)
            assert pieces, fault
            assert TEXT.startswith("".join(pieces)), fault
            assert "".join(pieces) != TEXT
            assert good.report().requests == 0, fault


async def test_an_error_event_in_a_stream_reaches_the_sdk():
    for sdk, library in ((Chat, openai), (Messages, anthropic)):
        with server_of(faults=Faults(script=["stream_error"])) as server:
            async with open_client(sdk, tree_of(server, dialect=sdk.dialect)) as client:
                with pytest.raises(library.APIError, match="injected fault stream_error"):
                    await whole(client, True)


async def test_who_hangs_up_ends_the_attempt(sdk):
    with server_of(stream_interval_s=0.02) as server:
        async with open_client(sdk, tree_of(server, dialect=sdk.dialect)) as client:
            stream = client.stream()
            assert await anext(stream)
            await stream.aclose()
            if sdk is not Messages:
                # The generator of OpenAI's SDK closes its response by itself, after it was collected.
                await asyncio.sleep(0)
            await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
            server.hold()
            asking = asyncio.ensure_future(client.ask())
            await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 1)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
            await asyncio.to_thread(server.wait_for, lambda report: report.in_flight == 0)
            assert all(upstream.quota.in_flight == 0 for upstream in client.engine.upstreams.values())


async def test_models_are_listed():
    models = {"gpt-5": {"sources": ["s0"]}, "jud*": {"sources": ["s0"]}, "Qwen/*": {"sources": ["s0"]}}
    with server_of() as server:
        async with open_client(Chat, tree_of(server, models=models)) as client:
            assert [each.id async for each in client.client.models.list()] == ["gpt-5", "judge", "Qwen/*"]
            assert (await client.client.models.retrieve("judge")).id == "judge"
            with pytest.raises(openai.NotFoundError, match="no model 'x'; models: gpt-5, judge"):
                await client.client.models.retrieve("x")
        async with open_client(Messages, tree_of(server, models=models)) as client:
            assert [each.id async for each in client.client.models.list()] == ["gpt-5", "judge", "Qwen/*"]


async def test_unknown_models_paths_and_formats(sdk):
    library = anthropic if sdk is Messages else openai
    other = {"openai": "anthropic"}.get(sdk.dialect, "openai")
    with server_of() as server:
        async with open_client(sdk, tree_of(server, dialect=other)) as client:
            with pytest.raises(library.NotFoundError, match="no source of the model 'gpt-5' speaks this format"):
                await client.ask()
            client.model = "else"
            with pytest.raises(library.NotFoundError, match=r"no model 'else'; models: gpt-\*"):
                await client.ask()
            with pytest.raises(library.NotFoundError, match="not passed on"):
                await (client.client.messages.batches if sdk is Messages else client.client.batches).list()
        assert server.report().requests == 0
