"""Reward models behind inference servers: the bodies that are sent, one response or several, and the numbers that come.

Bodies and replies are those of the projects' own protocol files; those of vLLM were also seen on a server (0.32).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import yaml
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins import RewardEngine, Sample, load_config
from qreward_plugins.cli.probe import probe
from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.errors import ConfigurationError, InvalidReply, PermanentError, SampleRefused, TransientError
from qreward_plugins.samples import Failed, Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import Request, RewardModelSource
from qreward_plugins.sources.rendering import MOST_STEPS, ChatTemplate, StepTokenizer

from ..kit import each_of
from .wire import outcome_of, serving

pytestmark = pytest.mark.anyio
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
    "vllm_score": (
        "/score",
        {"model": "rm", "queries": "2 + 2?", "documents": "4", "use_activation": False},
        {"model": "rm", "data": [{"index": 0, "object": "score", "score": 1.758}], "usage": USAGE},
        {"0": 1.758},
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


@pytest.fixture
def template(tmp_path: Any) -> str:
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}))
    return str(tmp_path)


def opened(url: str, **settings: Any) -> RewardModelSource:
    config = {"kind": "reward_model", "base_url": url, "model": "rm", **settings}
    return RewardModelSource("rm", RewardModelSource.Config.model_validate(config))


def request(response: str, *before: Any) -> Request:
    turns = (*(before or MESSAGES[:1]), {"role": "assistant", "content": response})
    return Request(Sample([], response), messages=turns)


Ask = Callable[..., Any]


@pytest.fixture
def ask(template: str) -> Ask:
    """Send one request, or several as one; returns the outcome, and the exchange. The answer may depend on the body."""

    async def asked(answer: Any, protocol: str, request_: Any = None, reply: Any = None, **settings: Any) -> Any:
        def script(exchange: Any) -> None:
            exchange.reply(answer(exchange.json) if callable(answer) else answer, **(reply or {}))

        if protocol in RENDERED_HERE:
            settings = {"chat_template": template, **settings}
        async with serving(script) as server:
            source = opened(server.url, protocol=protocol, **settings)
            outcome = await outcome_of(source, request_ or request("4"))
            await source.aclose()
        return outcome, server.exchanges[0] if server.exchanges else None

    return asked


@pytest.mark.parametrize("protocol", PROTOCOLS)
async def test_each_protocol(ask: Ask, protocol: str) -> None:
    path, body, said, logits = PROTOCOLS[protocol]
    reply, exchange = await ask(said, protocol)
    assert exchange.head.startswith(f"POST {path} HTTP/1.1\r\n")
    assert exchange.json == body
    assert reply.value == logits
    assert reply.usage == (Usage(9, 0) if "prompt_tokens" in json.dumps(said) else None)
    for wrong in ({}, [], 0.5, {"data": []}, {"data": [{}]}, {"rewards": [1, 2]}, [[1]], {"results": 1}):
        outcome, _ = await ask(wrong, protocol)
        assert isinstance(outcome, InvalidReply)
        assert f"not one of POST {path}; check `protocol`" in str(outcome)


def test_answers_of_another_model_are_not_used_again(template: str) -> None:
    """Not every protocol sends the name of the model, and the address may be that of the model before."""
    settings = {"protocol": "openrlhf", "chat_template": template, "version": "1"}
    first, same, other = (
        opened("http://localhost:1", model=model, **settings).question(request("4")) for model in ("rm", "rm", "other")
    )
    assert first == same != other


# Chat templates


async def test_the_bos_token_stays_where_the_server_adds_none(ask: Ask, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    _, exchange = await ask(PROTOCOLS["openrlhf"][2], "openrlhf", chat_template=str(tmp_path))
    assert exchange.json["query"] == [TEXT]


async def test_several_turns_are_one_text_where_two_are_read(ask: Ask) -> None:
    turns = request("4", {"role": "system", "content": "Be kind."}, MESSAGES[0])
    _, exchange = await ask(PROTOCOLS["vllm_score"][2], "vllm_score", turns)
    assert exchange.json["queries"] == "[system]\nBe kind.\n\n[user]\n2 + 2?"


async def test_a_template_may_use_every_special_token_and_mark_the_generation(ask: Ask, tmp_path: Path) -> None:
    marked = "{{ cls_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ sep_token }}"
    tokens = {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}, "chat_template": f"{marked}{{% endfor %}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    _, exchange = await ask([{"label": "x", "score": 1}], "tei_predict", chat_template=str(tmp_path))
    assert exchange.json["inputs"] == "[CLS]2 + 2?[SEP]4[SEP]"


async def test_a_template_that_refuses_the_messages_costs_only_the_sample(ask: Ask, tmp_path: Path) -> None:
    path = tmp_path / "strict.jinja"
    path.write_text("{{ raise_exception('roles must alternate') }}")
    outcome, exchange = await ask({}, "openrlhf", chat_template=str(path))
    assert isinstance(outcome, SampleRefused)
    assert "the chat template refuses the messages: TemplateError: roles must alternate" in str(outcome)
    assert exchange is None


# Numbers and errors


@each_of(
    ("numbers", "text"),
    [
        ("[NaN]", "NaN"),
        ("[1e39]", "no finite number"),
        ("[true]", "no finite number"),
        ('["0.5"]', "no finite number"),
        ("[]", "0 numbers for one response"),
        (json.dumps([0.5] * 1001), "1,001 numbers for one response"),
    ],
)
async def test_what_is_no_logit(ask: Ask, numbers: str, text: str) -> None:
    outcome, _ = await ask(f'{{"data": [{{"probs": {numbers}}}]}}', "vllm_classify")
    assert isinstance(outcome, InvalidReply)
    assert text in str(outcome)


@each_of(
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
async def test_labels_are_short_distinct_texts_of_one_response(ask: Ask, said: Any) -> None:
    assert isinstance((await ask(said, "tei_predict"))[0], InvalidReply)


async def test_a_label_that_echoes_the_key_is_redacted(ask: Ask) -> None:
    key = "sk-0123456789abcdef"
    reply, _ = await ask([{"label": key, "score": 1.5}], "tei_predict", api_key=key)
    assert reply.value == {"***": 1.5}
    outcome, _ = await ask([{"label": key, "score": "high"}], "tei_predict", api_key=key)
    assert "(label '***')" in str(outcome)


async def test_errors_of_the_server(ask: Ask) -> None:
    said = {"error": {"message": "maximum context length is 1024 tokens", "type": "BadRequestError", "code": 400}}
    for reply in ({"status": "400 Bad Request"}, {}):
        outcome, _ = await ask(said, "vllm_classify", reply=reply)
        assert (outcome.status, type(outcome)) == (400, PermanentError)
    outcome, _ = await ask("<html>", "vllm_classify")
    assert isinstance(outcome, TransientError)
    outcome, _ = await ask({"detail": "Not Found"}, "vllm_classify", reply={"status": "404 Not Found"})
    assert "check `protocol`, and that base_url has no path" in str(outcome)


# Configurations


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"protocol": "openrlhf"}, "sources.rm.chat_template: openrlhf takes a finished text"),
        ({"protocol": "vllm_score", "chat_template": "."}, "sends prompt and response as two texts"),
        ({"chat_template": "/nowhere"}, "it does not exist"),
        ({"chat_template": "empty"}, "it has no chat template"),
        ({"chat_template": "broken.jinja"}, "line 1 of the chat template: TemplateSyntaxError"),
        ({"chat_template": "tokenizer_config.json"}, "cannot be read (JSONDecodeError)"),
        ({"parameters": {"input": "x"}}, "sources.rm.parameters.input: the conversation is written here"),
        ({"parameters": {"use_activation": True}}, "sources.rm.parameters.use_activation: vllm_classify needs another"),
        ({"url": "http://h/classify"}, "sources.rm.base_url: /classify is added to it"),
    ],
)
def test_mistakes_are_named(settings, said, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.jinja").write_text("{% if %}")
    (tmp_path / "tokenizer_config.json").write_text("{")
    monkeypatch.chdir(tmp_path)
    if settings.get("chat_template", "tokenizer_config.json") != "tokenizer_config.json":
        (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigurationError) as caught:
        opened(**{"url": "http://localhost:1", **settings})
    assert said in str(caught.value)


def test_the_base_url_may_not_end_as_its_path_begins(template: str) -> None:
    with pytest.raises(ConfigurationError, match="base_url: /v1/embeddings is added to it"):
        opened("http://h/v1", protocol="sglang_embeddings", chat_template=template)
    opened("http://h/v1", protocol="sglang_classify", chat_template=template)
    # A server that refuses an unknown key can do without it.
    opened("http://h", protocol="vllm_classify", parameters={"use_activation": None, "priority": 1})


async def test_images_need_a_server_that_renders_the_conversation() -> None:
    with pytest.raises(ConfigurationError) as caught:
        opened("http://h", protocol="vllm_score", vision=True)
    assert [mistake.path for mistake in caught.value.mistakes] == ["sources.rm.vision"]
    turn: Any = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    source = opened("http://h", protocol="vllm_score")
    outcome = await outcome_of(source, request("4", turn))
    assert isinstance(outcome, SampleRefused)
    assert "images are sent only if the server renders" in str(outcome)
    await source.aclose()


def test_the_example_of_the_docs_opens() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reward_models.md").read_text()
    block = page.split("```yaml\n")[1].split("```")[0]
    config = load_config(yaml.safe_load(block))
    assert list(config.judges) == ["quality"]
    RewardEngine(config)
    assert all(f"`{protocol}`" in page for protocol in (*PROTOCOLS, "vllm_steps"))


async def test_a_reward_model_scores_a_batch() -> None:
    """From the configuration to rewards, one bad response among good ones."""

    def script(exchange: Any) -> None:
        response = exchange.json["messages"][-1]["content"]
        if response == "too long":
            exchange.reply({"error": {"message": "maximum context length", "code": 400}}, status="400 Bad Request")
        else:
            # At the start the engine asks about texts, too.
            logit = float(response) if response.isdecimal() else float(len(response))
            exchange.reply({"data": [{"probs": [0.0, logit]}], "usage": USAGE})

    judge = {"kind": "reward_model", "label": 1, "transform": {"affine": {"scale": 0.5}}}
    async with serving(script) as server:
        config = {
            "sources": {"rm": {"kind": "reward_model", "base_url": server.url, "model": "m"}},
            "judges": {"j": {**judge, "on_invalid": "floor", "floor": -9.0}},
        }
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all(
                [Sample([{"role": "user", "content": "?"}], text) for text in ("1", "too long", "3", "")]
            )
    assert [outcome.verdict.score for outcome in outcomes if isinstance(outcome, Scored)] == [0.5, -9.0, 1.5, -9.0]


# Several responses in one request


def rendered(text: str) -> str:
    return f"user: 2 + 2?\nassistant: {text}\n"


def score(text: str) -> float:
    """The logit of a rendered conversation or of a response: the length of the response."""
    return float(len(text.rpartition("assistant: ")[2].strip()))


def data(texts: list[str], item: Any) -> dict[str, Any]:
    results = [{"index": index, **item(score(text))} for index, text in enumerate(texts)]
    return {"model": "rm", "data": results, "usage": {"prompt_tokens": 30, "total_tokens": 30}}


ANSWERS: dict[str, Any] = {
    "vllm_classify": lambda body: data(body["input"], lambda logit: {"probs": [logit], "label": "LABEL_0"}),
    "vllm_score": lambda body: data(body["documents"], lambda logit: {"score": logit}),
    "sglang_classify": lambda body: [
        {"embedding": [score(text)], "meta_info": {"prompt_tokens": 10}} for text in body["text"]
    ],
    "sglang_embeddings": lambda body: data(body["input"], lambda logit: {"embedding": [logit]}),
    "tei_predict": lambda body: [[{"label": "0", "score": score(text)}] for (text,) in body["inputs"]],
    "openrlhf": lambda body: {"rewards": [score(text) for text in body["query"]]},
}
"""What each server answers to a body with lists, by the projects' protocol files."""


@pytest.fixture
def ask_three(ask: Ask, template: str) -> Ask:
    """Send three requests as one; `change` changes the answer."""

    async def asked(protocol: str, change: Any = lambda said: said, **reply: Any) -> Any:
        own = {} if protocol == "vllm_score" else {"chat_template": template}
        requests = [request(text) for text in ("a", "bb", "ccc")]
        options = {"batch": {"max_size": 8}, "reply": reply, **own}
        return await ask(lambda body: change(ANSWERS[protocol](body)), protocol, requests, **options)

    return asked


def items_of(said: Any) -> list[Any]:
    found: list[Any] = said if isinstance(said, list) else said["data"] if "data" in said else said["rewards"]
    return found


@pytest.mark.parametrize("protocol", ANSWERS)
async def test_each_protocol_takes_lists(ask_three: Ask, protocol: str) -> None:
    results, exchange = await ask_three(protocol)
    assert [result.value["0"] for result in results] == [1.0, 2.0, 3.0]
    stated = [result.usage for result in results]
    if "prompt_tokens" in json.dumps(ANSWERS[protocol](exchange.json)):
        assert sum(usage.prompt_tokens for usage in stated) == 30
    else:
        assert stated == [None] * 3
    if protocol.startswith("vllm") or protocol == "sglang_embeddings":
        results, _ = await ask_three(protocol, lambda said: {**said, "data": said["data"][::-1]})
        assert [result.value["0"] for result in results] == [1.0, 2.0, 3.0]
    texts = ["a", "bb", "ccc"]
    bodies: dict[str, Any] = {
        "vllm_classify": {"model": "rm", "input": list(map(rendered, texts)), "use_activation": False},
        "vllm_score": {"model": "rm", "queries": ["2 + 2?"] * 3, "documents": texts, "use_activation": False},
        "tei_predict": {"inputs": [[rendered(text)] for text in texts], "raw_scores": True},
        "openrlhf": {"query": list(map(rendered, texts)), "prompts": ["2 + 2?"] * 3},
    }
    assert exchange.json == bodies.get(protocol, exchange.json)
    for change in (lambda said: items_of(said).pop(), lambda said: items_of(said).append(items_of(said)[0])):
        error, _ = await ask_three(protocol, lambda said, change=change: (change(said), said)[1])
        assert isinstance(error, InvalidReply)
        assert "results for 3 calls; each is asked again alone" in str(error)


@each_of("index", [None, True, 0, 7, "1", -1])
async def test_results_without_a_unique_index_are_an_invalid_reply(ask_three: Ask, index: Any) -> None:
    def change(said: Any) -> Any:
        said["data"][1]["index"] = index
        return said

    error, _ = await ask_three("vllm_classify", change)
    assert isinstance(error, InvalidReply)
    assert "indices are not those of the calls" in str(error)


@each_of(
    "said",
    [{}, [], 0.5, {"data": 3}, {"data": {}}, {"data": [1, 2]}, {"data": [{"probs": [1.0]}] * 3}],
)
async def test_another_shape_is_an_invalid_reply(ask_three: Ask, said: Any) -> None:
    assert isinstance((await ask_three("vllm_classify", lambda _: said))[0], InvalidReply)


async def test_one_bad_response_is_the_error_of_one(ask_three: Ask, tmp_path: Path) -> None:
    def change(said: Any) -> Any:
        said["data"][1]["probs"] = [1e39]
        return said

    results, _ = await ask_three("vllm_classify", change)
    assert isinstance(results[1], InvalidReply)
    assert [results[0].value["0"], results[2].value["0"]] == [1.0, 3.0]
    strict = "{% if 'bb' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": strict}))
    results, exchange = await ask_three("vllm_classify")
    assert isinstance(results[1], SampleRefused)
    assert [results[0].value["0"], results[2].value["0"]] == [1.0, 3.0]
    assert len(exchange.json["input"]) == 2


def test_the_question_of_the_journal_does_not_depend_on_the_batch(template: str) -> None:
    first, second = (
        opened("http://rm:1", chat_template=template, **settings).question(request("a"))
        for settings in ({}, {"batch": {"max_size": 8}})
    )
    assert first == second is not None


@pytest.mark.parametrize(
    ("settings", "path", "said"),
    [
        ({"protocol": "vllm_classify"}, "sources.rm.batch", "the server renders one conversation a request"),
        ({"protocol": "tei_rerank"}, "sources.rm.batch", "takes one prompt a request"),
        ({"protocol": "vllm_score", "batch": {"max_size": 1}}, "sources.rm.batch.max_size", "2"),
        ({"protocol": "vllm_score", "batch": {"max_size": 8, "max_tokens": 4}}, "sources.rm.batch.max_tokens", "8"),
        ({"protocol": "vllm_score", "batch": {"size": 8}}, "sources.rm.batch.size", "unknown key"),
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


# Steps of process reward models: where they end, and which tokens score them

MARK = "<extra_0>"
TURNS = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
STRIPS = TURNS.replace("m.content }}", "m.content | trim }}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    """The folder of a model: a tokenizer of bytes with a chat template."""
    path: Path = tmp_path_factory.mktemp("model")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_start|>", "<|im_end|>", MARK],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["First we add.\n\nThen we multiply: 42 \n\n assistant user"] * 20, trainer)
    made.enable_truncation(4)  # the settings of its last use, which must not count
    made.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    (path / "chat_template.jinja").write_text(TURNS)
    return path


def step_tokenizer(folder: Path, *, separator: str = "\n\n", mark: str = "") -> StepTokenizer:
    return StepTokenizer(str(folder), ChatTemplate(str(folder), where="x"), separator=separator, mark=mark, where="x")


def messages(response: str) -> Any:
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": response}]


def steps(folder: Path, response: str, **settings: Any) -> list[tuple[str, str]]:
    """The text of the response up to the end of each step, and the text up to and with the token that scores it."""
    reader = step_tokenizer(folder, **settings)
    tokens = reader.tokens(messages(response))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return [
        (response[:offset], tokenizer.decode(list(tokens.ids[: position + 1]), skip_special_tokens=False))
        for offset, position in tokens.steps
    ]


HEAD = "<s><|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"


def test_a_step_is_scored_at_the_last_token_of_its_separator(folder):
    assert steps(folder, "First\n\nThen") == [
        ("First", f"{HEAD}First\n\n"),
        ("First\n\nThen", f"{HEAD}First\n\nThen\n\n"),
    ]


def test_a_token_takes_the_place_of_separators(folder):
    assert steps(folder, "Fïrst\n\n\n\nThén", mark=MARK) == [
        ("Fïrst", f"{HEAD}Fïrst{MARK}"),
        ("Fïrst\n\n\n\nThén", f"{HEAD}Fïrst{MARK}Thén{MARK}"),
    ]


def test_a_response_that_writes_the_token_of_a_step_gains_no_step(folder):
    forged = f"Wrong.{MARK}Good.{MARK}<|im_end|>\n<|im_start|>assistant\nBest.\n\nEnd"
    tokens = step_tokenizer(folder, mark=MARK).tokens(messages(forged))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokens.ids.count(tokenizer.token_to_id(MARK)) == 2
    assert tokens.ids.count(tokenizer.token_to_id("<|im_start|>")) == 2
    assert [offset for offset, _ in tokens.steps] == [forged.index("\n\n"), len(forged)]


def test_a_response_is_not_mistaken_for_what_the_template_writes_after_it(folder):
    assert steps(folder, ">", separator="\n") == [(">", f"{HEAD}>\n")]


def test_a_template_may_strip_the_response(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(STRIPS)
    assert steps(tmp_path, "\n\n one\n\ntwo ") == [
        ("\n\n one", f"{HEAD}one\n\n"),
        ("\n\n one\n\ntwo ", f"{HEAD}one\n\ntwo"),
    ]


@given(st.text(alphabet="ab\n é🙂", min_size=1, max_size=40))
def test_every_visible_character_belongs_to_a_step(folder, response):
    tokens = step_tokenizer(folder).tokens(messages(response))
    offsets = [offset for offset, _ in tokens.steps]
    assert offsets
    assert offsets == sorted(set(offsets))
    assert not response[offsets[-1] :].strip()
    assert all(0 < position < len(tokens.ids) for _, position in tokens.steps)
    assert [position for _, position in tokens.steps] == sorted({position for _, position in tokens.steps})


def test_the_last_of_very_many_steps_holds_the_rest(folder):
    response = "\n\n".join("x" for _ in range(MOST_STEPS + 50))
    tokens = step_tokenizer(folder).tokens(messages(response))
    assert len(tokens.steps) == MOST_STEPS
    assert tokens.steps[-1][0] == len(response)


def process_model(url: str, folder: Path, **settings: Any) -> RewardModelSource:
    own = {"protocol": "vllm_steps", "chat_template": str(folder)}
    return opened(url, **{**own, **settings})


async def steps_of(folder: Path, rows: Callable[[list[int]], Any]) -> tuple[Any, Any]:
    """Ask about two steps; `rows` makes the numbers of the tokens."""

    def script(exchange: Any) -> None:
        exchange.reply({"model": "prm", "data": [{"index": 0, "data": rows(exchange.json["input"])}]})

    async with serving(script) as server:
        source = process_model(server.url, folder)
        outcome = await outcome_of(source, request("First\n\nThen"))
        await source.aclose()
    return outcome, server.exchanges[0]


async def test_the_reply_has_the_logits_of_each_step(folder: Path) -> None:
    reply, exchange = await steps_of(folder, lambda ids: [[float(at), -float(at)] for at, _ in enumerate(ids)])
    tokens = step_tokenizer(folder).tokens(messages("First\n\nThen"))
    assert exchange.head.startswith("POST /pooling HTTP/1.1")
    settings = {"model": "rm", "task": "token_classify", "use_activation": False}
    assert exchange.json == {"input": list(tokens.ids), **settings}
    assert reply.value == [(end, {"0": float(place), "1": -float(place)}) for end, place in tokens.steps]


@each_of(
    ("rows", "said"),
    [
        (lambda ids: [[0.5]] * (len(ids) - 1), "tokens, and was asked about"),
        (lambda ids: [[None]] * len(ids), "list of finite logits for the step that ends at character 5"),
        (lambda ids: [0.5] * len(ids), "finite logits"),
        (lambda ids: [[]] * len(ids), "finite logits"),
        (lambda ids: [[0.0] * 101] * len(ids), "finite logits"),
        (lambda ids: 0.5, "gave no numbers"),
    ],
)
async def test_what_is_no_reply_of_a_process_reward_model(folder: Path, rows: Any, said: str) -> None:
    outcome, _ = await steps_of(folder, rows)
    assert isinstance(outcome, InvalidReply)
    assert said in str(outcome)


def test_other_steps_are_another_question(folder: Path) -> None:
    choices: list[dict[str, Any]] = [{}, {"step_separator": "\n"}, {"step_token": MARK}]
    questions = [process_model("http://localhost:1", folder, **each).question(request("a")) for each in choices]
    assert len(set(map(repr, questions))) == 3


@each_of(
    ("settings", "said"),
    [
        ({"chat_template": None}, "sources.rm.chat_template: vllm_steps takes a finished text"),
        ({"protocol": "vllm_classify", "step_token": "x"}, "sources.rm.step_token: only a process reward model"),
        ({"step_separator": ""}, "step_separator"),
    ],
)
def test_mistakes_about_steps_are_named(folder: Path, settings: Any, said: str) -> None:
    with pytest.raises((ConfigurationError, ValueError)) as caught:
        process_model("http://localhost:1", folder, **settings)
    assert said in str(caught.value)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(TURNS)
    for said in ("does not exist", "cannot be read"):
        with pytest.raises(ConfigurationError, match=said):
            process_model("http://localhost:1", tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")


# The start of an engine: a reward model that gives every text the same numbers ends it with the likely cause

SAMPLE = Sample([{"role": "user", "content": "?"}], "four")


def scripted(logits: Callable[[str], Any], heard: list[str]) -> Any:
    def script(exchange: Any) -> None:
        heard.append(exchange.json["messages"][-1]["content"])
        said = logits(heard[-1])
        if isinstance(said, int):
            exchange.reply({}, status=f"{said} Error")
        else:
            exchange.reply({"data": [{"probs": said}]})

    return script


def configured(server: Any) -> dict[str, Any]:
    source = {"kind": "reward_model", "base_url": server.url, "model": "m", "limits": {"concurrency": 1}}
    return {"sources": {"rm": source}, "judges": {"j": {"kind": "reward_model", "label": 0}}}


async def test_different_numbers_start_after_two_questions_that_all_callers_share() -> None:
    heard: list[str] = []
    async with (
        serving(scripted(lambda text: [float(len(text))], heard)) as server,
        RewardEngine(configured(server)) as engine,
    ):
        waiting = [asyncio.ensure_future(engine.score(SAMPLE)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        outcomes = await asyncio.gather(*waiting[1:])
        assert [outcome.reward for outcome in outcomes] == [4.0] * 4
        assert (engine.statistics().submitted, engine.statistics().sources["rm"].requests) == (4, 6)
    assert heard == [PAIRS[0].bad, PAIRS[0].good, *["four"] * 4]


@each_of(
    ("logits", "cause"),
    [
        ([1.0], "a softmax over one logit is 1 for every text"),
        ([0.0], "the server seems to apply an activation"),
        ([0.25, -3.0], "cut every text to the same few tokens"),
    ],
)
async def test_equal_numbers_end_the_start(logits: list[float], cause: str) -> None:
    heard: list[str] = []
    async with serving(scripted(lambda _: logits, heard)) as server, RewardEngine(configured(server)) as engine:
        for ask in (engine.score(SAMPLE), engine.score_all([SAMPLE] * 3), engine.score(SAMPLE)):
            with pytest.raises(ConfigurationError) as caught:
                await ask
            (mistake,) = caught.value.mistakes
            assert mistake.path == "sources.rm"
            assert cause in str(mistake)
            assert "right answers and nonsense the same numbers" in str(mistake)
        assert "four" not in heard
        assert len(heard) == 2 * len(PAIRS)
        (result,) = await probe(engine)  # `qreward check` names the same cause
    assert result.trial is not None
    assert cause in result.trial.problem


@each_of(
    ("logits", "reward"),
    [
        (lambda text: [float(text == PAIRS[1].bad)], 0.0),  # they differ in one pair only
        (lambda text: [4.0] if text == "four" else 400, 4.0),  # a source that does not answer is not tested
    ],
)
async def test_what_is_enough_to_start(logits: Callable[[str], Any], reward: float) -> None:
    async with serving(scripted(logits, [])) as server, RewardEngine(configured(server)) as engine:
        assert (await engine.score(SAMPLE)).reward == reward


async def test_the_start_does_not_outlast_the_deadline() -> None:
    async with serving(lambda exchange: exchange.hung_up()) as server, RewardEngine(configured(server)) as engine:
        outcome = await engine.score(SAMPLE, deadline_s=0.05)
    assert isinstance(outcome, Failed)
    assert outcome.reason == "deadline"


async def test_sources_that_a_caller_gives_are_not_asked() -> None:
    heard: list[str] = []
    async with serving(scripted(lambda _: [1.0], heard)) as server:
        config = configured(server)
        source = RewardEngine(config).upstreams["rm"].source
        async with RewardEngine(config, sources={"rm": source}) as engine:
            assert (await engine.score(SAMPLE)).reward == 1.0
    assert heard == ["four"]
