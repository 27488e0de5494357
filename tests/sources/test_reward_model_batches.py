"""Reward models asked for several responses in one request: bodies, replies, and what cannot be matched."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.errors import ConfigurationError, InvalidReply, PermanentError, QRewardError, SampleRefused
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.sources import Request, RewardModelSource
from qreward_plugins.testing import JudgeServer, PlayFault, ScoreCall

pytestmark = pytest.mark.anyio
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USAGE = {"prompt_tokens": 30, "total_tokens": 30}


def rendered(text: str) -> str:
    return f"user: 2 + 2?\nassistant: {text}\n"


def score(text: str) -> float:
    """The logit of a rendered conversation or of a response: the length of the response."""
    return float(len(text.rpartition("assistant: ")[2].strip()))


def data(texts: list[str], item: Any) -> dict[str, Any]:
    return {
        "model": "rm",
        "data": [{"index": index, **item(score(text))} for index, text in enumerate(texts)],
        "usage": USAGE,
    }


ANSWERS: dict[str, Any] = {
    "vllm_classify": lambda body: data(body["input"], lambda logit: {"probs": [logit], "label": "LABEL_0"}),
    "vllm_pooling": lambda body: data(body["input"], lambda logit: {"data": [logit]}),
    "vllm_score": lambda body: data(body["documents"], lambda logit: {"score": logit}),
    "sglang_classify": lambda body: [
        {"embedding": [score(text)], "meta_info": {"prompt_tokens": 10}} for text in body["text"]
    ],
    "sglang_embeddings": lambda body: data(body["input"], lambda logit: {"embedding": [logit]}),
    "tei_predict": lambda body: [[{"label": "0", "score": score(text)}] for (text,) in body["inputs"]],
    "openrlhf": lambda body: {"rewards": [score(text) for text in body["query"]]},
}
"""What each server answers to a body with lists, by the projects' protocol files."""
NUMBERED = [name for name in ANSWERS if name.startswith("vllm") or name == "sglang_embeddings"]


@pytest.fixture
def template(tmp_path: Any) -> str:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return str(tmp_path)


def node(url: str, protocol: str, template: str, **settings: Any) -> dict[str, Any]:
    own = {} if protocol == "vllm_score" else {"chat_template": template}
    batch = {"batch": {"max_size": 8}}
    return {"kind": "reward_model", "base_url": url, "model": "rm", "protocol": protocol, **batch, **own, **settings}


def request(response: str) -> Request:
    turns = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": response})
    return Request(Sample([], response), messages=turns)


@pytest.fixture
def ask(serve: Any, template: str) -> Any:
    """Send several requests as one; returns the results or the error, and the body."""

    async def asked(protocol: str, responses: list[str], change: Any = lambda said: said, **reply: Any) -> Any:
        async def script(exchange: Any) -> None:
            said = change(ANSWERS[protocol](json.loads(exchange.body)))
            exchange.reply(json.dumps(said), **reply)

        async with serve(script) as server:
            config = node(server.base_url.removesuffix("/v1"), protocol, template)
            source = RewardModelSource("rm", RewardModelSource.Config.model_validate(config))
            sent: list[bool] = []
            try:
                outcome: Any = await source.send_batch(list(map(request, responses)), on_sent=lambda: sent.append(True))
            except QRewardError as error:
                outcome = error
            await source.aclose()
        body = json.loads(server.exchanges[0].body) if server.exchanges else None
        assert len(server.exchanges) == len(sent) <= 1
        return outcome, body

    return asked


@pytest.mark.parametrize("protocol", ANSWERS)
async def test_each_protocol_takes_lists(ask, protocol):
    results, body = await ask(protocol, ["a", "bb", "ccc"])
    assert [result.value["0"] for result in results] == [1.0, 2.0, 3.0]
    stated = [result.usage for result in results]
    if "prompt_tokens" in json.dumps(ANSWERS[protocol](body)):
        assert sum(usage.prompt_tokens for usage in stated) == 30
    else:
        assert stated == [None] * 3


async def test_bodies_keep_everything_else(ask):
    _, body = await ask("vllm_classify", ["a", "bb"])
    assert body == {"model": "rm", "input": [rendered("a"), rendered("bb")], "use_activation": False}
    _, body = await ask("vllm_score", ["a", "bb"])
    assert (body["queries"], body["documents"]) == (["2 + 2?"] * 2, ["a", "bb"])
    _, body = await ask("tei_predict", ["a", "bb"])
    assert body == {"inputs": [[rendered("a")], [rendered("bb")]], "raw_scores": True}
    _, body = await ask("openrlhf", ["a", "bb"])
    assert body == {"query": [rendered("a"), rendered("bb")], "prompts": ["2 + 2?"] * 2}


@pytest.mark.parametrize("protocol", NUMBERED)
async def test_results_are_matched_by_their_index(ask, protocol):
    def shuffled(said: Any) -> Any:
        said["data"].reverse()
        return said

    results, _ = await ask(protocol, ["a", "bb", "ccc"], shuffled)
    assert [result.value["0"] for result in results] == [1.0, 2.0, 3.0]


def drop(said: Any) -> None:
    (said if isinstance(said, list) else said["data"] if "data" in said else said["rewards"]).pop()


def add(said: Any) -> None:
    items = said if isinstance(said, list) else said["data"] if "data" in said else said["rewards"]
    items.append(items[0])


@pytest.mark.parametrize("protocol", ANSWERS)
@pytest.mark.parametrize("change", [drop, add])
async def test_too_few_or_too_many_results_are_an_invalid_reply(ask, protocol, change):
    error, _ = await ask(protocol, ["a", "bb", "ccc"], lambda said: (change(said), said)[1])
    assert isinstance(error, InvalidReply)
    assert "results for 3 calls; each is asked again alone" in str(error)


@pytest.mark.parametrize("index", [None, True, 0, 7, "1", -1])
async def test_results_without_a_unique_index_are_an_invalid_reply(ask, index):
    def change(said: Any) -> Any:
        said["data"][1]["index"] = index
        return said

    error, _ = await ask("vllm_classify", ["a", "bb", "ccc"], change)
    assert isinstance(error, InvalidReply)
    assert "indices are not those of the calls" in str(error)


async def test_results_without_any_index_are_an_invalid_reply(ask):
    error, _ = await ask("vllm_pooling", ["a", "bb"], lambda said: {"data": [{"data": [1.0]}, {"data": [2.0]}]})
    assert isinstance(error, InvalidReply)
    assert "without an index" in str(error)


@pytest.mark.parametrize("said", [{}, [], 0.5, {"data": 3}, {"data": {}}, {"data": [1, 2]}])
async def test_another_shape_is_an_invalid_reply(ask, said):
    error, _ = await ask("vllm_classify", ["a", "bb"], lambda _: said)
    assert isinstance(error, InvalidReply)


async def test_a_logit_that_is_no_number_is_the_invalid_reply_of_one(ask):
    def change(said: Any) -> Any:
        said["data"][1]["probs"] = [1e39]
        return said

    results, _ = await ask("vllm_classify", ["a", "bb", "ccc"], change)
    assert isinstance(results[1], InvalidReply)
    assert [results[0].value["0"], results[2].value["0"]] == [1.0, 3.0]


async def test_a_conversation_that_cannot_be_rendered_costs_no_neighbour(ask, tmp_path):
    strict = "{% if 'bb' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": strict}))
    results, body = await ask("vllm_classify", ["a", "bb", "ccc"])
    assert isinstance(results[1], SampleRefused)
    assert [results[0].value["0"], results[2].value["0"]] == [1.0, 3.0]
    assert len(body["input"]) == 2


async def test_a_status_is_the_error_of_all(ask):
    error, _ = await ask("vllm_classify", ["a", "bb"], status="400 Bad Request")
    assert isinstance(error, PermanentError)
    assert error.status == 400


async def test_the_question_of_the_journal_does_not_depend_on_the_batch(template):
    def opened(**settings: Any) -> RewardModelSource:
        config = node("http://rm:1", "vllm_classify", template, **settings)
        return RewardModelSource("rm", RewardModelSource.Config.model_validate(config))

    assert opened().question(request("a")) == opened(batch=None).question(request("a"))


@pytest.mark.parametrize(
    ("settings", "path", "said"),
    [
        ({"protocol": "vllm_classify"}, "sources.rm.batch", "the server renders one conversation a request"),
        ({"protocol": "vllm_rerank"}, "sources.rm.batch", "takes one prompt a request"),
        ({"protocol": "tei_rerank"}, "sources.rm.batch", "takes one prompt a request"),
        ({"protocol": "vllm_score", "batch": {"max_size": 1}}, "sources.rm.batch.max_size", "2"),
        ({"protocol": "vllm_score", "batch": {"max_wait_s": -1}}, "sources.rm.batch.max_wait_s", "0"),
        ({"protocol": "vllm_score", "batch": {"max_size": 8, "max_tokens": 4}}, "sources.rm.batch.max_tokens", "8"),
        ({"protocol": "vllm_score", "batch": {"size": 8}}, "sources.rm.batch.size", "unknown key"),
        ({"protocol": "vllm_score", "batch": 8}, "sources.rm.batch", ""),
        ({"kind": "openai"}, "sources.rm.batch", "Only sources of kind"),
    ],
)
def test_wrong_batches_are_refused_at_the_start(settings, path, said):
    source = {"kind": "reward_model", "base_url": "http://rm:1", "model": "rm", "batch": {"max_size": 8}, **settings}
    judge = {"kind": "llm", "rubric": "Good?"} if source["kind"] == "openai" else {"kind": "reward_model"}
    with pytest.raises(ConfigurationError) as caught:
        RewardEngine({"sources": {"rm": source}, "judges": {"j": judge}})
    mistakes = {mistake.path: str(mistake) for mistake in caught.value.mistakes}
    assert path in mistakes
    assert said in mistakes[path]


async def test_an_engine_scores_a_batch_around_a_text_that_is_too_long(template):
    """As vLLM does: one over-long text fails the whole request."""
    sizes: list[int] = []

    def logit(call: ScoreCall) -> float:
        texts = call.parameters["input"]
        sizes.append(len(texts) if isinstance(texts, list) else 1)
        if "x" * 50 in call.response:
            raise PlayFault("error_400")
        return score(call.response)

    with JudgeServer(logit) as server:
        source = node(server.root_url, "vllm_classify", template, limits={"concurrency": 1}, model="judge")
        judge = {"kind": "reward_model", "transform": [{"affine": {"scale": 0.01}}]}
        async with RewardEngine({"sources": {"rm": source}, "judges": {"j": judge}}) as engine:
            samples = [Sample([{"role": "user", "content": "2 + 2?"}], "x" * n) for n in (*range(1, 16), 60)]
            outcomes = await asyncio.wait_for(engine.score_all(samples), 20)
            counted = engine.statistics().sources["rm"]
    assert [outcome.verdict.score for outcome in outcomes[:-1]] == [pytest.approx(n / 100) for n in range(1, 16)]
    assert all(isinstance(outcome, Scored) for outcome in outcomes[:-1])
    assert isinstance(outcomes[-1], Failed)
    assert "error_400" in outcomes[-1].detail
    assert max(sizes) == 8
    assert server.report().requests <= 10
    assert counted.mean_batch_size > 1
