"""`framework://` URLs: the adapter of a training framework fills in the address."""

from __future__ import annotations

import pytest

from qreward_plugins import ConfigurationError, RewardEngine, load_config
from qreward_plugins.config.load import with_framework

from ..kit import each_of


def config(*urls, kind="openai"):
    key = "url" if kind == "http" else "base_url"
    source = {"kind": kind, key: list(urls), **({} if kind == "http" else {"model": "judge"})}
    judge = {"openai": "llm", "reward_model": "reward_model", "http": "function"}[kind]
    return load_config({"sources": {"a": source}, "judges": {"a": {"kind": judge}}})


@each_of("kind", ["openai", "reward_model", "http"])
def test_a_name_becomes_the_address_and_what_follows_stays(kind):
    settings = config("framework://reward", "framework://ref/v1", "http://other/v1", kind=kind)
    addresses = {"reward": "http://10.0.0.1:8000/", "ref": "http://[::1]:9"}
    found = with_framework(settings, addresses, framework="this run")
    assert found.sources["a"].urls == ("http://10.0.0.1:8000", "http://[::1]:9/v1", "http://other/v1")
    assert settings.sources["a"].urls[0] == "framework://reward"


def test_a_missing_server_is_named_with_those_that_there_are():
    with pytest.raises(ConfigurationError) as caught:
        with_framework(config("framework://reward/v1"), {"ref": "http://h"}, framework="this run", remedy="Start it.")
    (mistake,) = caught.value.mistakes
    assert mistake.path == "sources.a.base_url"
    assert str(mistake).endswith("this run has no server 'reward' (it has framework://ref). Start it.")


@each_of("kind", ["openai", "reward_model", "http"])
def test_outside_of_a_framework_one_error_says_so(kind):
    with pytest.raises(ConfigurationError, match="works only inside a training framework") as caught:
        RewardEngine(config("framework://reward", kind=kind))
    assert [mistake.path for mistake in caught.value.mistakes] == [
        "sources.a.url" if kind == "http" else "sources.a.base_url"
    ]


@each_of("url", ["framework://", "framework:///v1", "framework://a b", "framework://x@y", "framework://r?k=1"])
def test_a_wrong_name_is_refused_at_once(url):
    with pytest.raises(ConfigurationError) as caught:
        config(url)
    assert caught.value.mistakes[-1].path == "sources.a.base_url[0]"
