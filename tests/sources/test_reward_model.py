"""Reward models behind inference servers: the bodies that are sent, and what is made of the replies.

Bodies and replies are those of the projects' own protocol files; those of vLLM were also seen on a server (0.32).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.errors import (
    ConfigurationError,
    InputError,
    InvalidReply,
    QRewardError,
    SampleRefused,
    TransientError,
)
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import Request, RewardModelSource
from qreward_plugins.sources.rendering import ChatTemplate

pytestmark = pytest.mark.anyio
PATIENCE_S = 10.0
MESSAGES = (
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
)
TEXT = "<s>user: 2 + 2?\nassistant: 4\n"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USAGE = {"prompt_tokens": 9, "total_tokens": 9}

PROTOCOLS = {
    "vllm_classify": (
        "/classify",
        {"model": "rm", "messages": list(MESSAGES), "use_activation": False},
        {
            "object": "list",
            "model": "rm",
            "data": [{"index": 0, "label": "bad", "probs": [1.15, 0.11], "num_classes": 2}],
            "usage": USAGE,
        },
        {"0": 1.15, "1": 0.11},
    ),
    "vllm_pooling": (
        "/pooling",
        {"model": "rm", "messages": list(MESSAGES), "task": "classify", "use_activation": False},
        {"object": "list", "model": "rm", "data": [{"index": 0, "object": "pooling", "data": [0.9]}], "usage": USAGE},
        {"0": 0.9},
    ),
    "vllm_score": (
        "/score",
        {"model": "rm", "queries": "2 + 2?", "documents": "4", "use_activation": False},
        {"model": "rm", "data": [{"index": 0, "object": "score", "score": 1.758}], "usage": USAGE},
        {"0": 1.758},
    ),
    "vllm_rerank": (
        "/rerank",
        {"model": "rm", "query": "2 + 2?", "documents": ["4"], "use_activation": False},
        {"model": "rm", "results": [{"index": 0, "document": {"text": "4"}, "relevance_score": -2.5}], "usage": USAGE},
        {"0": -2.5},
    ),
    "sglang_classify": (
        "/classify",
        {"text": TEXT.removeprefix("<s>")},
        {"embedding": [-0.25], "meta_info": {"id": "1", "prompt_tokens": 9}},
        {"0": -0.25},
    ),
    "sglang_embeddings": (
        "/v1/embeddings",
        {"model": "rm", "input": TEXT.removeprefix("<s>")},
        {"model": "rm", "data": [{"embedding": [2.0], "index": 0, "object": "embedding"}], "usage": USAGE},
        {"0": 2.0},
    ),
    "tei_predict": (
        "/predict",
        {"inputs": TEXT.removeprefix("<s>"), "raw_scores": True},
        [{"score": 3.5, "label": "good"}, {"score": -3.5, "label": "bad"}],
        {"good": 3.5, "bad": -3.5},
    ),
    "tei_rerank": (
        "/rerank",
        {"query": "2 + 2?", "texts": ["4"], "raw_scores": True},
        [{"index": 0, "score": 4.25}],
        {"0": 4.25},
    ),
    "openrlhf": (
        "/get_reward",
        {"query": [TEXT.removeprefix("<s>")], "prompts": ["2 + 2?"]},
        {"rewards": [0.75]},
        {"0": 0.75},
    ),
}
RENDERED_HERE = ("sglang_classify", "sglang_embeddings", "tei_predict", "openrlhf")


def unheard() -> None:
    pass


@pytest.fixture
def template(tmp_path: Any) -> str:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}))
    return str(tmp_path)


def opened(url: str, **settings: Any) -> RewardModelSource:
    config = {"kind": "reward_model", "base_url": url, "model": "rm", **settings}
    return RewardModelSource("rm", RewardModelSource.Config.model_validate(config))


@pytest.fixture
def ask(serve: Any, template: str) -> Callable[..., Any]:
    """Send one request; returns the reply or the error, and the exchange."""

    async def asked(answer: Any, protocol: str, messages: Any = MESSAGES, reply: Any = None, **settings: Any) -> Any:
        async def script(exchange: Any) -> None:
            exchange.reply(json.dumps(answer) if not isinstance(answer, str) else answer, **(reply or {}))

        if protocol in RENDERED_HERE:
            settings = {"chat_template": template, **settings}
        async with serve(script) as server:
            source = opened(server.base_url.removesuffix("/v1"), protocol=protocol, **settings)
            request = Request(Sample([], "4"), messages=messages)
            try:
                outcome: Any = await asyncio.wait_for(source.send(request, on_sent=unheard), PATIENCE_S)
            except QRewardError as error:
                outcome = error
            await source.aclose()
        return outcome, server.exchanges[0] if server.exchanges else None

    return asked


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_each_protocol(ask, protocol):
    path, body, said, logits = PROTOCOLS[protocol]
    reply, exchange = await ask(said, protocol)
    assert exchange.head.startswith(f"POST {path} HTTP/1.1\r\n")
    assert json.loads(exchange.body) == body
    assert reply.value == logits
    assert reply.usage == (Usage(9, 0) if "prompt_tokens" in json.dumps(said) else None)


async def test_a_server_of_vllm_may_get_a_rendered_text(ask, template):
    _, exchange = await ask(PROTOCOLS["vllm_classify"][2], "vllm_classify", chat_template=template)
    body = {"model": "rm", "input": TEXT.removeprefix("<s>"), "use_activation": False}
    assert json.loads(exchange.body) == body


async def test_the_bos_token_stays_where_the_server_adds_none(ask, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    _, exchange = await ask(PROTOCOLS["openrlhf"][2], "openrlhf", chat_template=str(tmp_path))
    assert json.loads(exchange.body)["query"] == [TEXT]


async def test_several_turns_are_one_text_where_two_are_read(ask):
    turns = ({"role": "system", "content": "Be kind."}, *MESSAGES)
    _, exchange = await ask(PROTOCOLS["vllm_score"][2], "vllm_score", messages=turns)
    assert json.loads(exchange.body)["queries"] == "[system]\nBe kind.\n\n[user]\n2 + 2?"


async def test_a_template_may_use_every_special_token_and_mark_the_generation(ask, tmp_path):
    template = "{{ cls_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ sep_token }}"
    tokens = {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}, "chat_template": f"{template}{{% endfor %}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    _, exchange = await ask([{"label": "x", "score": 1}], "tei_predict", chat_template=str(tmp_path))
    assert json.loads(exchange.body)["inputs"] == "[CLS]2 + 2?[SEP]4[SEP]"


async def test_a_template_that_refuses_the_messages_costs_only_the_sample(ask, tmp_path):
    path = tmp_path / "strict.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")
    outcome, exchange = await ask({}, "openrlhf", chat_template=str(path))
    assert isinstance(outcome, SampleRefused)
    assert "the chat template refuses the messages: TemplateError: roles must alternate" in str(outcome)
    assert exchange is None


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(
    "said", [{}, [], 0.5, {"data": []}, {"data": [{}]}, {"rewards": [1, 2]}, [[1]], {"results": 1}]
)
async def test_another_shape_is_an_invalid_reply(ask, protocol, said):
    outcome, _ = await ask(said, protocol)
    assert isinstance(outcome, InvalidReply)
    assert f"not one of POST {PROTOCOLS[protocol][0]}; check `protocol`" in str(outcome)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ("[NaN]", "NaN"),
        ("[1e39]", "no finite number"),
        ("[true]", "no finite number"),
        ('["0.5"]', "no finite number"),
        ("[null]", "no finite number"),
        ("[]", "0 numbers for one response"),
        (json.dumps([0.5] * 1001), "1,001 numbers for one response"),
    ],
)
async def test_what_is_no_logit(ask, numbers, text):
    outcome, _ = await ask(f'{{"data": [{{"probs": {numbers}}}]}}', "vllm_classify")
    assert isinstance(outcome, InvalidReply)
    assert text in str(outcome)


@pytest.mark.parametrize(
    "said",
    [
        [{"label": "a", "score": 1}, {"label": "a", "score": 9}],
        [[{"label": "a", "score": 1}], [{"label": "a", "score": 9}]],
        [{"label": "1", "score": 1}, {"label": 1, "score": 9}],
        [{"label": None, "score": 1}],
        [{"label": "x" * 101, "score": 1}],
        [{"label": "a\nb", "score": 1}],
    ],
)
async def test_labels_are_short_distinct_texts_of_one_response(ask, said):
    outcome, _ = await ask(said, "tei_predict")
    assert isinstance(outcome, InvalidReply)


async def test_a_label_that_echoes_the_key_is_redacted(ask):
    key = "sk-0123456789abcdef"
    reply, _ = await ask([{"label": key, "score": 1.5}], "tei_predict", api_key=key)
    assert reply.value == {"***": 1.5}
    outcome, _ = await ask([{"label": key, "score": "high"}], "tei_predict", api_key=key)
    assert isinstance(outcome, InvalidReply)
    assert "(label '***')" in str(outcome)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_of_another_model_are_not_used_again(protocol, template):
    """Not every protocol sends the name of the model, and the address may be that of the model before."""
    settings = {"chat_template": template} if protocol in RENDERED_HERE else {}
    request = Request(Sample([], "4"), messages=MESSAGES)
    questions = [
        opened("http://localhost:1", protocol=protocol, model=model, version="1", **settings).question(request)
        for model in ("rm", "rm", "other")
    ]
    assert questions[0] == questions[1] != questions[2]


async def test_an_unknown_path_is_one_of_another_protocol(ask):
    outcome, _ = await ask({"detail": "Not Found"}, "vllm_classify", reply={"status": "404 Not Found"})
    assert "check `protocol`, and that base_url has no path" in str(outcome)
    assert "/v1" not in str(outcome)


async def test_errors_of_the_server(ask):
    said = {"error": {"message": "maximum context length is 1024 tokens", "type": "BadRequestError", "code": 400}}
    outcome, _ = await ask(said, "vllm_classify", reply={"status": "400 Bad Request"})
    assert (outcome.status, type(outcome).__name__) == (400, "PermanentError")
    outcome, _ = await ask(said, "vllm_classify")
    assert outcome.status == 400
    outcome, _ = await ask("<html>", "vllm_classify")
    assert isinstance(outcome, TransientError)


FILES = {
    "other.json": "{}",
    "list.json": "[]",
    "notes.txt": "Buy milk.",
    "prompt_only.jinja": "{{ messages[0].content }}",
}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protocol": "openrlhf"}, "sources.rm.chat_template: openrlhf takes a finished text"),
        ({"protocol": "vllm_score", "chat_template": "."}, "sends prompt and response as two texts"),
        ({"chat_template": "/nowhere"}, "it does not exist"),
        ({"chat_template": "empty"}, "it has no chat template"),
        ({"chat_template": "broken.jinja"}, "line 1 of the chat template: TemplateSyntaxError"),
        ({"chat_template": "tokenizer_config.json"}, "cannot be read (JSONDecodeError)"),
        ({"chat_template": "other.json"}, "'other.json': it has no chat template"),
        ({"chat_template": "list.json"}, "'list.json': it cannot be read"),
        ({"chat_template": "notes.txt"}, "what it writes does not hold the texts of the conversation"),
        ({"chat_template": "prompt_only.jinja"}, "what it writes does not hold the texts of the conversation"),
        ({"parameters": {"messages": None}}, "sources.rm.parameters.messages: the conversation is written here"),
        ({"parameters": {"input": "x"}}, "sources.rm.parameters.input: the conversation is written here"),
        ({"parameters": {"use_activation": True}}, "sources.rm.parameters.use_activation: vllm_classify needs another"),
        (
            {"protocol": "tei_rerank", "parameters": {"raw_scores": False}},
            "sources.rm.parameters.raw_scores: tei_rerank",
        ),
        ({"url": "http://h/classify"}, "sources.rm.base_url: /classify is added to it"),
    ],
)
def test_mistakes_are_named(settings, said, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    if settings.get("chat_template", "tokenizer_config.json") != "tokenizer_config.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        opened(**{"url": "http://localhost:1", **settings})
    assert said in str(caught.value)


def test_the_base_url_may_not_end_as_its_path_begins(template):
    with pytest.raises(ConfigurationError, match="base_url: /v1/embeddings is added to it"):
        opened("http://h/v1", protocol="sglang_embeddings", chat_template=template)
    opened("http://h/v1", protocol="sglang_classify", chat_template=template)
    # A server that refuses an unknown key can do without it.
    opened("http://h", protocol="vllm_classify", parameters={"use_activation": None, "priority": 1})


def test_a_chat_template_may_stand_in_a_json_file_of_its_own(tmp_path):
    path = tmp_path / "chat_template.json"
    path.write_text(json.dumps({"chat_template": "{% for m in messages %}{{ m.content }};{% endfor %}"}))
    assert ChatTemplate(str(path), where="").render([{"role": "user", "content": "a"}]) == "a;"


def test_an_unknown_protocol_is_named():
    config = {"sources": {"rm": {"kind": "reward_model", "base_url": "http://x", "model": "m", "protocol": "vllm"}}}
    config["judges"] = {"j": {"kind": "reward_model"}}
    with pytest.raises(ConfigurationError, match=r"sources\.rm\.protocol"):
        RewardEngine(config)


async def test_a_reward_model_scores_a_batch(serve):
    """From the configuration to rewards, one bad response among good ones."""

    async def script(exchange: Any) -> None:
        response = json.loads(exchange.body)["messages"][-1]["content"]
        if response == "too long":
            error = {"error": {"message": "maximum context length", "code": 400}}
            exchange.reply(json.dumps(error), status="400 Bad Request")
        else:
            # At the start the engine asks about texts, too.
            logit = float(response) if response.isdecimal() else float(len(response))
            exchange.reply(json.dumps({"data": [{"probs": [0.0, logit]}], "usage": USAGE}))

    async with serve(script) as server:
        config = {
            "sources": {"rm": {"kind": "reward_model", "base_url": server.base_url.removesuffix("/v1"), "model": "m"}},
            "judges": {
                "j": {
                    "kind": "reward_model",
                    "label": 1,
                    "transform": {"affine": {"scale": 0.5}},
                    "on_invalid": "floor",
                    "floor": -9.0,
                }
            },
        }
        async with RewardEngine(config) as engine:
            samples = [Sample([{"role": "user", "content": "?"}], text) for text in ("1", "too long", "3", "")]
            outcomes = await engine.score_all(samples)
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [0.5, -9.0, 1.5, -9.0]
    assert not any(isinstance(outcome, Failed) for outcome in outcomes)


def test_the_example_of_the_docs_opens():
    page = (Path(__file__).parents[2] / "docs" / "reward_models.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    config = load_config(yaml.safe_load(block))
    assert list(config.judges) == ["quality"]
    RewardEngine(config)
    assert all(f"`{protocol}`" in page for protocol in PROTOCOLS)


@pytest.mark.parametrize("settings", [{"protocol": "vllm_score"}, {"protocol": "tei_rerank"}])
def test_images_need_a_server_that_renders_the_conversation(settings):
    config = RewardModelSource.Config.model_validate(
        {"kind": "reward_model", "base_url": "http://h", "model": "rm", "vision": True, **settings}
    )
    with pytest.raises(ConfigurationError) as caught:
        RewardModelSource("a", config)
    assert [mistake.path for mistake in caught.value.mistakes] == ["sources.a.vision"]
    blind = RewardModelSource("a", config.model_copy(update={"vision": False}))
    parts = [{"type": "text", "text": "?"}]
    messages = ({"role": "user", "content": parts}, MESSAGES[1])
    with pytest.raises(InputError, match="images are sent only if the server renders"):
        blind.body(Request(Sample([], "4"), messages=messages))
