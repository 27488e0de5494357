"""What `load_config` accepts, and where it takes values from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from qreward_plugins.config import Config, Constant, load_config
from qreward_plugins.errors import ConfigurationError
from qreward_plugins.sources.openai import OpenAISource

from ..kit import each_of

TREE: dict[str, Any] = {
    "sources": {"fast": {"kind": "openai", "base_url": "https://a.example/v1/", "model": "m"}},
    "judges": {"quality": {"kind": "llm"}},
}


def mistakes(source: Any) -> dict[str, str]:
    with pytest.raises(ConfigurationError) as caught:
        load_config(source)
    return {mistake.path: str(mistake) for mistake in caught.value.mistakes}


def fast(config: Config) -> OpenAISource.Config:
    source = config.sources["fast"]
    assert isinstance(source, OpenAISource.Config)
    return source


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "qreward.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_a_file_is_read(tmp_path: Path) -> None:
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
    for source in (path, str(path)):
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


def test_qreward_as_the_only_key_is_unwrapped() -> None:
    assert load_config({"qreward": TREE}) == load_config(TREE)
    assert "judges.quality.seed" in mistakes({"qreward": {**TREE, "judges": {"quality": {"kind": "llm", "seed": "x"}}}})
    assert "unknown key" in mistakes({"qreward": TREE, "sources": {}})["qreward"]


def test_a_config_passes_through() -> None:
    config = load_config(TREE)
    assert load_config(config) is config


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
    (tmp_path / "rows.jsonl").write_text('{"prompt": "?"}\n{"prompt": "?"}\n')
    with pytest.raises(ConfigurationError, match="Rows are no configuration, which comes first in a command"):
        load_config(tmp_path / "rows.jsonl")


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
    message = mistakes(source)[""]
    assert problem in message
    assert "sk-1" not in message


def test_a_tree_that_contains_itself() -> None:
    tree = copy.deepcopy(TREE)
    tree["sources"]["fast"]["parameters"] = {"all": "${sources}"}
    assert "cannot be resolved" in mistakes(tree)["sources.fast.parameters.all"]
    tree["sources"]["fast"]["parameters"] = tree
    assert "contains itself" in mistakes(tree)[""]


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "sources: {fast: {kind: openai, base_url: http://a/v1, model: m}}\njudges: {j: {kind: llm}}")
    assert "fast" in load_config("~/qreward.yaml").sources
