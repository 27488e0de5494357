"""What `load_config` and `load_layers` make of a file, of a tree over it and of a framework's servers; which judge a
sample goes to, and which sources answer it.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError, RewardEngine
from qreward_plugins.config import (
    Config,
    Constant,
    judge_for,
    judges_in_charge,
    load_config,
    load_layers,
    parts_of,
    sources_of,
)
from qreward_plugins.config.load import with_framework
from qreward_plugins.sources.openai import OpenAISource

from ..kit import each_of, mistakes_of

TREE: dict[str, Any] = {
    "sources": {"fast": {"kind": "openai", "base_url": "https://a.example/v1/", "model": "m"}},
    "judges": {"quality": {"kind": "llm"}},
}


def fast(config: Config) -> OpenAISource.Config:
    source = config.sources["fast"]
    assert isinstance(source, OpenAISource.Config)
    return source


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "qreward.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(
        tmp_path,
        """
        sources:
          fast: {kind: openai, base_url: [https://a/v1, http://b:8000/v1], model: "4", limits: {tokens_per_minute: 2e6}}
        judges:
          quality:
            kind: llm
            sources: fast
            seed: 7
        routes: {"*": quality}
        on_failure: {constant: -1}
        engine: {shared: off}
        """,
    )
    for source in (path, str(path), "~/qreward.yaml"):
        config = load_config(source)
        assert fast(config).base_url == ("https://a/v1", "http://b:8000/v1")
        assert fast(config).limits.tokens_per_minute == 2e6
        assert config.judges["quality"].sources == ("fast",)
        assert config.on_failure == Constant(constant=-1)
        assert config.engine.shared == "off"


def test_a_byte_order_mark_and_dates_and_merge_keys_are_understood(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b"\xef\xbb\xbf"
        b"sources:\n  fast: &fast {kind: openai, base_url: http://a/v1, model: 2024-05-13}\n"
        b"  slow: {<<: *fast, model: b}\njudges: {j: {kind: llm}}\n",
    )
    config = load_config(path)
    assert fast(config).model == "2024-05-13"
    assert config.sources["slow"] == OpenAISource.Config(kind="openai", base_url=("http://a/v1",), model="b")


def test_qreward_as_the_only_key_is_unwrapped(tmp_path: Path) -> None:
    assert load_config({"qreward": TREE}) == load_config(TREE)
    path = write(tmp_path, FILE.replace("model: m", 'model: "${judges.quality.kind}"'))
    assert [each(path).sources["a"].model for each in (load_config, load_layers)] == ["llm", "llm"]  # type: ignore
    assert "judges.quality.seed" in mistakes_of(
        load_config, {"qreward": {**TREE, "judges": {"quality": {"kind": "llm", "seed": "x"}}}}
    )
    assert "unknown key" in mistakes_of(load_config, {"qreward": TREE, "sources": {}})["qreward"]


def test_objects_among_keyword_arguments_come_through_as_they_are() -> None:
    thing = object()
    tree = {
        "sources": {
            "f": {"kind": "function", "function": "a:b", "kwargs": {"thing": thing, "set": {1}, "n": [1, (2,)]}}
        },
        "judges": {"j": {"kind": "function"}},
    }
    kwargs = load_config(tree).sources["f"].kwargs  # type: ignore[union-attr]
    assert kwargs["thing"] is thing
    assert kwargs["set"] == {1}
    assert kwargs["n"] == [1, [2]]


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QR_KEY", "sk-1")
    monkeypatch.delenv("QR_NONE", raising=False)
    tree = copy.deepcopy(TREE)
    tree["sources"]["fast"] |= {
        "api_key": "${oc.env:QR_KEY}",
        "limits": {"requests_per_minute": "${oc.env:QR_NONE,60}", "concurrency": 4, "burst": "${.concurrency}"},
        "parameters": {"user": "\\${x}"},
    }
    slow = {"limits": "${sources.fast.limits}", "model": "${sources.fast.model}-slow"}
    tree["sources"]["slow"] = {**tree["sources"]["fast"], **slow}
    config = load_config(tree)
    key, limits = fast(config).api_key, fast(config).limits
    assert key is not None
    assert key.get_secret_value() == "sk-1"
    assert (limits.requests_per_minute, limits.burst) == (60, 4)
    assert fast(config).parameters == {"user": "${x}"}
    assert config.sources["slow"].limits == limits
    assert getattr(config.sources["slow"], "model", "") == "m-slow"


def test_a_node_of_a_trainers_tree_resolves_by_its_parents_and_stays_as_it_is() -> None:
    trainer = OmegaConf.create({"model": {"path": "/m"}, "reward": {"qreward": copy.deepcopy(TREE)}})
    trainer.reward.qreward.sources.fast.model = "${model.path}"
    OmegaConf.set_struct(trainer, True)
    OmegaConf.set_readonly(trainer, True)
    before = OmegaConf.to_yaml(trainer)
    assert fast(load_config(trainer.reward.qreward)).model == "/m"
    assert fast(load_config(trainer.reward)).model == "/m"
    assert OmegaConf.to_yaml(trainer) == before
    assert OmegaConf.is_interpolation(trainer.reward.qreward.sources.fast, "model")
    assert OmegaConf.is_struct(trainer)


@each_of(
    ("content", "problem"),
    [
        ("a:\n\tb: 1", "not valid YAML: found character '\\t' that cannot start any token (column 1)"),
        ("a: 1\n---\nb: 2", "line 2: the file is not valid YAML: expected a single document in the stream, but found"),
        ("a:\n  x: 1\n  b:c\n  d: 1", "could not find expected ':' (column 3). Put a blank after the colon of each"),
        ("a: {x: ${oc.env:A}}", "Within { } or [ ], put `${...}` in quotes"),
        ("a: !!int abc", "does not fit its tag"),
        (b"a: 1\nb: \xff", "line 2: the file is not UTF-8 text."),
        ("sources: &a {f: *a}\n", "contains itself"),
        ("a: " + "x" * 2**20, "larger than 1 MiB"),
        ("", "is empty"),
        ("- 1", "it is a list"),
        ("qreward: 3", "must be a mapping"),
    ],
)  # fmt: skip
def test_a_file_that_holds_no_tree(tmp_path: Path, content: str | bytes, problem: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(ConfigurationError) as caught:
        load_config(path)
    assert problem in str(caught.value)
    assert str(path) in str(caught.value)
    assert caught.value.__context__ is None


def test_rows_in_the_place_of_a_configuration(tmp_path: Path) -> None:
    rows = write(tmp_path, '{"prompt": "?"}\n{"prompt": "?"}\n').rename(tmp_path / "rows.jsonl")
    assert "Rows are no configuration, which comes first in a command" in mistakes_of(load_config, rows)[""]


@each_of(
    ("source", "problem"),
    [
        (Path("absent.yaml"), "cannot be read (No such file or directory). Looked for /"),
        (".", "(Is a directory)"),
        (" ", "path of the file is empty"),
        ("sources:\n  fast: {api_key: sk-1}", "looks like YAML"),
        (None, "is empty"),
        ([TREE], "it is a list"),
    ],
)
def test_what_is_no_configuration(source: Any, problem: str) -> None:
    message = mistakes_of(load_config, source)[""]
    assert problem in message
    assert "sk-1" not in message


def test_a_tree_that_contains_itself() -> None:
    tree = copy.deepcopy(TREE)
    tree["sources"]["fast"]["parameters"] = {"all": "${sources}"}
    assert "cannot be resolved" in mistakes_of(load_config, tree)["sources.fast.parameters.all"]
    tree["sources"]["fast"]["parameters"] = tree
    assert "contains itself" in mistakes_of(load_config, tree)[""]


# An inline tree over a file: where a training run's configuration comes from

FILE = """
qreward:
  sources: {a: {kind: openai, base_url: "http://localhost:1/v1", model: m, limits: {concurrency: 4}}}
  judges: {quality: {kind: llm}}
"""
DEFAULT = {
    "sources": {"own": {"kind": "function", "function": "builtins:dict"}},
    "judges": {"own": {"kind": "function", "sources": ["own"]}},
}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)
    return write(tmp_path, FILE)


def test_the_file_may_be_named_in_four_ways(path, monkeypatch):
    monkeypatch.setenv("HOME", str(path.parent))
    named = [load_layers(path), load_layers(str(path)), load_layers({"config": f"~/{path.name}"})]
    monkeypatch.setenv("QREWARD_CONFIG", str(path))
    named += [load_layers(None), load_layers({})]
    assert all(list(config.judges) == ["quality"] for config in named)


def test_a_default_completes_a_tree_without_judges():
    config = load_layers({"engine": {"deadline_s": 7}}, default=DEFAULT)
    assert (list(config.judges), config.engine.deadline_s) == (["own"], 7.0)


def test_mistakes_of_an_inline_tree_bear_its_name():
    with pytest.raises(ConfigurationError, match=r"1 mistake in the flags(.|\n)*engin: unknown key"):
        load_layers({**DEFAULT, "engin": {}}, origin="the flags")


def test_mistakes_of_a_file_and_a_tree_over_it_bear_the_names_of_both(tmp_path):
    path = write(tmp_path, json.dumps(DEFAULT))
    with pytest.raises(
        ConfigurationError, match=r"1 mistake in \S+ with qreward\.engine:(.|\n)*deadlin_s: unknown key"
    ):
        load_layers({"config": str(path), "engine": {"deadlin_s": 3}})


def test_what_the_inline_tree_replaces_has_no_line_of_the_file(tmp_path):
    path = write(
        tmp_path,
        """
sources:
  a:
    kind: openai
    base_url: x
    model: m
    limits:
      burst: 0
      concurrency: 0
judges: {quality: {kind: llm}}
""",
    )
    inline = OmegaConf.create({"config": str(path), "sources": {"a": {"limits": {"concurrency": -1}}}})
    with pytest.raises(ConfigurationError) as caught:
        load_layers(inline)
    assert [(mistake.path, mistake.line) for mistake in caught.value.mistakes] == [
        ("sources.a.base_url", 5),
        ("sources.a.limits.burst", 8),
        ("sources.a.limits.concurrency", None),
    ]


# Which judge, and which sources

SOURCES = {
    "a": {"kind": "openai", "base_url": "http://a/v1", "model": "m"},
    "f": {"kind": "function", "function": "a:b"},
    "b": {"kind": "openai", "base_url": "http://b/v1", "model": "m"},
    "s": {"kind": "http", "url": "http://s/score"},
    "t": {"kind": "http", "url": "http://t/score", "model": "m"},
}


def routed(routes: dict[str, str], **judges: dict[str, object]) -> Config:
    return load_config({"sources": SOURCES, "judges": judges, "routes": routes})


def test_the_first_matching_route_wins() -> None:
    tree = routed({"math/hard*": "j", "math/*": "k", "code": "j"}, j={"kind": "llm"}, k={"kind": "function"})
    assert judge_for(tree, "math/hard/1") == "j"
    assert judge_for(tree, "math/easy") == "k"
    assert judge_for(tree, "code") == "j"
    assert judge_for(tree, "CODE") is None
    assert judge_for(tree, "codes") is None
    assert judge_for(tree, "") is None


PARTS = {
    "j": {"kind": "llm", "sources": "b"},
    "k": {"kind": "function"},
    "t": {"kind": "sum", "weights": {"k": 1, "j": 2}},
}


def test_parts_of_a_sum_need_no_route() -> None:
    tree = routed({}, **PARTS)
    assert judge_for(tree, "anything") == "t"
    assert judges_in_charge(tree) == ("t",)
    assert (parts_of(tree, "t"), parts_of(tree, "j")) == (("k", "j"), ("j",))
    assert sources_of(tree, "t") == ("f", "s", "t", "b")
    assert load_config(tree) is tree


@each_of(
    ("kind", "patterns", "names"),
    [
        ("llm", ["*"], ("a", "b")),
        ("llm", ["b", "*"], ("b", "a")),
        ("llm", ["[b-z]*"], ("b",)),
        ("llm", ["model:?"], ("a", "b")),
        ("function", "*", ("f", "s", "t")),
        ("function", ["t", "f"], ("t", "f")),
        ("function", "model:m", ("t",)),
    ],
)
def test_patterns_mean_all_sources_of_the_kind_that_match(kind: str, patterns: Any, names: tuple[str, ...]) -> None:
    assert sources_of(routed({}, j={"kind": kind, "sources": patterns}), "j") == names


# `framework://` URLs: the adapter of a training framework fills in the address


def served(*urls, kind="openai"):
    key = "url" if kind == "http" else "base_url"
    source = {"kind": kind, key: list(urls), **({} if kind == "http" else {"model": "judge"})}
    judge = {"openai": "llm", "reward_model": "reward_model", "http": "function"}[kind]
    return load_config({"sources": {"a": source}, "judges": {"a": {"kind": judge}}})


@each_of("kind", ["openai", "reward_model", "http"])
def test_a_name_becomes_the_address_and_what_follows_stays(kind):
    settings = served("framework://reward", "framework://ref/v1", "http://other/v1", kind=kind)
    addresses = {"reward": "http://10.0.0.1:8000/", "ref": "http://[::1]:9"}
    found = with_framework(settings, addresses, framework="this run")
    assert found.sources["a"].urls == ("http://10.0.0.1:8000", "http://[::1]:9/v1", "http://other/v1")
    assert settings.sources["a"].urls[0] == "framework://reward"


def test_a_missing_server_is_named_with_those_that_there_are():
    named = {"framework": "this run", "remedy": "Start it."}
    found = mistakes_of(with_framework, served("framework://reward/v1"), {"ref": "http://h"}, **named)
    problem = "sources.a.base_url: this run has no server 'reward' (it has framework://ref). Start it."
    assert found == {"sources.a.base_url": problem}


@each_of("kind", ["openai", "reward_model", "http"])
def test_outside_of_a_framework_one_error_says_so(kind):
    found = mistakes_of(RewardEngine, served("framework://reward", kind=kind))
    assert list(found) == ["sources.a.url" if kind == "http" else "sources.a.base_url"]
    assert "works only inside a training framework" in "".join(found.values())


@each_of("url", ["framework://", "framework:///v1", "framework://a b", "framework://x@y", "framework://r?k=1"])
def test_a_wrong_name_is_refused_at_once(url):
    assert "sources.a.base_url[0]" in mistakes_of(served, url)
