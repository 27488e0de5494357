"""What makes two sources the same to their provider."""

from __future__ import annotations

import re

from qreward_plugins.config import load_config
from qreward_plugins.sharing.membership import source_keys
from tests.kit import each_of

URL = "http://judge.example/v1"
BASE = {"kind": "openai", "base_url": URL, "model": "judge", "api_key": "one-secret"}


def keys(**sources):
    kind = "function" if all(source["kind"] == "function" for source in sources.values()) else "llm"
    tree = {"sources": sources, "judges": {"quality": {"kind": kind}}}
    return source_keys(load_config(tree))


def key(**fields):
    node = {name: value for name, value in {**BASE, **fields}.items() if value is not None}
    return keys(a=node)["a"]


def test_a_source_is_known_by_what_the_provider_sees_and_not_by_its_name():
    assert keys(a=BASE)["a"] == keys(other=BASE)["other"]
    assert re.fullmatch(r"[0-9a-f]{24}", key())
    assert key(limits={"requests_per_minute": 5}, timeouts={"total_s": 9}, price={"per_request": 1.0}) == key()
    others = [
        {"base_url": "http://other.example/v1"},
        {"base_url": [URL, "http://second.example/v1"]},
        {"model": "other"},
        {"api_key": "another-secret"},
        {"headers": {"x-team": "red"}},
    ]
    assert len({key(), *(key(**fields) for fields in others)}) == 1 + len(others)


def test_the_same_endpoint_twice_in_one_configuration_is_two_sources():
    twice = keys(a=BASE, b=BASE)
    assert twice["a"] != twice["b"]
    assert twice["a"] != key()
    # Another process with the same configuration means the same two.
    assert twice == keys(b=BASE, a=BASE)


@each_of(
    ("one", "other"),
    [
        *(
            ({"base_url": one}, {"base_url": other})
            for one, other in [
                (URL, f"{URL}/"),
                (URL, "http://JUDGE.example/v1"),
                (URL, "http://judge.example:80/v1"),
                ("https://judge.example/v1", "https://judge.example:443/v1"),
                (URL, "http://judge.example./v1"),
                ("http://[::1]:8000/v1", "http://[0:0:0:0:0:0:0:1]:8000/v1"),
                ("http://judge.example/~me/v1", "http://judge.example/%7Eme/v1"),
                (URL, [URL, "http://judge.example:80/v1"]),
                (["http://a.example/v1", "http://b.example/v1"], ["http://b.example/v1", "http://a.example/v1"]),
            ]
        ),
        ({"headers": {"X-Team": "red", "a": "b"}}, {"headers": {"A": "b ", "x-team": " red"}}),
        ({}, {"api_key": " one-secret\n"}),
        ({}, {"api_key": None, "headers": {"authorization": "Bearer one-secret"}}),
        ({}, {"api_key": None, "api_key_env": "THE_KEY"}),
    ],
)
def test_what_is_sent_is_compared_and_not_how_it_is_written(one, other, monkeypatch):
    monkeypatch.setenv("THE_KEY", "one-secret")
    assert key(**one) == key(**other)


def test_functions_are_known_by_what_they_call(tmp_path, monkeypatch):
    def of(function):
        return keys(a={"kind": "function", "function": function})["a"]

    monkeypatch.chdir(tmp_path)
    assert of(f"{tmp_path}/judges.py:grade") == of("./judges.py:grade")
    assert of("scoring.judges:grade") != of("scoring.judges:other")
