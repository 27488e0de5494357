"""The reward server on a real socket: rewards in every form, statuses of what has none, its bound, token and end."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from qreward_plugins import InputError, RewardEngine, Sample, Verdict
from qreward_plugins.client import RewardClient
from qreward_plugins.config import Batch
from qreward_plugins.judges import Judge, JudgeConfig
from qreward_plugins.observers import EngineStatistics
from qreward_plugins.observers.statistics import ReplicaStatistics, SourceGauges, Statistics
from qreward_plugins.server.exposition import exposition
from qreward_plugins.server.server import RewardServer
from qreward_plugins.simulation import SimulatedSource
from qreward_plugins.sources import Reply
from qreward_plugins.testing import JudgeServer

from ..kit import comes, each_of, make_config

pytestmark = pytest.mark.anyio


async def test_one_sample_and_many(serve, row):
    async with serve() as served:
        status, one, _ = await served.post("/score", row(0.25, id="a", priority="high"))
        assert (status, one["reward"], one["id"], one["outcome"]) == (200, 0.25, "a", "scored")
        assert one["components"] == {"clarity": 0.125}
        status, many, _ = await served.post("/score", {"samples": [row(0.5), row(0.75, id="b"), row(1)]})
        assert status == 200
        assert [result["reward"] for result in many["results"]] == [0.5, 0.75, 1.0]
        assert [result["id"] for result in many["results"]] == [None, "b", None]
        assert many["missing"] == 0
        assert (await served.post("/score", {"samples": []}))[:2] == (200, {"results": [], "missing": 0})


@each_of(("word", "status", "cause"), [("refuse", 422, "infra"), ("break", 503, "infra"), ("babble", 502, "verdict")])
async def test_a_missing_reward_is_a_status_and_a_cause_in_every_form(serve, row, word, status, cause):
    async with serve() as served:
        got, one, _ = await served.post("/score", row(word))
        assert (got, one["reward"], one["outcome"], one["cause"]) == (status, None, "failed", cause)
        late, one, _ = await served.post("/score", {**row("hold"), "deadline_s": 0.05})
        assert (late, one["reason"]) == (504, "deadline")
        got, many, _ = await served.post("/score", {"samples": [row(1), row(word)]})
        assert (got, many["missing"]) == (207, 1)
        assert [result["status"] for result in many["results"]] == [200, status]
    text = f"So much: {word}"
    for path, body in {
        "/slime": {"prompt": "How much?", "response": text},
        "/openrlhf": {"query": ["Say 1", f"Say {word}"], "prompts": ["Say ", "Say "], "labels": [None, None]},
        "/get_reward": {"metadata": {}, "query": text, "prompts": "How much?"},
    }.items():
        async with serve() as served:
            got, reply, _ = await served.post(path, body)
        assert (got, reply["error"]["cause"]) == (status, cause), path
        assert reply["error"]["detail"], path
        assert set(reply) == {"error"}, path


async def test_a_spent_budget_costs_the_samples_that_it_cannot_pay_for(serve, row, caplog):
    budget = {"usd": 0.001, "on_spent": "raise"}
    async with serve(engine={"budget": budget}, source={"price": {"per_request": 0.001}}) as served:
        got, many, _ = await served.post("/score", {"samples": [row(1), row(1)]})
        assert (got, many["missing"]) == (207, 1)
        got, one, _ = await served.post("/score", row(1))
        assert (got, one["cause"], one["reason"]) == (503, "infra", "budget")
        got, reply, _ = await served.post("/slime", {"prompt": "How much?", "response": "1"})
        assert (got, reply["error"]["reason"]) == (503, "budget")
    assert "unexpected" not in caplog.text


async def test_slime(serve):
    async with serve() as served:
        body = {"prompt": "How much?", "response": "0.5", "label": "0.5"}
        assert (await served.post("/slime", body))[:2] == (200, 0.5)
        assert served.source.samples[0].ground_truth == "0.5"
        messages = [{"role": "user", "content": "How much?"}]
        assert (await served.post("/slime", {**body, "prompt": messages}))[:2] == (200, 0.5)
        assert list(served.source.samples[1].messages) == messages


async def test_openrlhf(serve):
    async with serve() as served:
        queries = ["<s>How much? 0.5", "How much? 1"]
        body = {"query": queries, "prompts": ["How much?", "How much?"], "labels": ["a", "b"]}
        status, reply, _ = await served.post("/openrlhf", body)
        assert status == 200
        assert reply == {"rewards": [0.5, 1.0], "scores": [0.5, 1.0], "extra_logs": {"clarity": [0.25, 0.5]}}
        assert [sample.response for sample in served.source.samples] == [" 0.5", " 1"]
        assert [sample.ground_truth for sample in served.source.samples] == ["a", "b"]
        # Its trainer sends nothing to all servers but the first.
        status, reply, _ = await served.post("/openrlhf", {"query": [], "prompts": [], "labels": []})
        assert (status, reply) == (200, {"rewards": [], "scores": [], "extra_logs": {}})
        status, reply, _ = await served.post("/openrlhf", {"query": ["What? 1"], "prompts": ["How much?"]})
        assert (status, reply["error"]["reason"]) == (422, "input")
        assert "query[0] does not begin with prompts[0]" in reply["error"]["detail"]


async def test_get_reward(serve):
    async with serve() as served:
        metadata = {"ground_truth": "1", "target": [3.0]}
        status, reply, _ = await served.post("/get_reward", {"metadata": metadata, "query": "1", "prompts": "How?"})
        assert (status, reply["reward"], reply["error"]) == (200, 1.0, None)
        assert reply["next_turn_feedback"] is None
        assert reply["meta"]["components"] == {"clarity": 0.5}
        sample = served.source.samples[0]
        assert (sample.ground_truth, dict(sample.extras)) == ("1", {"target": [3.0]})
        status, reply, _ = await served.post("/get_reward", {"metadata": [{}, {}], "query": ["1", "0"]})
        assert (status, reply["rewards"], len(reply["metas"])) == (200, [1.0, 0.0], 2)
        assert reply["next_turn_feedback"] is None
        status, reply, _ = await served.post("/get_reward", {"metadata": [{}], "query": ["1", "0"]})
        assert status == 422
        assert "must have one length; metadata has 1, query has 2, prompts has 2" in reply["error"]["detail"]


async def test_queries_of_many_callers_go_in_one_request_and_each_gets_its_own_rewards():
    """What the `RewardBuffer` of the molecular verifier does, by the key `batch` of a source."""
    sizes, batch = [], Batch(max_size=8, max_wait_s=10.0)

    def take(number, requests, now):
        sizes.append(len(requests))
        return 0.15

    source = SimulatedSource(
        "scorer",
        batch=batch,
        behaviour=lambda number, request, now: take(number, [request], now),
        batch_behaviour=take,
        answer=lambda request: Reply(value=float(request.sample.response)),
        concurrency=1,
    )
    node = {"kind": "http", "url": "http://127.0.0.1:9", "limits": {"concurrency": 1}, "batch": batch.model_dump()}
    tree = {
        "sources": {"scorer": node},
        "judges": {"docking": {"kind": "function", "reward_range": [0, 100]}},
        "engine": {"shared": "off"},
    }
    async with (
        RewardEngine(tree, sources={"scorer": source}) as engine,
        RewardServer(engine, port=0) as server,
        aiohttp.ClientSession() as client,
    ):

        async def ask(query):
            metadata = [{} for _ in query] if isinstance(query, list) else {}
            body = {"metadata": metadata, "query": query, "prompts": None}
            async with client.post(f"{server.url}/get_reward", json=body) as reply:
                found = await reply.json()
                return found["rewards"] if isinstance(query, list) else found["reward"]

        busy = asyncio.ensure_future(ask("0"))
        await comes(lambda: sizes)
        queries = [["5", "4", "3"], "7", [], ["1", "2"], *map(str, range(20, 30))]
        assert await asyncio.gather(*map(ask, queries)) == [[5, 4, 3], 7, [], [1, 2], *range(20, 30)]
        assert await busy == 0
    assert sizes == [1, 8, 8]


async def test_the_words_of_the_judge_are_the_feedback_of_get_reward():
    with JudgeServer(lambda call: {"score": 10, "rationale": "Mind the units."}) as judge:
        async with (
            RewardEngine(make_config({"a": judge})) as engine,
            RewardServer(engine, port=0) as server,
            aiohttp.ClientSession(server.url) as client,
        ):
            for metadata, query, feedback in (({}, "1", "Mind the units."), ([{}, {}], ["1", "2"], None)):
                body = {"metadata": metadata, "query": query, "prompts": None}
                async with client.post("/get_reward", json=body) as reply:
                    assert (await reply.json())["next_turn_feedback"] == feedback


@each_of(
    ("path", "body", "status", "said"),
    [
        ("/score", b"{", 400, "the body is not JSON"),
        ("/score", {}, 422, "the body: needs a column response or solution_str or completion; it has no columns"),
        ("/score", {"response": 1, "prompt": "?"}, 422, "the body: response must be a text, not a number"),
        ("/score", {"samples": [], "response": "1"}, 422, "the body has samples and also response"),
        ("/score", {"samples": [], "deadline_s": 0}, 422, "deadline_s must be a number of seconds above 0"),
        ("/score", {"samples": [], "priority": 0.5}, 422, "priority must be a whole number"),
        ("/slime", {"prompt": "?"}, 422, "the body: response is null"),
        ("/openrlhf", {"query": ["1"], "prompts": []}, 422, "query has 1, prompts has 0"),
        ("/get_reward", {"query": "1", "metadata": 1}, 422, "item 0: metadata must be an object, not a number"),
        ("/nothing", {}, 404, "unknown path"),
        ("/score", {"response": "1", "prompt": "?"}, 400, "Content-Encoding"),
    ],
)
async def test_wrong_bodies_are_one_clear_error(serve, path, body, status, said):
    async with serve() as served:
        zipped = {"Content-Encoding": "gzip"} if said == "Content-Encoding" else {}
        got, reply, _ = await served.post(path, body, **zipped)
        assert (got, reply["error"]["cause"]) == (status, None)
        assert said in reply["error"]["detail"]
        assert served.source.samples == []


async def test_a_row_that_cannot_be_read_fails_alone(serve, row):
    async with serve() as served:
        rows = [row(1), row(1, group_id=[]), 7, {"response": "1", "id": "c"}]
        status, reply, _ = await served.post("/score", {"samples": rows})
    assert status == 207
    assert [(one["status"], one["reason"]) for one in reply["results"]] == [(200, None), *[(422, "input")] * 3]
    details = [one["detail"] for one in reply["results"][2:]]
    assert details == [
        "the row must be an object, not a number",
        "the row: needs a column messages or prompt; it has response, id",
    ]
    assert [one["id"] for one in reply["results"]][2:] == [None, "c"]


async def test_an_integer_beyond_64_bits_stays_what_it_is(serve, row):
    number = 2**64 + 1
    async with serve() as served:
        status, reply, _ = await served.post("/score", row(1, ground_truth=number, other={"large": [-number]}))
    assert (status, reply["reward"]) == (200, 1.0)
    (seen,) = served.source.samples
    assert (seen.ground_truth, seen.extras["other"]) == (number, {"large": [-number]})


async def lines_of(reply):
    return [json.loads(line) async for line in reply.content if line.strip()]


async def test_a_line_for_each_outcome_as_soon_as_it_is_known(serve, row, monkeypatch):
    monkeypatch.setattr("qreward_plugins.server.server.SIGN_OF_LIFE_S", 0.01)
    wanted = {"Accept": "application/x-ndjson"}
    async with serve() as served, aiohttp.ClientSession(headers=wanted) as session:
        rows = [row("hold"), row(0.5), row("babble"), 7]
        async with session.post(f"{served.url}/score", json={"samples": rows}) as reply:
            assert (reply.status, reply.content_type) == (200, "application/x-ndjson")
            found, signs = [], 0
            while len(found) < 3 or signs < 3:
                line = await reply.content.readline()
                signs += line == b"\n"
                found += [json.loads(line)] if line.strip() else []
            assert {one["number"]: (one["reward"], one["status"]) for one in found} == {
                1: (0.5, 200),
                2: (None, 502),
                3: (None, 422),
            }
            assert served.server.under_way == 1
            served.source.release.set()
            assert [(one["number"], one["reward"]) for one in await lines_of(reply)] == [(0, 1.0)]
        async with session.post(f"{served.url}/score", json={"samples": []}) as reply:
            assert await lines_of(reply) == []
        async with session.post(f"{served.url}/score", json=row(0.25)) as reply:
            assert [(one["number"], one["reward"]) for one in await lines_of(reply)] == [(0, 0.25)]
        async with session.post(f"{served.url}/score", json={"samples": [row(1)], "deadline_s": "x"}) as reply:
            assert reply.status == 422


class Returns(Judge):
    """Returns what JSON cannot hold, or half of a character."""

    class Config(JudgeConfig):
        components: tuple[str, ...] = ()

    def __init__(self, name, config, opening):
        super().__init__(name)

    async def judge(self, sample, ask):
        returned = {"text": "\ud800"} if sample.response == "half" else {"numbers": {1, 2}}
        return Verdict(0.5, returned=returned, judge=self.name)


async def test_a_judge_of_ones_own_that_returns_what_json_cannot_hold_costs_its_sample_once(serve, row):
    async with serve(judge={"kind": f"{__name__}:Returns"}) as served, RewardClient(served.url) as client:
        outcome = await client.score(Sample([{"role": "user", "content": "Why?"}], "r"), deadline_s=5)
        assert (outcome.cause, outcome.reason) == ("infra", "bug")
        status, many, _ = await served.post("/score", {"samples": [row(1)]})
        assert (status, many["results"][0]["reason"]) == (207, "bug")
        assert (await client.score(Sample([{"role": "user", "content": "Why?"}], "half"), deadline_s=5)).reward == 0.5


@each_of("accept", ["application/json", "application/x-ndjson"])
async def test_no_more_samples_than_the_bound_are_under_way(serve, row, accept):
    async with serve(max_samples=4) as served:
        many = {"samples": [row("hold")] * 3}
        held = asyncio.ensure_future(served.post("/score", many))
        await served.source.holding.wait()
        status, reply, headers = await served.post("/score", {"samples": [row(1)] * 2}, Accept=accept)
        assert (status, reply["error"]["reason"], headers["Retry-After"]) == (429, "busy", "1")
        # One more may come.
        assert (await served.post("/score", row(1)))[0] == 200
        served.source.release.set()
        assert (await held)[0] == 200
        # The bound holds for a request that comes alone, too.
        status, reply, _ = await served.post("/score", {"samples": [row(1)] * 5}, Accept=accept)
        detail = "a request has at most so many samples: 4 (max_samples of RewardServer)"
        assert (status, reply["error"]["detail"]) == (413, detail)
        assert served.engine.statistics().submitted == 4
        assert served.server.under_way == 0


async def test_the_token(serve, row):
    async with serve(token="s3cret-token") as served:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret-token"}):
            status, reply, _ = await served.post("/score", row(1), **headers)
            assert (status, reply["error"]["reason"]) == (401, "token")
            assert "s3cret" not in json.dumps(reply)
            assert (await served.get("/metrics", **headers))[0] == 401
            assert (await served.get("/facts", **headers))[0] == 401
            assert (await served.get("/healthz", **headers))[0] == 200
        assert (await served.post("/score", row(1), Authorization="Bearer s3cret-token"))[0] == 200
        for header in ("x-api-key", "x-goog-api-key"):
            assert (await served.get("/v1/models", **{header: "s3cret-token"}))[0] == 200
            assert (await served.get("/facts", **{header: "s3cret-token"}))[0] == 401


@each_of(
    ("headers", "status", "said"),
    [
        ({"Origin": "http://evil.example"}, 403, "the web page http://evil.example"),
        ({"Host": "rebound.example"}, 403, "the host rebound.example"),
        ({"Content-Type": "text/plain"}, 415, "text/plain"),
    ],
)
async def test_a_page_in_a_browser_is_refused_where_there_is_no_token(serve, row, headers, status, said):
    async with serve() as served, aiohttp.ClientSession() as session:
        for path in ("/score", "/v1/chat/completions"):
            code, answer, _ = await served.post(path, row(1), **headers)
            assert (code, said in json.dumps(answer), "token" in json.dumps(answer)) == (status, True, True)
        if status == 403:
            async with session.get(f"{served.url}/facts", headers=headers) as reply:
                assert reply.status == status
        assert served.source.samples == []
    async with serve(token="secret") as served:
        assert (await served.post("/score", row(1), Authorization="Bearer secret", **headers))[0] == 200


@each_of("host", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}", "192.168.0.9", "localhost"])
async def test_programs_of_this_machine_need_no_token(serve, row, host):
    async with serve() as served:
        name = host.format(served.url.rpartition(":")[2])
        headers = {"Host": name, "Origin": f"http://{name}", "Content-Type": "application/json; charset=utf-8"}
        assert (await served.post("/score", row(1), **headers))[0] == 200


@each_of("host", ["0.0.0.0", "::", "example.org", ""])
def test_an_address_that_others_reach_needs_a_token(host):
    engine = RewardEngine(
        {"sources": {"s": {"kind": "http", "url": "http://127.0.0.1:9"}}, "judges": {"j": {"kind": "function"}}}
    )
    with pytest.raises(InputError, match="--token-env"):
        RewardServer(engine, host=host)
    with pytest.raises(InputError, match="the token is empty"):
        RewardServer(engine, host=host, token=" ")
    RewardServer(engine, host=host, token="x")


async def test_draining_lets_what_is_under_way_end(serve, row):
    async with serve() as served:
        held = asyncio.ensure_future(served.post("/score", row("hold")))
        await served.source.holding.wait()
        draining = asyncio.ensure_future(served.server.drain(20))
        await asyncio.sleep(0)
        status, reply, headers = await served.post("/score", row(1))
        assert (status, reply["error"]["reason"], headers["Retry-After"]) == (503, "closed", "1")
        assert (await served.get("/readyz"))[0] == 503
        assert (await served.get("/healthz"))[0] == 200
        served.source.release.set()
        assert (await held)[:1] == (200,)
        assert await draining == 0


async def test_readiness_and_metrics(serve, row):
    async with serve() as served:
        assert json.loads((await served.get("/readyz"))[1])["status"] == "ready"
        await served.post("/score", {"samples": [row(1), row("babble")]})
        text = (await served.get("/metrics"))[1]
        for line in (
            "qreward_samples_scored_total 1.0",
            'qreward_samples_failed_total{cause="verdict",reason="invalid"} 1.0',
            'qreward_http_requests_total{path="/score",status="207"} 1.0',
            'qreward_source_in_flight{source="obedient"} 0.0',
        ):
            assert line in text, text


# Callers that send slowly, or without the token

HEAD = "POST {} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n"


async def reply_to(url, text):
    """What a server answers to a request whose body never comes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(text.encode())
        return (await asyncio.wait_for(reader.readuntil(b"\r\n"), 5)).decode()
    finally:
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_comes_too_slowly(serve, monkeypatch):
    monkeypatch.setattr("qreward_plugins.server.forms.BODY_WITHIN_S", 0.1)
    async with serve() as served:
        assert " 408 " in await reply_to(served.url, HEAD.format("/score", 100) + '\r\n{"prompt"')
        assert served.source.samples == []


async def test_nobody_fills_the_memory_without_the_token(serve):
    """The token is checked before the body is there, and no body is read where no token is needed."""
    async with serve(token="right") as served:
        head = HEAD.format("/score", 100)
        assert " 401 " in await reply_to(served.url, f"{head}Authorization: Bearer wrong\r\n\r\n")
        for path in ("/healthz", "/readyz"):
            assert " 405 " in await reply_to(served.url, HEAD.format(path, 2**26) + "\r\n" + "x" * 1000)


# The dashboard that shows the metrics

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


def test_the_dashboard_asks_for_metrics_that_are_there_with_labels_that_they_have():
    # What the server tells of a source with two replicas and a budget, after a failed sample.
    counts = ("in_flight", "pending_tokens", "requests", "failures", "prompt_tokens", "cached_tokens")
    told = {**dict.fromkeys(counts, 1), "health": "up", "prefix_hit_rate": 0.5, "cache_use": None}
    replicas = tuple(ReplicaStatistics(base_url=url, **told) for url in ("http://a", "http://b"))
    shares = {"requests_share": None, "tokens_share": None, "paced": False, "budget_left_usd": 1.0}
    gauges = SourceGauges(state="up", in_flight=1, replicas=replicas, **shares)
    now: EngineStatistics = Statistics().snapshot({"a": gauges}, waiting=0)
    object.__setattr__(now, "failed", {"infra/deadline": 1})
    text = exposition(now, 1, Counter({("/score", 200): 1})).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    labels = {sample.name: set(sample.labels) for sample in samples}
    board = json.loads(DASHBOARD.read_text())
    asked = set()
    for panel in board["panels"]:
        assert panel["description"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            expression = target["expr"]
            names = set(re.findall(r"qreward_\w+", expression))
            assert names <= labels.keys(), names - labels.keys()
            asked |= names
            grouped = {label for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(", ")}
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown == grouped <= set.union(*(labels[name] for name in names)), expression
            assert expression.count("(") == expression.count(")")
    assert len(asked) > 15
    (job,) = [each["query"] for each in board["templating"]["list"] if each["name"] == "job"]
    assert set(re.findall(r"qreward_\w+", job)) <= labels.keys()
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places)
