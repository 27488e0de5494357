"""The judge server's other way to be asked: a sample as it is, and a score."""

from __future__ import annotations

import asyncio
import json
import math
import urllib.request
from typing import Any

import pytest

from qreward_plugins.testing import (
    FaultKind,
    Faults,
    JudgeCall,
    JudgeServer,
    JudgeServerProcess,
    ScoreCall,
    ServerLimits,
    count_tokens,
)

HUGE = 3 * 1024 * 1024


async def async_score(call: JudgeCall) -> dict[str, object]:
    await asyncio.sleep(0)
    return {"score": 3, "style": "good"}


@pytest.mark.parametrize(
    ("score", "body"),
    [
        (lambda call: 0.5, b"0.5"),
        (lambda call: 1, b"1"),
        (lambda call: math.nan, b"NaN"),
        (lambda call: {"score": 1, "of": "é"}, '{"score": 1, "of": "é"}'.encode()),
        (async_score, b'{"score": 3, "style": "good"}'),
        (lambda call: '{"data": {"score": 1}}', b'{"data": {"score": 1}}'),
        (lambda call: "as it is", b"as it is"),
    ],
)
def test_what_scorers_return_is_the_reply(score: Any, body: bytes, client_of: Any) -> None:
    with JudgeServer(score) as server:
        reply = client_of(server).score()
        assert server.score_url == f"http://127.0.0.1:{server.port}/score"
    assert (reply.status, reply.body) == (200, body)
    assert reply.headers["content-type"].startswith("application/json")


def test_the_scorer_sees_the_sample_in_the_blocks_of_a_judge(client_of: Any) -> None:
    calls: list[ScoreCall] = []

    def score(call: JudgeCall) -> float:
        assert isinstance(call, ScoreCall)
        calls.append(call)
        return 1.0

    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 * 7?"}]
    with JudgeServer(score, models=("rm", "judge")) as server:
        client = client_of(server)
        client.score("42", "6 * 7?", label="42", task="math")
        client.score("42", turns, label={"answer": 42})
        client.score("42", [])
    one, two, three = calls
    assert (one.prompt, one.response, one.label, one.parameters) == ("6 * 7?", "42", "42", {"task": "math"})
    assert one.blocks == {"question": "6 * 7?", "response": "42", "reference": "42"}
    assert (one.model, one.nonce, one.score_range, one.max_tokens) == ("rm", None, (0.0, 1.0), None)
    assert two.messages == turns
    assert (two.label, two.blocks["question"], two.blocks["reference"]) == ({"answer": 42}, "6 * 7?", '{"answer": 42}')
    assert (three.prompt, dict(three.blocks)) == ("", {"question": "", "response": "42"})


def test_the_built_in_scorer_serves_both_ways(client_of: Any, prompt_of: Any) -> None:
    with JudgeServer() as server:
        client = client_of(server)
        assert client.score("the answer is 4", label="four is 4").json == round(2 / 3, 3)
        assert client.score("something", []).json == client.chat(prompt_of("something")).verdict["score"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "JSON object"),
        (b"{}", "'response' must be a string"),
        (b'{"response": 4}', "'response' must be a string"),
        (b'{"response": "4", "prompt": 5}', "'prompt' must be a string or a list"),
        (b'{"response": "4", "prompt": ["x"]}', "role"),
    ],
)
def test_bad_requests_are_refused(body: bytes, said: str, client_of: Any) -> None:
    with JudgeServer() as server:
        reply = client_of(server).send(body, path="/score")
        report = server.report()
    assert reply.status == 400
    assert said in reply.json["error"]["message"]
    assert (report.requests, report.refused, report.statuses) == (1, 1, {400: 1})


def test_key_and_method_are_asked_for(client_of: Any) -> None:
    with JudgeServer(lambda call: 0.5, api_key="s3cret") as server:
        client = client_of(server)
        assert client.score().status == 401
        assert client.score(headers={"Authorization": "Bearer s3cret"}).json == 0.5
        assert client.send(b"", method="GET", path="/score").status == 405
        assert "/score" in client.send(b"{}", path="/scores").json["error"]["message"]


def test_a_failing_scorer_is_a_500(client_of: Any) -> None:
    with JudgeServer(lambda call: True) as server:
        assert client_of(server).score().status == 500
        report = server.report()
    assert report.scorer_errors == ("TypeError: the scorer returned bool: return a float, a mapping or a str",)


def test_both_ways_share_the_limits_and_the_report(client_of: Any) -> None:
    tokens = count_tokens("6 * 7?" + "42" + "the label")
    limits = ServerLimits(requests_per_minute=3, tokens_per_minute=3 * tokens + 200)
    with JudgeServer(lambda call: 0.5, limits=limits) as server:
        client = client_of(server)
        replies = [client.score(label="the label"), client.chat(), client.score(), client.score()]
        report = server.report()
        assert [reply.status for reply in replies] == [200, 200, 200, 429]
        assert replies[0].headers["x-ratelimit-remaining-requests"] == "2"
        assert replies[0].headers["x-ratelimit-remaining-tokens"] == str(2 * tokens + 200)
        assert "retry-after" in replies[3].headers
    assert (report.requests, report.answered, report.violations_by_kind) == (4, 3, {"requests": 1})


def test_a_process_of_its_own_scores_too() -> None:
    with JudgeServerProcess() as process:
        body = json.dumps({"response": "a b", "label": "a"}).encode()
        with urllib.request.urlopen(urllib.request.Request(process.score_url, body), timeout=20) as reply:
            assert json.load(reply) == 1.0


ANSWERS: dict[str, Any] = {
    "number": 0.25,
    "two digits": 10.0,
    "mapping": {"score": 0.25, "acc": True, "n": 2},
    "nested": {"data": {"scores": [0.25]}},
    "empty": {},
    "text": "no JSON",
}


def numbers(value: Any) -> list[Any]:
    """The leaves of a JSON value but texts and the truth values that were there."""
    if isinstance(value, dict):
        return [leaf for key, item in value.items() if key != "acc" for leaf in numbers(item)]
    return [leaf for item in value for leaf in numbers(item)] if isinstance(value, list) else [value]


def is_json(body: bytes) -> bool:
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


def twice(body: bytes) -> bool:
    pairs = json.loads(body, object_pairs_hook=list)
    return pairs[0][0] == pairs[-1][0] and pairs[0][1] != pairs[-1][1]


CHECKS: dict[FaultKind, Any] = {
    FaultKind.NULL_CONTENT: lambda r: r.json is None,
    FaultKind.CUT_OFF: lambda r: r.body and not is_json(r.body),
    FaultKind.CONTENT_FILTER: lambda r: r.json["error"]["code"] == "content_filter",
    FaultKind.REFUSAL: lambda r: set(r.json) == {"refusal"},
    FaultKind.REFUSAL_TEXT: lambda r: "can't help" in r.json,
    FaultKind.PROSE: lambda r: b"give it a score of" in r.body and not is_json(r.body),
    FaultKind.SCORE_NAN: lambda r: all(math.isnan(number) for number in numbers(r.json)),
    FaultKind.SCORE_INFINITE: lambda r: all(number == math.inf for number in numbers(r.json)),
    FaultKind.SCORE_STRING: lambda r: all(isinstance(number, str) for number in numbers(r.json)),
    FaultKind.SCORE_BOOL: lambda r: all(number is True for number in numbers(r.json)),
    FaultKind.SCORE_NULL: lambda r: all(number is None for number in numbers(r.json)),
    FaultKind.SCORE_OUT_OF_RANGE: lambda r: all(number == 1e9 for number in numbers(r.json)),
    FaultKind.TWO_VERDICTS: lambda r: len({*map(str, map(json.loads, r.body.splitlines()))}) == 2,
    FaultKind.FORGED_VERDICT: lambda r: r.json == {"verdict": {"full_marks": 1.0}},
    FaultKind.WRONG_NONCE: lambda r: r.json == {"id": "another request"},
    FaultKind.DUPLICATE_KEYS: lambda r: twice(r.body),
    FaultKind.TRUNCATED_JSON: lambda r: r.body and not is_json(r.body),
    FaultKind.SHORT_LENGTH: lambda r: not is_json(r.body[: int(r.headers["content-length"])]),
    FaultKind.MID_BODY_RESET: lambda r: r.was_reset,
    FaultKind.NO_CHOICES: lambda r: r.json == {},
    FaultKind.WRONG_MODEL: lambda r: r.json["model"] == "somebody-else",
    FaultKind.INVALID_UTF8: lambda r: b"\xff\xfe" in r.body and is_json(r.body.decode("utf-8", "replace").encode()),
    FaultKind.HUGE_BODY: lambda r: len(r.body) >= HUGE and b'"filler": "' in r.body,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", CHECKS, ids=str)
def test_a_fault_is_never_a_good_answer(kind: FaultKind, answer: str, client_of: Any) -> None:
    faults = Faults(script=[kind], huge_bytes=HUGE)
    with JudgeServer(lambda call: ANSWERS[answer], faults=faults) as server:
        spoilt, good = client_of(server).score(), client_of(server).score()
        report = server.wait_for(lambda report: report.in_flight == 0)
    assert CHECKS[kind](spoilt), spoilt.raw[:500]
    alike = kind is FaultKind.SHORT_LENGTH or (kind, answer) == (FaultKind.NO_CHOICES, "empty")
    assert alike or spoilt.body != good.body
    assert (report.faults, report.answered) == ({kind.value: 1}, 1)


def test_every_fault_of_a_verdict_has_its_like_in_a_score() -> None:
    assert {kind for kind in FaultKind if kind.stage == "verdict"} <= set(CHECKS)
