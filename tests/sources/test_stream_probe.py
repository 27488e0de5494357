"""`stream: auto`: one request finds out whether the servers stream, whatever one broken server or one request does."""

from __future__ import annotations

from typing import Any

import pytest

from qreward_plugins.errors import PermanentError, QRewardError, TransientError
from qreward_plugins.sources import Reply
from qreward_plugins.sources.replica import Replica
from qreward_plugins.sources.stream_probe import PENDING_S, StreamProbe
from qreward_plugins.testing import Faults, JudgeServer


def ignore() -> None:
    pass


async def outcome_of(source: Any, request: Any) -> Reply | QRewardError:
    try:
        reply: Reply = await source.send(request, on_sent=ignore)
        return reply
    except QRewardError as error:
        return error


def test_one_request_finds_out() -> None:
    for streams in (True, False):
        probe = StreamProbe(None)
        assert [probe.asks(0.0), probe.asks(0.0)] == [True, False]
        probe.learned(None)
        assert probe.asks(0.0)
        probe.learned(streams)
        assert [probe.asks(0.0), probe.asks(0.0)] == [streams] * 2
        assert not probe.asking


def test_a_replica_that_answers_without_a_stream_does_not_stream() -> None:
    probe, replica = StreamProbe(None), Replica("a")
    assert probe.asks(1.0)
    probe.refused(replica, 1.0)
    assert not probe.asks(2.0)
    replica.answered(3.0)
    assert [probe.asks(now) for now in (3.0, 4.0, 5.0)] == [False] * 3
    replica.refused(6.0, began_at=5.0)
    assert not probe.asks(7.0)


@pytest.mark.parametrize("end", ["refused", "failed", "nothing"])
def test_a_replica_that_answers_nothing_decides_nothing(end: str) -> None:
    probe, replica = StreamProbe(None), Replica("a")
    replica.answered(0.5)
    assert probe.asks(1.0)
    probe.refused(replica, 1.0)
    assert not probe.asks(2.0)
    if end == "refused":
        replica.refused(2.0, began_at=1.5)
    elif end == "failed":
        replica.failed(2.0, began_at=1.5)
    assert [probe.asks(3.0), probe.asks(3.0)] == [end != "nothing", False]
    if end == "nothing":
        assert probe.asks(1.0 + PENDING_S)
    probe.learned(True)
    assert probe.asks(3.0)


@pytest.mark.anyio
@pytest.mark.parametrize("fault", ["error_400", "error_422"])
async def test_a_broken_replica_does_not_turn_streaming_off_for_the_others(
    fault: str, open_source: Any, request_of: Any
) -> None:
    with JudgeServer(faults=Faults(rates={fault: 1.0})) as broken, JudgeServer(streams=True) as good:
        source = open_source(broken.base_url, good.base_url, stream="auto")
        outcomes = [await outcome_of(source, request_of()) for _ in range(12)]
        refused = [outcome for outcome in outcomes if not isinstance(outcome, Reply)]
        assert type(refused[0]) is TransientError, "it was asked first, for a stream"
        assert len(refused) <= 4
        last = outcomes[-1]
        assert isinstance(last, Reply), last
        assert last.first_token_s is not None
        await source.aclose()


@pytest.mark.anyio
async def test_a_request_that_is_refused_anyway_does_not_turn_streaming_off(open_source: Any, request_of: Any) -> None:
    with JudgeServer(streams=True, faults=Faults(script=["error_400", "error_400"])) as server:
        source = open_source(server.base_url, stream="auto")
        assert type(await outcome_of(source, request_of())) is TransientError
        assert type(await outcome_of(source, request_of())) is PermanentError
        reply = await outcome_of(source, request_of())
        assert isinstance(reply, Reply)
        assert reply.first_token_s is not None
        await source.aclose()
