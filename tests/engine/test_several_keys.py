"""A source with several keys: each key has its own limits and its own health, and verdicts know one source."""

from __future__ import annotations

import pytest

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.config import load_config
from qreward_plugins.testing import JudgeServer, ServerLimits

from ..kit import make_config, make_sample, mistakes_of

KEYS = ("sk-one-0123456789abcdef", "sk-two-0123456789abcdef", "sk-three-0123456789abcdef")


@pytest.fixture
def tree(monkeypatch):
    def make(server, keys=KEYS, **more):
        config = make_config({"judge": server}, **more)
        names = [f"KEY_{KEYS.index(key)}" for key in keys]
        for name, key in zip(names, keys, strict=True):
            monkeypatch.setenv(name, key)
        config["sources"]["judge"]["api_key_env"] = names
        return config

    return make


def wrong(tree):
    found = mistakes_of(RewardEngine, tree)
    assert not any(key in str(found) for key in KEYS)
    return found


@pytest.mark.anyio
async def test_each_key_has_its_own_limits(tree):
    # 8 requests a minute for each key: 24 are scored at once, and three samples would have to wait for a minute.
    limits = ServerLimits(requests_per_minute=8)
    with JudgeServer(lambda call: 0.5, api_key=KEYS, limits=limits) as server:
        config = tree(server, limits={"judge": {"requests_per_minute": 8}})
        async with RewardEngine(config) as engine:
            outcomes = await engine.score_all([make_sample(n) for n in range(27)], deadline_s=3)
            sources = engine.statistics().sources
            facts = engine.facts()
        assert server.report().violations_total == 0
    assert [outcome.verdict.source for outcome in outcomes if isinstance(outcome, Scored)] == ["judge"] * 24
    assert {name: source.requests for name, source in sources.items()} == {f"judge#{n}": 8 for n in (1, 2, 3)}
    assert facts is not None


@pytest.mark.anyio
async def test_a_revoked_key_takes_only_itself_out(tree, caplog):
    with JudgeServer(lambda call: 0.5, api_key=KEYS) as server:
        async with RewardEngine(tree(server)) as engine:
            assert all(isinstance(o, Scored) for o in await engine.score_all([make_sample(n) for n in range(30)]))
            server.revoke(KEYS[1])
            outcomes = await engine.score_all([make_sample(n) for n in range(30, 90)])
            states = {name: source.state for name, source in engine.statistics().sources.items()}
    assert all(isinstance(outcome, Scored) for outcome in outcomes)
    assert states["judge#2"] == "unusable"
    assert "unusable" not in (states["judge#1"], states["judge#3"])
    assert "judge#2" in caplog.text
    assert not any(key in caplog.text for key in KEYS)


@pytest.mark.anyio
async def test_a_source_is_released_with_all_its_keys(tree):
    async with RewardEngine(tree("http://127.0.0.1:1/v1")) as engine:
        engine.hold("judge#1")
        engine.hold("judge")
        engine.release("judge")
        assert {source.state for source in engine.statistics().sources.values()} == {"up"}


@pytest.mark.parametrize("sources", [["judge"], ["jud*"], ["*ge"], ["model:judge"], []])
def test_a_judge_names_the_source_and_means_all_its_keys(tree, sources):
    with JudgeServer() as server:
        config = load_config(tree(server, judge={"sources": sources}))
        engine = RewardEngine(load_config(config))
    assert engine.judges["quality"].sources == ("judge#1", "judge#2", "judge#3")


@pytest.mark.parametrize(
    ("keys", "path", "said"),
    [
        ({"api_key_env": []}, "sources.judge.api_key_env", "must be the name of an environment variable"),
        ({"api_key_env": ["KEY", "KEY"]}, "sources.judge.api_key_env", "a variable is named twice"),
        ({"api_key_env": ["SET", "UNSET"]}, "sources.judge.api_key_env[1]", "variable 'UNSET' is not set"),
        ({"api_key_env": ["SET", "ODD"]}, "sources.judge.api_key_env[1]", "characters that a header cannot carry"),
    ],
)
def test_wrong_keys_are_refused_by_path_and_never_shown(monkeypatch, keys, path, said):
    monkeypatch.setenv("SET", KEYS[0])
    monkeypatch.setenv("ODD", "k\u00e92")
    monkeypatch.delenv("UNSET", raising=False)
    with JudgeServer() as server:
        config = make_config({"judge": server})
        config["sources"]["judge"].update({key: list(v) if isinstance(v, tuple) else v for key, v in keys.items()})
        found = wrong(config)
    assert list(found) == [path]
    assert said in found[path]


def test_a_source_may_not_be_called_like_a_key():
    with JudgeServer() as server:
        config = make_config({"judge#1": server})
    assert "must not end in # and a number" in wrong(config)['sources["judge#1"]']


def test_all_variables_that_are_missing_are_named_at_once(monkeypatch):
    for name in ("UNSET", "GONE", "AWAY"):
        monkeypatch.delenv(name, raising=False)
    config = make_config({"a": "http://127.0.0.1:9/v1", "b": "http://127.0.0.1:9/v1"})
    config["sources"]["a"]["api_key_env"] = ["UNSET", "GONE"]
    config["sources"]["b"]["api_key_env"] = "AWAY"
    found = wrong(config)
    assert list(found) == ["sources.a.api_key_env[0]", "sources.a.api_key_env[1]", "sources.b.api_key_env"]
    said = " ".join(found.values())
    assert all(f"variable {name!r} is not set" in said for name in ("UNSET", "GONE", "AWAY"))
