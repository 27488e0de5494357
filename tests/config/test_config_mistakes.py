"""Every mistake is reported, at its place, in words, and without secrets."""

# ruff: noqa: E501 -- one line for each mistake and its message

from __future__ import annotations

import copy
import pickle
import textwrap
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import BaseModel

from qreward_plugins import RewardEngine
from qreward_plugins.config import Config, load_config
from qreward_plugins.config.check import _models
from qreward_plugins.config.findings import HABITS, path_text
from qreward_plugins.config.registry import rooms
from qreward_plugins.errors import ConfigurationError

from ..kit import each_of

FULL: dict[str, Any] = yaml.safe_load("""
sources:
  fast:
    kind: openai
    base_url: [https://a.example/v1, http://b:8000/v1]
    model: m
    api_key: sk-1
    headers: {x-team: t}
    parameters: {top_p: 1}
    limits:
      {requests_per_minute: 60, tokens_per_minute: 1.0e+6, concurrency: 8, window: auto, window_s: 60, burst: 2}
    timeouts: {connect_s: 1, total_s: 2.5}
    price: {input_per_million: 0, output_per_million: 1, per_request: 0.5}
    verify_tls: true
    max_reply_bytes: 1000
  slow: {kind: openai, base_url: https://a/v1, model: m, api_key_env: KEY}
  local:
    {kind: function, function: "a.b:c", arguments: sample, kwargs: {a: 1}, mode: thread, workers: 2,
     limits: {concurrency: 1}}
  service:
    kind: http
    url: ["http://a:1/score", "https://b/score/"]
    model: rm
    api_key_env: KEY
    headers: {x-team: t}
    parameters: {task: math}
    body: {text: response, q: prompt}
    score_key: data.0.score
    limits: {requests_per_minute: 60}
    verify_tls: false
judges:
  quality:
    {kind: llm, sources: [fast, slow], floor: 0, on_invalid: floor, invalid_retries: 2, correct_at: 0.5,
     instructions: Judge., system: "", criteria: {style: "Is it elegant?"}, score_range: [1, 5], reward_range: [-1, 1],
     response_format: none, temperature: 0.5, max_tokens: 10, seed: 1, max_prompt_chars: 1000,
     max_response_chars: 1000}
  exact: {kind: function, sources: local, reward_range: [0, 1], components: [format]}
  total: {kind: sum, weights: {quality: 0.8, exact: -0.2}, correct_at: 0.5}
routes: {math/*: exact, both/*: total, "*": quality}
engine: {deadline_s: 10, max_attempts: 2, seed: 1, journal: {path: j.sqlite, reuse: false}, budget: {usd: 9}}
on_failure: {constant: 0.5}
""")

NAMES = {("sources",), ("judges",), ("routes",)}
"""Mappings whose keys are the user's."""

FREE = {"headers", "parameters", "body", "kwargs", "criteria", "weights"}


def caught(source: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as info:
        load_config(source)
    return info.value


def messages(tree: Any) -> dict[str, str]:
    return {mistake.path: f"{mistake.problem} {mistake.remedy}".strip() for mistake in caught(tree).mistakes}


def changed(path: str, value: Any) -> dict[str, Any]:
    """`FULL` with another value at a dotted path; `...` takes the key out."""
    keys = tuple(path.split("."))
    tree, node = copied(keys)
    node[keys[-1]] = value
    if value is ...:
        del node[keys[-1]]
    return tree


def test_the_full_tree_is_valid() -> None:
    load_config(FULL)
    load_config(OmegaConf.create(FULL))


@each_of(
    ("path", "value", "place", "text"),
    [
        # Keys
        ("sources.fast.limits.concurency", 4, "", "unknown key. Did you mean `concurrency`?"),
        ("sources.fast.concurrency", 4, "", "unknown key. Write `limits.concurrency`. Requests in flight at once."),
        ("sources.fast.url", "x", "", "unknown key. Write `base_url`. URL up to and including the version, e.g. `https://api.example.com/v1`."),
        ("sources.fast.rpm", {}, "", "unknown key. Write `limits.requests_per_minute`."),
        ("sources.fast.limits.rpm", {}, "", "unknown key. Write `requests_per_minute`."),
        ("sources.fast.limits.timeout", {}, "", "unknown key. Write `sources.fast.timeouts.total_s`."),
        ("sources.fast.limits.requests_per_second", 5, "", "unknown key. Did you mean `requests_per_minute`? The unit differs."),
        ("sources.fast.limits.requests_per_min", 5, "", "unknown key. Did you mean `requests_per_minute`?"),
        ("sources.fast.timeouts.connect_ms", 10**9, "", "unknown key. Did you mean `connect_s`? The unit differs."),
        ("sources.fast.timeout_ms", 30000, "", "unknown key. Write `timeouts.total_s`. Seconds for the whole attempt,"),
        ("engine.deadline_ms", 300000, "", "unknown key. Did you mean `deadline_s`? The unit differs."),
        ("sources.fast.api_key_file", "/k", "", "unknown key. Write `api_key_env`. Name of the environment variable that holds"),
        ("sources.fast.retries", {}, "", "unknown key. Write `engine.max_attempts`."),
        ("judges.quality.prompt", {}, "", "unknown key. Write `instructions`."),
        ("rewards", {}, "", "unknown key. Write `judges`."),
        ("judges", ..., "", "the key is missing. Add the judges, by name. Only a file for clients, with `models`, needs none."),
        ("sources", [{"kind": "openai"}], "", "must be a mapping. Write a name below it, and `kind: ...` there. Its keys: kind,"),
        ("judges", {"": {"kind": "llm"}}, 'judges[""]', "a name must not be empty"),
        ("sources", {"judge#1": {"kind": "function", "function": "a:b"}}, 'sources["judge#1"]', "must not end in # and a number"),
        ("mine", {"kind": "openai", "model": "m"}, "", "unknown key. Indent it, to stand below `sources` or `judges`."),
        ("sources", {}, "", "must be a mapping with at least one entry. Add the sources, by name."),
        ("sources.service.url", ..., "", "the key is missing. The whole URL that requests are posted to, e.g."),
        ("sources.fast.model", ..., "", "the key is missing. Name of the model on the server."),
        # Kinds
        ("sources.fast.kind", "opnai", "", "unknown kind `opnai`. Did you mean `openai`? Allowed here: openai, reward_model, http, function, sandbox, embeddings, replicas."),
        ("sources.fast.kind", ..., "", "the key is missing. Add one of: openai, reward_model, http, function, sandbox, embeddings, replicas."),
        # Values
        ("sources.fast", None, "", "must be a mapping."),
        ("sources.fast.limits.requests_per_minute", "abc", "", "must be a number."),
        ("sources.fast.limits.requests_per_minute", True, "", "must be a number, not true."),
        ("sources.fast.limits.requests_per_minute", 0, "", "must be above 0, not 0."),
        ("sources.fast.limits.concurrency", 1.5, "", "must be a whole number, not 1.5."),
        ("sources.fast.limits.window", "slidng", "", "must be 'auto', 'sliding' or 'bucket', not 'slidng'. Did you mean `sliding`?"),
        ("sources.fast.verify_tls", "perhaps", "", "must be true or false."),
        ("sources.fast.model", 4, "", "must be text. Put it in quotes."),
        ("sources.fast.model", "https://user:pw@host/model", "", "the name of a model must not have credentials"),
        ("sources.fast.model", "$MODEL", "", "write ${oc.env:NAME}"),
        ("sources.fast.base_url", [], "", "must be a URL, or a list of URLs."),
        ("sources.fast.base_url", ["http://a", "b"], "sources.fast.base_url[1]", "a URL must start with http:// or"),
        ("sources.fast.base_url", "http://a b/v1", "", "a URL must not have blanks or control characters."),
        ("sources.fast.base_url", "http://[::1/v1", "", "a URL must have brackets around an IPv6 address, and a port"),
        ("sources.fast.base_url", "http://u:pw@b/v1", "", "a URL must not have credentials, a query or a fragment; put a key"),
        ("sources.fast.api_key_env", "KEY", "", "set api_key or api_key_env, not both."),
        ("sources.slow.api_key_env", "sk-1", "", "must be the name of an environment variable, or a list of such names."),
        ("sources.slow.api_key_env", ["A", "A"], "", "a variable is named twice"),
        ("sources.local.function", "a.b.c", "", "must be `package.module:name`, `path/to/file.py:name` or `ray:ACTOR.method`."),
        ("judges.quality.invalid_retries", 11, "", "must be 10 or less, not 11."),
        ("judges.quality.score_range", [5, 1], "", "the low end 5 must be below the high end 1."),
        ("judges.quality.score_range", [1], "", "must be a list of two numbers, the low and the high end."),
        ("engine.server", "http://u:p@h", "", "name the variable that holds the token in token_env."),
        ("engine.server", 3, "", "must be a URL, or a mapping with `url`, not 3."),
        ("engine.server", {"token_env": "X"}, "engine.server.url", "the key is missing."),
        ("engine.server", "http://h", "sources", "the reward server of `engine.server` has"),
        ("engine.server", "http://h", "engine.journal", "the reward server of `engine.server` has its own"),
        ("sources.slow.budget", {"usd": 5}, "", "the source has no price to count by; set `price`"),
        ("sources.fast.price", ..., "engine.budget", "no source has a price to count by. Set `sources.NAME.price`"),
        ("judges.quality.reward_range", [0, 1e39], "judges.quality.reward_range[1]", "infinite in float32"),
        ("judges.quality.floor", -1e39, "", "infinite in float32"),
        ("judges.total.weights.quality", 1e39, "", "infinite in float32"),
        ("on_failure.constant", -1e39, "", "infinite in float32"),
        ("engine.journal.redact", "[a", "", "not a regular expression: unterminated character set at position 0."),
        ("engine.journal.redact", ["a", "b*"], "engine.journal.redact[1]", "the pattern matches an empty text, so it would match between"),
        ("engine.journal", "v.sqlite", "", "must be a mapping. Write `path: ...` below it. Its keys: path, reuse"),
        ("on_failure", "exlude", "", "must be `auto`, `neutral`, `exclude`, `raise`, or a mapping with `constant`."),
        # Names
        ("routes", {"math/*": "exat"}, 'routes["math/*"]', "there is no judge `exat`. Did you mean `exact`? Judges: `quality`"),
        ("routes", {"math/*": "maths"}, 'routes["math/*"]', "there is no judge `maths`. Judges: `quality`"),
        ("routes", {"math/*": ""}, 'routes["math/*"]', "there is no such judge. Judges: `quality`"),
        ("judges.total.weights", {"qualty": 1}, "judges.total.weights.qualty", "there is no judge `qualty`. Did you mean `quality`? Judges: `quality`, `exact`."),
        ("judges.total.weights", {"total": 1}, "judges.total", "the judge is a part of itself: total > total."),
        ("judges.quality.sources", ["fast", "slwo"], "judges.quality.sources[1]", "there is no source `slwo`. Did you mean `slow`?"),
        ("judges.quality.sources", "slw*", "", "the pattern matches no source of kind openai or replicas. Patterns are matched against names,"),
        ("judges.quality.sources", "service", "", "`service` is a source of kind http, which cannot answer a judge of kind llm."),
        ("models", {"*": {"sources": ["s7"]}}, 'models["*"].sources[0]', "there is no source `s7`. Sources: `fast`, `slow`, "),
        ("models", {"*": {"sources": ["tOpSeCrEt-0123456789"]}}, 'models["*"].sources[0]', "there is no such source. Sources: `fast`, `slow`, "),
        # Interpolations
        ("engine.seed", "???", "", "has no value yet (`???`). Set it."),
        ("engine.seed", "${engine.sed}", "", "refers to a key that does not exist. `${oc.env:NAME}` is an environment variable,"),
        ("engine.seed", "${engine", "", "`${` starts an interpolation that cannot be read."),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_words(path: str, value: Any, place: str, text: str) -> None:
    found = messages(changed(path, value))
    assert text in found[place or path]
    assert text.endswith("differs.") == ("differs" in found[place or path])


FILE = """\
sources:
  s:
    kind: opnai
    base_url: localhost:8000
    modle: m
    api_key: ${oc.env:QREWARD_NO_SUCH_KEY}
    limits: {burst: 0}
    weight: ${nowhere}
judges:
  a: {kind: llm, rubric: Good,
      sources: [s9, s], seed: x}
  b: {kind: sum}
routes: {'*': aa}
engine:
  deadline_s: -1
  deadline_s: 0
  on: 1"""
IN_FILE = [
    (3, "sources.s.kind"), (4, "sources.s.base_url"), (5, "sources.s.modle"), (6, "sources.s.api_key"),
    (7, "sources.s.limits.burst"), (8, "sources.s.weight"), (10, "judges.a.rubric"), (11, "judges.a.sources[0]"),
    (11, "judges.a.seed"), (12, "judges.b.weights"), (13, 'routes["*"]'), (16, "engine.deadline_s"),
    (16, "engine.deadline_s"), (17, "engine.True"), (17, "engine.True"),
]  # fmt: skip


@each_of("below", [False, True])
def test_all_mistakes_of_a_file_come_at_once_each_with_its_line(below: bool, tmp_path: Path) -> None:
    path = tmp_path / "judges.yaml"
    path.write_text("qreward:\n" + textwrap.indent(FILE, "  ") if below else FILE)
    error = caught(path)
    assert [(mistake.line, mistake.path) for mistake in error.mistakes] == [(n + below, place) for n, place in IN_FILE]
    assert f"sources.s.modle (line {5 + below}): unknown key. Did you mean `model`?" in str(error)


def test_what_an_engine_finds_when_it_opens_has_its_place_and_its_file(tmp_path: Path) -> None:
    path = tmp_path / "judges.yaml"
    path.write_text(
        "sources:\n  a:\n    kind: openai\n    base_url: http://a/v1\n    model: m\n    api_key_env: QREWARD_NO_SUCH_KEY\n"
        "judges:\n  j:\n    kind: llm\n    instructions: '{{ nothing }}'\n"
    )
    for config in (path, load_config(path)):
        with pytest.raises(ConfigurationError) as raised:
            RewardEngine(config)
        assert [mistake.path for mistake in raised.value.mistakes] == ["sources.a.api_key_env"]
        assert str(path) in str(raised.value)


def has(model: type[BaseModel], path: tuple[str, ...]) -> bool:
    field = model.model_fields.get(path[0])
    return field is not None and (not path[1:] or any(has(below, path[1:]) for below in _models(field.annotation)))


def test_the_key_of_every_hint_exists() -> None:
    models = [Config, *(kind.Config for kinds in rooms.values() for _, kind in kinds.loadable())]
    assert len(HABITS) > 60
    assert [path for paths in HABITS.values() for path in paths if not any(has(each, path) for each in models)] == []


def test_judges_without_routes() -> None:
    two = changed("routes", {})
    two["judges"]["other"] = {"kind": "llm"}
    assert messages(two) == {
        "routes": "there are 2 judges that are not part of another (`total`, `other`), and no route chooses between them. "
        'Add routes, e.g. `"*": total`; the first match wins.'
    }
    del two["judges"]["total"]
    assert "there are 3 judges (`quality`, `exact`, `other`), and no route chooses" in messages(two)["routes"]


def test_unset_environment_variables_are_all_named_and_hide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QR_B", "QR_C"):
        monkeypatch.delenv(name, raising=False)
    tree = changed("sources.slow.base_url", "http://${oc.env:QR_B}:${oc.env:QR_C}/v1")
    tree["engine"]["deadline_s"] = 0
    assert [(m.path, m.remedy) for m in caught(tree).mistakes] == [
        ("sources.slow.base_url", "Set it: export QR_B=..."),
        ("sources.slow.base_url", "Set it: export QR_C=..."),
        ("engine.deadline_s", ""),
    ]
    monkeypatch.setenv("QR_B", "")
    assert messages(changed("sources.fast.api_key", "${oc.env:QR_B}")) == {
        "sources.fast.api_key": "is empty, or too short."
    }


def test_a_misspelt_key_is_one_mistake_and_what_stands_below_is_still_checked() -> None:
    tree = copy.deepcopy(FULL)
    tree["judgs"] = tree.pop("judges")
    assert list(messages(tree)) == ["judgs"]
    tree["judgs"]["quality"]["seed"] = "x"
    tree["routes"]["*"] = "qualty"
    assert list(messages(tree)) == ['routes["*"]', "judgs", "judgs.quality.seed"]


SECRET = "sk-SECRET"


@each_of(
    ("path", "value"),
    [
        ("sources.fast.api_key", [SECRET]),
        ("sources.fast.api_key", f"{SECRET}${{nowhere}}"),
        ("sources.fast.api_key", f"${{oc.env:{SECRET}}}"),
        ("sources.fast.apikey", SECRET),
        ("sources.fast.kind", {"openai": {"api_key": SECRET}}),
        ("sources.fast.limts", {"window": SECRET, "windw": SECRET}),
        ("sources.fast.model", f"https://user:{SECRET}@host/model"),
        ("sources.slow.api_key_env", SECRET),
        ("sources.service.body", {"token": SECRET}),
        ("sources.service.url", f"http://h/score?key={SECRET}"),
        ("sources.fast.base_url", f"http://user:{SECRET}@host/v1"),
        ("engine.server", f"http://user:{SECRET}@host"),
        ("engine.seed", "${oc.env:QR_SECRET}"),
    ],
)
def test_no_secret_gets_out(path: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QR_SECRET", SECRET)
    keys = tuple(path.split("."))
    tree, node = copied(keys)
    tree["sources"]["fast"] |= {"api_key": SECRET, "headers": {"Authorization": f"Bearer {SECRET}"}}
    node[keys[-1]] = value
    error = caught(tree)
    assert error.__cause__ is None
    assert error.__context__ is None
    texts = [str(error), repr(error), repr(error.mistakes), repr(error.args), *traceback.format_exception(error)]
    assert SECRET not in "".join(texts)
    assert SECRET.encode() not in pickle.dumps(error)


def paths_of(node: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, value in node.items():
        yield (*above, key)
        if isinstance(value, dict) and key not in FREE:
            yield from paths_of(value, (*above, key))


ALL_PATHS = sorted(paths_of(FULL))
OUR_KEYS = [path for path in ALL_PATHS if path[:-1] not in NAMES and path[-1] != "kind"]


def copied(path: tuple[Any, ...]) -> tuple[dict[str, Any], Any]:
    """A copy of `FULL`, and the mapping in it that holds the key at `path`."""
    tree = node = copy.deepcopy(FULL)
    for key in path[:-1]:
        node = node[key]
    return tree, node


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(OUR_KEYS), st.integers(0, 20), st.sampled_from(["", "x", "_"]), st.booleans())
def test_any_misspelling_is_found(path: tuple[Any, ...], at: int, letter: str, longer: bool) -> None:
    """A letter is left out, replaced or inserted."""
    (*above, key), (tree, node) = path, copied(path)
    word = key[:at] + letter + key[at + (not longer) :]
    if word in node or not word[:1].isalpha():
        return
    node[word] = node.pop(key)
    error = caught(tree)
    places = [mistake.path for mistake in error.mistakes]
    assert path_text((*above, word)) in places
    assert error.__context__ is None
    # What pydantic calls the members of unions is no part of a path.
    parts = {part for place in places for part in place.replace("[", ".").strip("]").split(".")}
    assert not {"openai", "http", "llm", "sum", "Constant", "key"} & parts


FOREIGN = {
    "shadow": "root:$6$tOpSeCrEt$hAsHhAsHhAsH:19000:0:99999:7:::\ndaemon:*:19000:0:99999:7:::\n",
    "service account": '{"type": "service_account", "private_key": "tOpSeCrEt", "client_email": "tOpSeCrEt@x"}',
    "private key": "-----BEGIN KEY-----\ntOpSeCrEt==\n-----END KEY-----\n",
    "broken": "a: [tOpSeCrEt\nb: 'tOpSeCrEt\n",
    "escape": 'api_key: "tOpSeCrEt\\q"\n',
    "odd key within": "sources: {f: {kind: function, function: 'm:f', 'tOpSeCrEt/+=': 1}}\njudges: {j: {kind: function}}\n",
    "misspelt": "judgez: {j: {kind: function}}\nsourcez: {f: {kind: function, function: 'm:f', api_kye: tOpSeCrEt}}\n",
}


@each_of("name", FOREIGN)
def test_nothing_is_shown_of_a_file_that_is_no_configuration(name, tmp_path):
    path = tmp_path / "file"
    path.write_text(FOREIGN[name])
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert "tOpSeCrEt" not in str(caught.value)
    assert "hAsH" not in str(caught.value)
