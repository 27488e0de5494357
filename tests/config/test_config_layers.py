"""An inline tree over a file: where a training run's configuration comes from."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from qreward_plugins import ConfigurationError
from qreward_plugins.config import load_layers

FILE = """
qreward:
  sources: {a: {kind: openai, base_url: "http://localhost:1/v1", model: m, limits: {concurrency: 4}}}
  judges: {quality: {kind: llm}}
"""
DEFAULT = {
    "sources": {"own": {"kind": "function", "function": "math:fsum"}},
    "judges": {"own": {"kind": "function", "sources": ["own"]}},
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv("QREWARD_CONFIG", raising=False)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(FILE)
    return path


def test_the_file_may_be_named_in_four_ways(path, monkeypatch):
    named = [load_layers(path), load_layers(str(path)), load_layers({"config": str(path)})]
    monkeypatch.setenv("QREWARD_CONFIG", str(path))
    named += [load_layers(None), load_layers({})]
    assert all(list(config.judges) == ["quality"] for config in named)


def test_inline_keys_win_over_the_file(path):
    inline = OmegaConf.create({"config": str(path), "sources": {"a": {"limits": {"concurrency": 9}}}})
    config = load_layers(inline)
    assert config.sources["a"].limits.concurrency == 9
    assert config.sources["a"].model == "m"


def test_a_default_completes_a_tree_without_judges():
    config = load_layers({"engine": {"deadline_s": 7}}, default=DEFAULT)
    assert (list(config.judges), config.engine.deadline_s) == (["own"], 7.0)


def test_mistakes_of_an_inline_tree_bear_its_name():
    with pytest.raises(ConfigurationError, match="1 mistake in the flags") as caught:
        load_layers({**DEFAULT, "engin": {}}, origin="the flags")
    assert caught.value.mistakes[0].path == "engin"


def test_what_the_inline_tree_replaces_has_no_line_of_the_file(tmp_path):
    path = tmp_path / "judges.yaml"
    path.write_text(
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
"""
    )
    inline = {"config": str(path), "sources": {"a": {"limits": {"concurrency": -1}}}}
    with pytest.raises(ConfigurationError) as caught:
        load_layers(inline)
    assert [(mistake.path, mistake.line) for mistake in caught.value.mistakes] == [
        ("sources.a.base_url", 5),
        ("sources.a.limits.burst", 8),
        ("sources.a.limits.concurrency", None),
    ]
