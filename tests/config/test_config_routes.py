"""Which judge, and which sources."""

from __future__ import annotations

from typing import Any

import pytest

from qreward_plugins.config import Config, judge_for, judges_in_charge, load_config, parts_of, sources_of

from ..kit import each_of

SOURCES = {
    "a": {"kind": "openai", "base_url": "http://a/v1", "model": "m"},
    "f": {"kind": "function", "function": "a:b"},
    "b": {"kind": "openai", "base_url": "http://b/v1", "model": "m"},
    "s": {"kind": "http", "url": "http://s/score"},
    "t": {"kind": "http", "url": "http://t/score", "model": "m"},
}


def config(routes: dict[str, str], **judges: dict[str, object]) -> Config:
    return load_config({"sources": SOURCES, "judges": judges, "routes": routes})


def test_the_first_matching_route_wins() -> None:
    tree = config({"math/hard*": "j", "math/*": "k", "code": "j"}, j={"kind": "llm"}, k={"kind": "function"})
    assert judge_for(tree, "math/hard/1") == "j"
    assert judge_for(tree, "math/easy") == "k"
    assert judge_for(tree, "code") == "j"
    assert judge_for(tree, "CODE") is None
    assert judge_for(tree, "codes") is None
    assert judge_for(tree, "") is None


def test_the_sources_of_a_judge() -> None:
    tree = config({"*": "j"}, j={"kind": "llm"}, k={"kind": "llm", "sources": ["b", "b"]}, m={"kind": "function"})
    assert sources_of(tree, "j") == ("a", "b")
    assert sources_of(tree, "k") == ("b",)
    assert sources_of(tree, "m") == ("f", "s", "t")
    with pytest.raises(KeyError):
        sources_of(tree, "n")


PARTS = {
    "j": {"kind": "llm", "sources": "b"},
    "k": {"kind": "function"},
    "t": {"kind": "sum", "weights": {"k": 1, "j": 2}},
}


def test_parts_of_a_sum_need_no_route() -> None:
    tree = config({}, **PARTS)
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
    assert sources_of(config({}, j={"kind": kind, "sources": patterns}), "j") == names
