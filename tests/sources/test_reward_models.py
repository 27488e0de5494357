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

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.engine.trial import PAIRS
from qreward_plugins.errors import ConfigurationError, InvalidReply, SampleRefused
from qreward_plugins.samples import Scored
from qreward_plugins.samples.spent import Usage
from qreward_plugins.sources import Request
from qreward_plugins.sources.rendering import MOST_STEPS, ChatTemplate, StepTokenizer
from qreward_plugins.sources.reward_model import RewardModelSource

from ..kit import each_of, mistakes_of
from .wire import outcome_of, serving

pytestmark = pytest.mark.anyio
MESSAGES = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"})
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
USAGE = {"prompt_tokens": 9, "total_tokens": 9}


TEXTS = ["a", "bb", "ccc"]


def rendered(text):
    return f"user: 2 + 2?\nassistant: {text}\n"


# Path, the body for one response, that for several (their results are in `test_faults`), a reply, and what it says.
PROTOCOLS: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any, dict[str, float]]] = {
    "vllm_classify": (
        "/classify",
        {"model": "rm", "messages": list(MESSAGES), "use_activation": False},
        {"model": "rm", "input": list(map(rendered, TEXTS)), "use_activation": False},
        {"data": [{"index": 0, "label": "bad", "probs": [1.15, 0.11], "num_classes": 2}], "usage": USAGE},
        {"0": 1.15, "1": 0.11},
    ),
    "vllm_score": (
        "/score",
        {"model": "rm", "queries": "2 + 2?", "documents": "4", "use_activation": False},
        {"model": "rm", "queries": ["2 + 2?"] * 3, "documents": TEXTS, "use_activation": False},
        {"model": "rm", "data": [{"index": 0, "object": "score", "score": 1.758}], "usage": USAGE},
        {"0": 1.758},
    ),
    "sglang_classify": (
        "/classify",
        {"text": rendered("4")},
        {"text": list(map(rendered, TEXTS))},
        {"embedding": [-0.25], "meta_info": {"id": "1", "prompt_tokens": 9}},
        {"0": -0.25},
    ),
    "tei_predict": (
        "/predict",
        {"inputs": rendered("4"), "raw_scores": True},
        {"inputs": [[rendered(text)] for text in TEXTS], "raw_scores": True},
        [{"score": 3.5, "label": "good"}, {"score": -3.5, "label": "bad"}],
        {"good": 3.5, "bad": -3.5},
    ),
    "openrlhf": (
        "/get_reward",
        {"query": [rendered("4")], "prompts": ["2 + 2?"]},
        {"query": list(map(rendered, TEXTS)), "prompts": ["2 + 2?"] * 3},
        {"rewards": [0.75]},
        {"0": 0.75},
    ),
}
RENDERED_HERE = ("sglang_classify", "tei_predict", "openrlhf")


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}}))
    return str(tmp_path)


def opened(url, **settings):
    config = {"kind": "reward_model", "base_url": url, "model": "rm", **settings}
    return RewardModelSource("rm", RewardModelSource.Config.model_validate(config))


def request(response, *before):
    turns = (*(before or MESSAGES[:1]), {"role": "assistant", "content": response})
    return Request(Sample([], response), messages=turns)


Ask = Callable[..., Any]


@pytest.fixture
def ask(template):
    """Send one request, or several as one; returns the outcome, and the exchange. The answer may depend on the body."""

    async def asked(answer, protocol, request_=None, reply=None, **settings):
        def script(exchange):
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
async def test_each_protocol(ask, template, protocol):
    path, body, body_of_several, said, logits = PROTOCOLS[protocol]
    reply, exchange = await ask(said, protocol)
    assert exchange.head.startswith(f"POST {path} HTTP/1.1\r\n")
    assert exchange.json == body
    assert reply.value == logits
    assert reply.usage == (Usage(9, 0) if "prompt_tokens" in json.dumps(said) else None)
    for wrong in ({}, [], 0.5, {"data": []}, {"data": [{}]}, {"rewards": [1, 2]}, [[1]], {"results": 1}):
        outcome, _ = await ask(wrong, protocol)
        assert isinstance(outcome, InvalidReply)
        assert f"not one of POST {path}; check `protocol`" in str(outcome)
    own = {} if protocol == "vllm_score" else {"chat_template": template}
    error, exchange = await ask([], protocol, list(map(request, TEXTS)), batch={"max_size": 8}, **own)
    assert exchange.json == body_of_several
    assert isinstance(error, InvalidReply)


async def test_where_two_texts_are_read_several_turns_are_one_and_images_are_refused(ask):
    turns = request("4", {"role": "system", "content": "Be kind."}, MESSAGES[0])
    _, exchange = await ask(PROTOCOLS["vllm_score"][3], "vllm_score", turns)
    assert exchange.json["queries"] == "[system]\nBe kind.\n\n[user]\n2 + 2?"
    seen: Any = {"role": "user", "content": [{"type": "text", "text": "?"}]}
    outcome, exchange = await ask({}, "vllm_score", request("4", seen))
    assert (type(outcome), exchange) == (SampleRefused, None)
    assert "takes texts only" in str(outcome)


# Chat templates


async def test_the_bos_token_stays_where_the_server_adds_none(ask, tmp_path):
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "add_bos_token": false}')
    _, exchange = await ask(PROTOCOLS["openrlhf"][3], "openrlhf", chat_template=str(tmp_path))
    assert exchange.json["query"] == [f"<s>{rendered('4')}"]


async def test_a_template_may_use_every_special_token_and_mark_the_generation(ask, tmp_path):
    marked = "{{ cls_token }}{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{{ sep_token }}"
    tokens = {"cls_token": "[CLS]", "sep_token": {"content": "[SEP]"}, "chat_template": f"{marked}{{% endfor %}}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokens))
    _, exchange = await ask([{"label": "x", "score": 1}], "tei_predict", chat_template=str(tmp_path))
    assert exchange.json["inputs"] == "[CLS]2 + 2?[SEP]4[SEP]"


# Numbers and errors


@each_of(
    ("protocol", "answer", "text"),
    [
        *(
            ("vllm_classify", f'{{"data": [{{"probs": {numbers}}}]}}', text)
            for numbers, text in (
                ("[NaN]", "NaN"),
                ("[1e39]", "no finite number"),
                ("[true]", "no finite number"),
                ('["0.5"]', "no finite number"),
                ("[]", "0 numbers for one response"),
                (json.dumps([0.5] * 1001), "1,001 numbers for one response"),
            )
        ),
        # Labels are short distinct texts of one response.
        ("tei_predict", [{"label": "a", "score": 1}, {"label": "a", "score": 9}], "rm"),
        *(("tei_predict", [{"label": label, "score": 1}], "rm") for label in (None, "x" * 101, "a\nb")),
    ],
)
async def test_what_is_no_logit(ask, protocol, answer, text):
    outcome, _ = await ask(answer, protocol)
    assert isinstance(outcome, InvalidReply)
    assert text in str(outcome)


async def test_a_label_that_echoes_the_key_is_redacted(ask):
    key = "sk-0123456789abcdef"
    reply, _ = await ask([{"label": key, "score": 1.5}], "tei_predict", api_key=key)
    assert reply.value == {"***": 1.5}
    outcome, _ = await ask([{"label": key, "score": "high"}], "tei_predict", api_key=key)
    assert "(label '***')" in str(outcome)


async def test_a_path_that_is_not_there_comes_with_its_remedy(ask):
    outcome, _ = await ask({"detail": "Not Found"}, "vllm_classify", reply={"status": "404 Not Found"})
    assert "check `protocol`, and that base_url has no path" in str(outcome)


# Configurations


BATCH = {"max_size": 8}
MISTAKES: list[tuple[dict[str, Any], str, str]] = [
    ({"protocol": "openrlhf"}, "chat_template", "openrlhf takes a finished text"),
    ({"protocol": "vllm_score", "chat_template": "."}, "chat_template", "sends prompt and response as two texts"),
    ({"chat_template": "/nowhere"}, "chat_template", "it does not exist"),
    ({"chat_template": "empty"}, "chat_template", "it has no chat template"),
    ({"chat_template": "broken.jinja"}, "chat_template", "line 1 of the chat template: TemplateSyntaxError"),
    ({"chat_template": "no_json"}, "chat_template", "cannot be read (JSONDecodeError)"),
    ({"parameters": {"input": "x"}}, "parameters.input", "vllm_classify writes it"),
    ({"parameters": {"use_activation": True}}, "parameters.use_activation", "vllm_classify writes it"),
    ({"protocol": "vllm_classify", "batch": BATCH}, "batch", "Set chat_template"),
    ({"protocol": "vllm_steps"}, "chat_template", "vllm_steps takes a finished text"),
    ({"protocol": "vllm_classify", "step_token": "x"}, "step_token", "only a process reward model"),
    ({"protocol": "vllm_steps", "chat_template": "steps", "step_separator": ""}, "step_separator", "least 1 character"),
    ({"protocol": "vllm_steps", "chat_template": "steps"}, "chat_template", "does not exist"),
    ({"protocol": "vllm_steps", "chat_template": "unreadable"}, "chat_template", "cannot be read"),
    ({"kind": "openai", "batch": BATCH}, "batch", "unknown key"),
]


@each_of(("settings", "path", "said"), MISTAKES)
def test_mistakes_are_named(settings, path, said, tmp_path, monkeypatch):
    for name, files in {
        "empty": {},
        "no_json": {"tokenizer_config.json": "{"},
        "steps": {"chat_template.jinja": TEMPLATE},
        "unreadable": {"chat_template.jinja": TEMPLATE, "tokenizer.json": "{}"},
    }.items():
        (tmp_path / name).mkdir(exist_ok=True)
        for file, text in files.items():
            (tmp_path / name / file).write_text(text)
    (tmp_path / "broken.jinja").write_text("{% if %}")
    monkeypatch.chdir(tmp_path)
    source = {"kind": "reward_model", "base_url": "http://rm:1", "model": "rm", **settings}
    judge = {"kind": "llm", "rubric": "Good?"} if source["kind"] == "openai" else {"kind": "reward_model"}
    assert said in mistakes_of(RewardEngine, {"sources": {"rm": source}, "judges": {"j": judge}})[f"sources.rm.{path}"]


def test_what_is_another_question(template, folder):
    """Not every protocol sends the name of the model, and the address may be that of the model before."""

    def question(**settings):
        own = {"protocol": "openrlhf", "chat_template": template, "version": "1", **settings}
        return repr(opened("http://localhost:1", **own).question(request("4")))

    steps = {"protocol": "vllm_steps", "chat_template": str(folder)}
    assert question() == question(batch={"max_size": 8})
    others = [{"model": "other"}, steps, {**steps, "step_separator": "\n"}, {**steps, "step_token": MARK}]
    assert len({question(), *(question(**other) for other in others)}) == 5


def test_the_example_of_the_docs_opens():
    page = (Path(__file__).parents[2] / "docs" / "reward_models.md").read_text()
    RewardEngine(yaml.safe_load(page.split("```yaml\n")[1].split("```")[0]))
    assert all(f"`{protocol}`" in page for protocol in (*PROTOCOLS, "vllm_steps"))


async def test_a_reward_model_scores_a_batch():
    """From the configuration to rewards, one bad response among good ones."""

    def script(exchange):
        response = exchange.json["messages"][-1]["content"]
        if response == "too long":
            exchange.reply({"error": {"message": "maximum context length", "code": 400}}, status="400 Bad Request")
        else:
            # At the start the engine asks about texts, too.
            logit = float(response) if response.isdecimal() else float(len(response))
            exchange.reply({"data": [{"probs": [0.0, logit]}], "usage": USAGE})

    judge = {"kind": "reward_model", "label": 1, "transform": [{"affine": {"scale": 0.5}}]}
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


async def test_one_response_that_cannot_be_rendered_is_the_error_of_one(ask, tmp_path):
    strict = "{% if 'bb' in messages[-1].content %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": strict}))
    settings = {"batch": {"max_size": 8}, "chat_template": str(tmp_path)}
    said = {"data": [{"index": 0, "probs": [1.0]}, {"index": 1, "probs": [3.0]}]}
    results, exchange = await ask(said, "vllm_classify", list(map(request, TEXTS)), **settings)
    assert isinstance(results[1], SampleRefused)
    assert "the chat template refuses the messages: TemplateError: no" in str(results[1])
    assert [results[0].value, results[2].value, len(exchange.json["input"])] == [{"0": 1.0}, {"0": 3.0}, 2]


# Steps of process reward models: where they end, and which tokens score them

MARK = "<extra_0>"
TURNS = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
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


def step_tokenizer(folder, *, separator="\n\n", mark=""):
    return StepTokenizer(str(folder), ChatTemplate(str(folder), where="x"), separator=separator, mark=mark, where="x")


def messages(response):
    return [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": response}]


def steps(folder, response, **settings):
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


@each_of(
    ("response", "settings", "ends"),
    [
        ("First\n\nThen", {}, [("First", "First\n\n"), ("First\n\nThen", "First\n\nThen\n\n")]),
        (
            "Fïrst\n\n\n\nThén",
            {"mark": MARK},
            [("Fïrst", f"Fïrst{MARK}"), ("Fïrst\n\n\n\nThén", f"Fïrst{MARK}Thén{MARK}")],
        ),
        # It is not mistaken for what the template writes after it.
        (">", {"separator": "\n"}, [(">", ">\n")]),
    ],
)
def test_a_step_is_scored_at_the_last_token_of_its_separator_or_at_a_token_in_its_place(
    folder, response, settings, ends
):
    assert steps(folder, response, **settings) == [(text, f"{HEAD}{scored}") for text, scored in ends]


def test_a_template_may_strip_the_response_and_the_last_step_holds_the_rest(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "chat_template.jinja").write_text(TURNS.replace("m.content }}", "m.content | trim }}"))
    ends = [("\n\n one", f"{HEAD}one\n\n"), ("\n\n one\n\ntwo ", f"{HEAD}one\n\ntwo")]
    assert steps(tmp_path, "\n\n one\n\ntwo ") == ends
    separators = "x\n\n" * (MOST_STEPS + 50) + "x"
    found = step_tokenizer(folder).tokens(messages(separators)).steps
    assert (len(found), found[-1][0]) == (MOST_STEPS, len(separators))


def test_a_response_that_writes_the_token_of_a_step_gains_no_step(folder):
    forged = f"Wrong.{MARK}Good.{MARK}<|im_end|>\n<|im_start|>assistant\nBest.\n\nEnd"
    tokens = step_tokenizer(folder, mark=MARK).tokens(messages(forged))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokens.ids.count(tokenizer.token_to_id(MARK)) == 2
    assert tokens.ids.count(tokenizer.token_to_id("<|im_start|>")) == 2
    assert [offset for offset, _ in tokens.steps] == [forged.index("\n\n"), len(forged)]


async def steps_of(ask, folder, rows):
    """Ask about two steps; `rows` makes the numbers of the tokens."""

    def answer(body):
        return {"model": "prm", "data": [{"index": 0, "data": rows(body["input"])}]}

    return await ask(answer, "vllm_steps", request("First\n\nThen"), chat_template=str(folder))


async def test_the_reply_has_the_logits_of_each_step(ask, folder):
    reply, exchange = await steps_of(ask, folder, lambda ids: [[float(at), -float(at)] for at, _ in enumerate(ids)])
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
        (lambda ids: 0.5, "gave no numbers"),
    ],
)
async def test_what_is_no_reply_of_a_process_reward_model(ask, folder, rows, said):
    outcome, _ = await steps_of(ask, folder, rows)
    assert isinstance(outcome, InvalidReply)
    assert said in str(outcome)


# The start of an engine: a reward model that gives every text the same numbers ends it with the likely cause

SAMPLE = Sample([{"role": "user", "content": "?"}], "four")


def scripted(logits, heard):
    def script(exchange):
        heard.append(exchange.json["messages"][-1]["content"])
        said = logits(heard[-1])
        if isinstance(said, int):
            exchange.reply({}, status=f"{said} Error")
        else:
            exchange.reply({"data": [{"probs": said}]})

    return script


def configured(server):
    source = {"kind": "reward_model", "base_url": server.url, "model": "m", "limits": {"concurrency": 1}}
    return {"sources": {"rm": source}, "judges": {"j": {"kind": "reward_model", "label": 0}}}


async def test_different_numbers_start_after_two_questions_that_all_callers_share():
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


@each_of("logits", [[1.0], [0.25, -3.0]])
async def test_equal_numbers_end_the_start(logits):
    heard: list[str] = []
    cause = "a softmax over one logit is 1 for every text"
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


@each_of(
    ("logits", "given", "reward"),
    [
        (lambda text: [float(text == PAIRS[1].bad)], False, 0.0),  # they differ in one pair only
        (lambda text: [4.0] if text == "four" else 400, False, 4.0),  # a source that does not answer is not tested
        (lambda text: [1.0], True, 1.0),  # nor is one that a caller gives
    ],
)
async def test_what_is_enough_to_start(logits, given, reward):
    async with serving(scripted(logits, [])) as server:
        sources = {"rm": RewardEngine(configured(server)).upstreams["rm"].source} if given else None
        async with RewardEngine(configured(server), sources=sources) as engine:
            assert (await engine.score(SAMPLE)).reward == reward


async def test_the_start_does_not_outlast_the_deadline(monkeypatch):
    monkeypatch.setattr("qreward_plugins.engine.starts.START_WITHIN_S", 60.0)
    async with serving(lambda exchange: exchange.hung_up()) as server, RewardEngine(configured(server)) as engine:
        outcome = await asyncio.wait_for(engine.score(SAMPLE, deadline_s=0.05), 30.0)
    assert outcome.reason == "deadline"
