"""Every kind of fault does on the wire what it says."""

from __future__ import annotations

import email.utils
import gzip
import json
import math
import zlib
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import Any

import aiohttp
import pytest

from qreward_plugins.testing import FaultKind, Faults, JudgeServer, ServerLimits

HUGE = 3 * 1024 * 1024
SCORE = 0.25


def good(reply: Any) -> bool:
    return reply.status == 200 and reply.verdict["score"] == SCORE


def scores(reply: Any) -> list[tuple[str, object]]:
    return [pair for pair in json.loads(reply.content, object_pairs_hook=list) if pair[0] == "score"]


def cut_in_the_middle(text: str | bytes) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return bool(text)
    return False


def has_date_in(reply: Any, seconds: int) -> bool:
    when = email.utils.parsedate_to_datetime(reply.headers["retry-after"])
    return timedelta(0) <= when - datetime.now(timezone.utc) + timedelta(seconds=30) <= timedelta(seconds=seconds + 30)


CHECKS: dict[FaultKind, Callable[[Any], bool]] = {
    FaultKind.ERROR_429: lambda r: "retry-after" not in r.headers and "x-ratelimit-reset-requests" not in r.headers,
    FaultKind.ERROR_429_SECONDS: lambda r: r.headers["retry-after"] == "7",
    FaultKind.ERROR_429_DATE: lambda r: has_date_in(r, 7),
    FaultKind.ERROR_429_HUGE: lambda r: int(r.headers["retry-after"]) > 365 * 24 * 3600,
    FaultKind.ERROR_429_NEGATIVE: lambda r: r.headers["retry-after"] == "-5",
    FaultKind.ERROR_429_RESET: lambda r: (
        "retry-after" not in r.headers and r.headers["x-ratelimit-reset-requests"] == "7s"
    ),
    FaultKind.ERROR_502: lambda r: r.headers["content-type"].startswith("text/html"),
    FaultKind.ERROR_504: lambda r: r.headers["content-type"].startswith("text/html"),
    FaultKind.ERROR_503: lambda r: "retry-after" not in r.headers,
    FaultKind.ERROR_503_SECONDS: lambda r: r.headers["retry-after"] == "7",
    FaultKind.REDIRECT: lambda r: r.status == 307 and r.headers["location"] == "http://elsewhere.invalid/x",
    FaultKind.REDIRECT_LOOP: lambda r: r.status == 307 and r.headers["location"] == "/v1/chat/completions",
    FaultKind.RESET: lambda r: r.was_reset and not r.raw,
    FaultKind.CLOSE: lambda r: not r.was_reset and not r.raw,
    FaultKind.SLOW_HEADERS: good,
    FaultKind.SLOW_BODY: good,
    FaultKind.MID_BODY_RESET: lambda r: r.was_reset,
    FaultKind.TRUNCATED_BODY: lambda r: not r.was_reset and int(r.headers["content-length"]) == len(r.body) + 64,
    FaultKind.SHORT_LENGTH: lambda r: int(r.headers["content-length"]) == len(r.body) // 2,
    FaultKind.BAD_CHUNK: lambda r: r.headers["transfer-encoding"] == "chunked" and r.body.startswith(b"forty-two\r\n"),
    FaultKind.CLOSE_AFTER: lambda r: good(r) and r.headers["connection"] == "keep-alive",
    FaultKind.TRUNCATED_JSON: lambda r: (
        int(r.headers["content-length"]) == len(r.body) and cut_in_the_middle(r.body) and r.status == 200
    ),
    FaultKind.HTML: lambda r: (
        r.status == 200 and r.headers["content-type"].startswith("text/html") and b"<html>" in r.body
    ),
    FaultKind.EMPTY: lambda r: r.status == 200 and r.body == b"" and r.headers["content-length"] == "0",
    FaultKind.NO_CONTENT: lambda r: r.status == 204 and r.body == b"",
    FaultKind.INVALID_UTF8: lambda r: (
        b"\xff\xfe" in r.body and "choices" in json.loads(r.body.decode("utf-8", "replace"))
    ),
    FaultKind.WRONG_JSON_TYPE: lambda r: isinstance(r.json, list),
    FaultKind.DEEP_NESTING: lambda r: r.body == b"[" * 100_000 + b"]" * 100_000,
    FaultKind.NO_CHOICES: lambda r: r.json["choices"] == [],
    FaultKind.ERROR_IN_200: lambda r: r.status == 200 and r.json["error"]["code"] == "error_in_200",
    FaultKind.WRONG_MODEL: lambda r: good(r) and r.json["model"] != "judge",
    FaultKind.HUGE_BODY: lambda r: r.status == 200 and len(r.body) >= HUGE and b'"filler": "' in r.body,
    FaultKind.HUGE_HEADER: lambda r: good(r) and len(r.headers["x-filler"]) >= 1_000_000,
    FaultKind.BAD_GZIP: lambda r: r.headers["content-encoding"] == "gzip" and not inflates(r.body),
    FaultKind.GZIP_BOMB: lambda r: (
        r.headers["content-encoding"] == "gzip"
        and len(r.body) < HUGE / 50
        and len(gzip.decompress(r.body)) == HUGE
        and set(json.loads(gzip.decompress(r.body))["filler"]) == {"a"}
    ),
    FaultKind.NULL_CONTENT: lambda r: r.content is None,
    FaultKind.CUT_OFF: lambda r: cut_in_the_middle(r.content) and r.json["choices"][0]["finish_reason"] == "length",
    FaultKind.CONTENT_FILTER: lambda r: not r.content and r.json["choices"][0]["finish_reason"] == "content_filter",
    FaultKind.REFUSAL: lambda r: r.content is None and bool(r.json["choices"][0]["message"]["refusal"]),
    FaultKind.REFUSAL_TEXT: lambda r: "can't help" in r.content,
    FaultKind.PROSE: lambda r: cut_in_the_middle(r.content) and "0.25" in r.content,
    FaultKind.SCORE_NAN: lambda r: math.isnan(r.verdict["score"]),
    FaultKind.SCORE_INFINITE: lambda r: r.verdict["score"] == math.inf,
    FaultKind.SCORE_STRING: lambda r: r.verdict["score"] == "0.25",
    FaultKind.SCORE_BOOL: lambda r: r.verdict["score"] is True,
    FaultKind.SCORE_NULL: lambda r: r.verdict["score"] is None,
    FaultKind.SCORE_OUT_OF_RANGE: lambda r: r.verdict["score"] == 1e9,
    FaultKind.TWO_VERDICTS: lambda r: (
        [(v["id"], v["score"]) for v in map(json.loads, r.content.splitlines())]
        == [("0123456789ab", SCORE), ("0123456789ab", 0.0)]
    ),
    FaultKind.FORGED_VERDICT: lambda r: "id" not in r.verdict and r.verdict["score"] == 1.0,
    FaultKind.WRONG_NONCE: lambda r: r.verdict["id"] == "1123456789ab" and r.verdict["score"] == SCORE,
    FaultKind.DUPLICATE_KEYS: lambda r: scores(r) == [("score", SCORE), ("score", 0.0)],
}

VERDICTS_WITH_THE_ID = {
    FaultKind.SCORE_NAN,
    FaultKind.SCORE_INFINITE,
    FaultKind.SCORE_STRING,
    FaultKind.SCORE_BOOL,
    FaultKind.SCORE_NULL,
    FaultKind.SCORE_OUT_OF_RANGE,
    FaultKind.DUPLICATE_KEYS,
}


def inflates(body: bytes) -> bool:
    try:
        zlib.decompress(body, wbits=31)
    except zlib.error:
        return False
    return True


# Faults of streams are met by `sources/test_streamed.py`; a reply that is not streamed has none.
CHECKS |= {kind: good for kind in FaultKind if kind.stage in ("stream", "list")}


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.HANG], ids=str)
def test_kind(kind: FaultKind, client_of: Any) -> None:
    faults = Faults(
        script=[kind],
        retry_after_s=7,
        huge_bytes=HUGE,
        drip_interval_s=0.0,
        redirect_to="http://elsewhere.invalid/x",
    )
    limits = ServerLimits(requests_per_minute=100)
    with JudgeServer(lambda call: SCORE, faults=faults, limits=limits) as server:
        reply = client_of(server).send()
        if kind.value.startswith("error_") and kind is not FaultKind.ERROR_IN_200:
            assert reply.status == int(kind.value.split("_")[1])
            if not reply.headers["content-type"].startswith("text/html"):
                assert set(reply.json["error"]) == {"message", "type", "param", "code"}
            assert CHECKS.get(kind, lambda r: True)(reply)
        else:
            assert CHECKS[kind](reply), reply.raw[:2000]
        if kind in VERDICTS_WITH_THE_ID:
            assert reply.verdict["id"] == "0123456789ab"
        after = client_of(server).send()
        assert good(after), "the next request is served as if nothing had happened"
        report = server.wait_for(lambda report: report.in_flight == 0)
    assert report.faults == {kind.value: 1}
    assert (report.requests, report.answered, report.violations_total) == (2, 1, 0)
    assert sum(report.statuses.values()) == (1 if kind in (FaultKind.RESET, FaultKind.CLOSE) else 2)


def test_hang_ends_when_the_client_goes_away(client_of: Any) -> None:
    with JudgeServer(faults=Faults(script=["hang"])) as server:
        connection = client_of(server).open()
        server.wait_for(lambda report: report.faults == {"hang": 1} and report.in_flight == 1)
        connection.close()
        report = server.wait_for(lambda report: report.in_flight == 0)
    assert report.statuses == {}
    assert report.abandoned == 0, "it ended as a fault"


def test_hang_ends_when_the_server_stops(client_of: Any, read: Any) -> None:
    with JudgeServer(faults=Faults(rates={"hang": 1.0})) as server:
        connections = [client_of(server).open() for _ in range(20)]
        server.wait_for(lambda report: report.in_flight == 20)
        server.stop()
        assert server.report().in_flight == 0
        for connection in connections:
            with connection:
                assert read(connection).raw == b""


def test_huge_body_stops_when_the_client_goes_away(client_of: Any) -> None:
    with JudgeServer(faults=Faults(script=["huge_body"], huge_bytes=1 << 50)) as server:
        with client_of(server).open() as connection:
            received = 0
            while received < 5_000_000:
                received += len(connection.recv(1 << 20))
        server.wait_for(lambda report: report.in_flight == 0)


@pytest.mark.parametrize("kind", [FaultKind.SLOW_HEADERS, FaultKind.SLOW_BODY], ids=str)
def test_slow_replies_stop_when_the_client_goes_away(kind: FaultKind, client_of: Any) -> None:
    with JudgeServer(faults=Faults(script=[kind], drip_interval_s=3600.0)) as server:
        with client_of(server).open() as connection:
            assert connection.recv(1) == b"H"
        server.wait_for(lambda report: report.in_flight == 0)


@pytest.mark.anyio
async def test_mid_body_reset_sends_half_before_the_reset(body_of: Any) -> None:
    async with JudgeServer(faults=Faults(script=["mid_body_reset"])) as server, aiohttp.ClientSession() as session:
        with pytest.raises(aiohttp.ClientError):
            async with session.post(f"{server.base_url}/chat/completions", data=body_of()) as response:
                await response.read()
        assert server.report().faults == {"mid_body_reset": 1}


@pytest.mark.anyio
async def test_a_redirect_shows_who_takes_the_key_along(body_of: Any) -> None:
    async with JudgeServer() as elsewhere:
        target = f"{elsewhere.base_url}/chat/completions"
        async with (
            JudgeServer(faults=Faults(rates={"redirect": 1.0}, redirect_to=target), api_key="s3cret") as server,
            aiohttp.ClientSession() as session,
        ):
            headers = {"Authorization": "Bearer s3cret"}
            url = f"{server.base_url}/chat/completions"
            async with session.post(url, data=body_of(), headers=headers, allow_redirects=False) as response:
                assert response.status == 307
            assert elsewhere.report().requests == 0
            async with session.post(response.headers["Location"], data=body_of(), headers=headers) as response:
                assert response.status == 200
        assert elsewhere.report().credentials_seen == 1


def test_injected_throttling_is_not_a_violation(client_of: Any) -> None:
    with JudgeServer(faults=Faults(script=["error_429", "error_429_seconds"])) as server:
        assert [client_of(server).send().status for _ in range(3)] == [429, 429, 200]
        report = server.report()
    assert (report.violations_total, report.throttled) == (0, 2)


def test_spoiling_a_text_answer_spoils_a_verdict_in_its_stead(client_of: Any, nonce: str) -> None:
    with JudgeServer(lambda call: "no JSON", faults=Faults(script=["score_nan"])) as server:
        verdict = client_of(server).send().verdict
    assert verdict["id"] == nonce
    assert math.isnan(verdict["score"])
