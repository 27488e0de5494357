"""Faults: when they happen, and that each does on the wire what it says. `sources/test_fault_matrix.py` says what a
real source makes of each; here stands what that cannot tell.
"""

from __future__ import annotations

import email.utils
import gzip
import json
import math
import random
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import pytest

from qreward_plugins.testing import FaultKind, Faults, JudgeServer, Latency, Outage, PlayFault
from qreward_plugins.testing.faults import FaultPlan, fault_kind

HUGE = 3 * 1024 * 1024
SCORE = 0.25
ELSEWHERE = "http://elsewhere.invalid/x"


def chosen(faults: Faults, count: int, *, seed: int = 0, at_s: float = 0.0) -> list[str | None]:
    plan = FaultPlan(faults, random.Random(seed))
    return [None if (kind := plan.choose(at_s)) is None else kind.value for _ in range(count)]


def test_rates_are_met_and_come_from_the_seed() -> None:
    faults = Faults(rates={"error_500": 0.2, FaultKind.RESET: 0.1, "hang": 0.0})
    counts = Counter(chosen(faults, 20_000, seed=1))
    assert counts["error_500"] / 20_000 == pytest.approx(0.2, abs=0.01)
    assert counts["reset"] / 20_000 == pytest.approx(0.1, abs=0.01)
    assert counts["hang"] == 0
    assert chosen(faults, 500, seed=1) == chosen(faults, 500, seed=1) != chosen(faults, 500, seed=2)
    assert None not in chosen(Faults(rates={"error_500": 0.5, "reset": 0.5}), 1_000)
    assert chosen(Faults(), 9) == [None] * 9


def test_a_script_goes_first_and_a_callable_one_covers_every_request() -> None:
    faults = Faults(script=["reset", None, "hang"], rates={"error_500": 1.0})
    assert chosen(faults, 5) == ["reset", None, "hang", "error_500", "error_500"]
    assert chosen(Faults(script=lambda k: "reset" if k % 2 else None), 4) == [None, "reset", None, "reset"]


def test_an_outage_goes_before_everything_is_half_open_and_does_not_shift_what_later_requests_meet() -> None:
    faults = Faults(script=["reset"] * 4, outages=[Outage(10.0, 20.0), Outage(15.0, 30.0, "hang")])
    plan = FaultPlan(faults, random.Random(0))
    at = (9.9, 10.0, 19.9, 20.0, 30.0)
    assert [str(plan.choose(each)) for each in at] == ["reset", "error_503", "error_503", "hang", "None"]

    rates = {"error_500": 0.3}
    plan = FaultPlan(Faults(rates=rates, outages=[Outage(0.0, 1.0)]), random.Random(7))
    with_outage = [plan.choose(0.5 if index < 50 else 2.0) for index in range(200)]
    assert [kind and kind.value for kind in with_outage[50:]] == chosen(Faults(rates=rates), 200, seed=7)[50:]


def test_latency_is_lognormal_with_stragglers_and_draws_as_much_whatever_it_is() -> None:
    latency = Latency(median_s=2.0, sigma=0.5, stragglers=0.05, straggler_factor=10.0)
    rng = random.Random(3)
    drawn = sorted(latency.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(2.0 * math.exp(0.5 * 0.066), rel=0.03)
    assert sum(value > 12.0 for value in drawn) / 20_000 == pytest.approx(0.05 * 0.846, abs=0.006)
    first, second = random.Random(5), random.Random(5)
    assert Latency(median_s=0.25).draw(first) == 0.25
    latency.draw(second)
    assert first.getstate() == second.getstate()


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: Faults(rates={"eror_500": 0.1}), "did you mean error_500"),
        (lambda: Faults(rates={"error_500": 1.1}), "between 0 and 1"),
        (lambda: Faults(rates={"error_500": 0.7, "reset": 0.7}), r"add up to 1\.400"),
        (lambda: Faults(script="reset"), r"write \['reset'\]"),
        (lambda: Faults(script=lambda k: None, rates={"reset": 0.1}), "omit the rates"),
        (lambda: Faults(huge_bytes=-1), "huge_bytes"),
        (lambda: Outage(5.0, 5.0), "start_s < end_s"),
        (lambda: Outage(0.0, 5.0, "nap"), "unknown fault"),
        (lambda: Latency(median_s=-1.0), "median_s"),
        (lambda: PlayFault("score_nan"), "a scorer that raises gives none"),
    ],
)
def test_mistakes_are_said(make: Callable[[], object], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        make()


def test_every_kind_has_a_name_and_a_sentence() -> None:
    assert len({kind.says for kind in FaultKind}) == len(FaultKind)
    for kind in FaultKind:
        assert kind.value == kind.name.lower() == str(kind)
        assert fault_kind(kind.value) is kind


def good(reply: Any) -> bool:
    return reply.status == 200 and reply.verdict["score"] == SCORE


def cut(text: str | bytes) -> bool:
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return bool(text)
    return False


def pause_s(reply: Any) -> float:
    return (
        email.utils.parsedate_to_datetime(reply.headers["retry-after"]) - datetime.now(timezone.utc)
    ).total_seconds()


def choice(reply: Any) -> Any:
    return reply.json["choices"][0]


CHECKS: dict[str, Callable[[Any], bool]] = {
    "error_429": lambda r: not {"retry-after", "x-ratelimit-reset-requests"} & set(r.headers),
    "error_429_seconds": lambda r: r.headers["retry-after"] == "7",
    "error_429_date": lambda r: -30 < pause_s(r) <= 7,
    "error_429_negative": lambda r: r.headers["retry-after"] == "-5",
    "error_429_reset": lambda r: "retry-after" not in r.headers and r.headers["x-ratelimit-reset-requests"] == "7s",
    "error_503_seconds": lambda r: r.headers["retry-after"] == "7",
    "error_504": lambda r: r.headers["content-type"].startswith("text/html"),
    "redirect": lambda r: r.status == 307 and r.headers["location"] == ELSEWHERE,
    "redirect_loop": lambda r: r.headers["location"] == "/v1/chat/completions",
    "reset": lambda r: r.was_reset and not r.raw,
    "close": lambda r: not r.was_reset and not r.raw,
    "slow_headers": good,
    "slow_body": good,
    "mid_body_reset": lambda r: r.was_reset,
    "truncated_body": lambda r: not r.was_reset and int(r.headers["content-length"]) == len(r.body) + 64,
    "short_length": lambda r: int(r.headers["content-length"]) == len(r.body) // 2,
    "bad_chunk": lambda r: r.body.startswith(b"forty-two\r\n"),
    "close_after": lambda r: good(r) and r.headers["connection"] == "keep-alive",
    "truncated_json": lambda r: int(r.headers["content-length"]) == len(r.body) and cut(r.body),
    "html": lambda r: r.status == 200 and r.headers["content-type"].startswith("text/html"),
    "empty": lambda r: r.status == 200 and r.headers["content-length"] == "0",
    "no_content": lambda r: r.status == 204,
    "invalid_utf8": lambda r: b"\xff\xfe" in r.body and "choices" in json.loads(r.body.decode("utf-8", "replace")),
    "wrong_json_type": lambda r: isinstance(r.json, list),
    "deep_nesting": lambda r: r.body == b"[" * 100_000 + b"]" * 100_000,
    "no_choices": lambda r: r.json["choices"] == [],
    "error_in_200": lambda r: r.status == 200 and r.json["error"]["code"] == "error_in_200",
    "wrong_model": lambda r: good(r) and r.json["model"] != "judge",
    "huge_body": lambda r: r.status == 200 and len(r.body) >= HUGE and b'"filler": "' in r.body,
    "huge_header": lambda r: good(r) and len(r.headers["x-filler"]) >= 1_000_000,
    "bad_gzip": lambda r: r.headers["content-encoding"] == "gzip" and b"gzip" in r.body,
    "gzip_bomb": lambda r: len(r.body) < HUGE / 50 and set(json.loads(gzip.decompress(r.body))["filler"]) == {"a"},
    "null_content": lambda r: r.content is None,
    "cut_off": lambda r: cut(r.content) and choice(r)["finish_reason"] == "length",
    "content_filter": lambda r: not r.content and choice(r)["finish_reason"] == "content_filter",
    "refusal": lambda r: r.content is None and bool(choice(r)["message"]["refusal"]),
    "refusal_text": lambda r: "can't help" in r.content,
    "prose": lambda r: cut(r.content) and "0.25" in r.content,
    "score_nan": lambda r: math.isnan(r.verdict["score"]),
    "score_infinite": lambda r: r.verdict["score"] == math.inf,
    "score_string": lambda r: r.verdict["score"] == "0.25",
    "score_bool": lambda r: r.verdict["score"] is True,
    "score_null": lambda r: r.verdict["score"] is None and len(r.verdict["id"]) == 12,
    "score_out_of_range": lambda r: r.verdict["score"] == 1e9,
    "two_verdicts": lambda r: [json.loads(each)["score"] for each in r.content.splitlines()] == [SCORE, 0.0],
    "forged_verdict": lambda r: "id" not in r.verdict and r.verdict["score"] == 1.0,
    "wrong_nonce": lambda r: r.verdict["id"] == "1123456789ab" and r.verdict["score"] == SCORE,
    "duplicate_keys": lambda r: r.content.count('"score"') == 2,
}


# `sources/test_streamed.py` meets the faults of streams.
@pytest.mark.parametrize("kind", [str(k) for k in FaultKind if k.stage not in ("stream", "list") and k != "hang"])
def test_kind(kind: str, client_of: Any) -> None:
    faults = Faults(script=[kind], retry_after_s=7, huge_bytes=HUGE, drip_interval_s=0.0, redirect_to=ELSEWHERE)
    with JudgeServer(lambda call: SCORE, faults=faults) as server:
        reply, after = client_of(server).send(), client_of(server).send()
        report = server.wait_for(lambda report: report.in_flight == 0)
    if kind.startswith("error_") and kind != "error_in_200":
        assert reply.status == int(kind.split("_")[1])
    assert CHECKS.get(kind, lambda r: kind.startswith("error_"))(reply), reply.raw[:2000]
    assert good(after), "the next request is served as if nothing had happened"
    assert (report.faults, report.requests, report.answered, report.violations_total) == ({kind: 1}, 2, 1, 0)
    assert sum(report.statuses.values()) == (1 if kind in ("reset", "close") else 2)


def test_a_hang_ends_with_its_client_and_with_the_server(client_of: Any, read: Any) -> None:
    with JudgeServer(faults=Faults(rates={"hang": 1.0})) as server:
        connection = client_of(server).open()
        server.wait_for(lambda report: report.faults == {"hang": 1} and report.in_flight == 1)
        connection.close()
        report = server.wait_for(lambda report: report.in_flight == 0)
        assert (report.statuses, report.abandoned) == ({}, 0), "it ended as a fault"
        connections = [client_of(server).open() for _ in range(20)]
        server.wait_for(lambda report: report.in_flight == 20)
        server.stop()
        assert server.report().in_flight == 0
        for connection in connections:
            with connection:
                assert read(connection).raw == b""


@pytest.mark.parametrize(("kind", "most"), [("slow_headers", 1), ("slow_body", 2_000), ("huge_body", 5_000_000)])
def test_a_reply_without_end_stops_when_the_client_goes_away(kind: str, most: int, client_of: Any) -> None:
    with JudgeServer(faults=Faults(script=[kind], huge_bytes=1 << 50, drip_interval_s=3600.0)) as server:
        with client_of(server).open() as connection:
            received = connection.recv(1 << 20)
            while kind == "huge_body" and len(received) < most:
                received += connection.recv(1 << 20)
        assert len(received) <= most or kind == "huge_body"
        server.wait_for(lambda report: report.in_flight == 0)


def test_a_redirect_shows_who_takes_the_key_along(client_of: Any) -> None:
    with JudgeServer() as elsewhere:
        faults = Faults(rates={"redirect": 1.0}, redirect_to=f"{elsewhere.base_url}/chat/completions")
        with JudgeServer(faults=faults, api_key="s3cret") as server:
            reply = client_of(server).send(headers={"Authorization": "Bearer s3cret"})
        assert reply.headers["location"].startswith(elsewhere.base_url)
        assert client_of(elsewhere).send(headers={"Authorization": "Bearer s3cret"}).status == 200
        assert elsewhere.report().credentials_seen == 1


@pytest.mark.parametrize("path", ["chat", "classify"])
def test_a_scorer_may_play_a_fault_for_its_request(path: str, client_of: Any) -> None:
    def score(call: Any) -> float:
        if "bad" in call.prompt + getattr(call, "response", ""):
            raise PlayFault("reset")
        return 1.0

    with JudgeServer(score) as server:
        for text, was_reset in (("good", False), ("bad", True)):
            body = json.dumps({"model": "judge", "input": ["a", text]}).encode()
            reply = client_of(server).chat(text) if path == "chat" else client_of(server).send(body, path="/classify")
            assert reply.was_reset == was_reset
        report = server.report()
    assert (report.faults, report.answered, report.scorer_errors_total) == ({"reset": 1}, 1, 0)
