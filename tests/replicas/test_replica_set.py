"""The source of kind `replicas`, in an engine, over stand-in servers."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from qreward_plugins import ConfigurationError, ReplicasNotStarted, RewardEngine, load_config
from tests.kit import comes, make_sample, make_samples, mistakes_of

from .conftest import configured, kill, replicas, said, states

pytestmark = pytest.mark.anyio
REWARD_MODEL = {"rm": {"kind": "reward_model"}}


async def test_servers_start_with_the_first_samples_and_end_with_the_engine(stand_ins, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(stand_ins.folder))
    monkeypatch.setenv("OWN_KEY", "sk-own-0123456789")
    command = stand_ins.command("ready_after=0.2", "private", "key=sk-own-0123456789")
    engine = RewardEngine(configured({"command": command, "data_parallel": 2, "api_key_env": "OWN_KEY"}))
    assert stand_ins.living() == []
    async with engine:
        # The deadline runs from when the servers are ready.
        outcomes = await engine.score_all(make_samples(20), deadline_s=20)
        assert len(set(said(outcomes))) == 2  # each wrote its process id
        assert {(outcome.reward, outcome.verdict.model) for outcome in outcomes} == {(0.7, "judge")}
        assert states(engine) == ["up", "up"]
        assert len(list(stand_ins.folder.glob("qreward-logs-*/own-*.log"))) == 2
        assert "sk-own" not in repr(engine.upstreams["own"].source.spec)
    assert stand_ins.living() == list(stand_ins.folder.glob("qreward-logs-*")) == []


async def test_a_killed_replica_comes_back_and_is_asked_again(stand_ins):
    """Calls wait for it, as long as their deadlines allow."""
    async with RewardEngine(configured({"command": stand_ins.command(), "data_parallel": 1})) as engine:
        await engine.score(make_sample())
        kill(*stand_ins.living())
        await comes(lambda: not replicas(engine)[0].url)
        said(await engine.score_all(make_samples(50), deadline_s=60))
        assert engine.upstreams["own"].breaker.closed


async def test_no_secret_of_the_configuration_is_shown_with_the_log(monkeypatch):
    """vLLM logs its arguments, and a program that fails may log anything that it was given."""
    monkeypatch.setenv("MINE", "plain-name-secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret_of_a_user")
    shell = ["sh", "-c", "echo $HF_TOKEN $0 $@; exit 1", "{port}", "{name}"]
    own = {
        "command": [*shell, "header-secret", "key-secret", "${oc.env:MINE}"],
        "arguments": {"tool_token": "argument-secret", "beside": "${oc.env:MINE}"},
        "headers": {"X-Team": "header-secret"},
        "api_key": "key-secret",
    }
    async with RewardEngine(configured(own)) as engine:
        with pytest.raises(ReplicasNotStarted) as caught:
            await engine.score_all(make_samples(1))
        spec, config = engine.upstreams["own"].source.spec, engine.config.sources["own"]
    assert spec.arguments == {"tool_token": "argument-secret", "beside": "plain-name-secret"}
    assert str(caught.value).startswith(
        "source 'own' cannot start its servers: replica 0: it ended before it was ready"
    )
    assert "*** *** ***" in str(caught.value)
    assert "secret" not in str(caught.value) + repr(spec)
    assert not any(secret in repr(config) for secret in ("argument-secret", "plain-name-secret"))


async def test_a_server_that_is_not_installed_is_named_with_its_remedy():
    own = {"server": "vllm", "program": [sys.executable, "-S", "-m", "vllm_of_no_environment.api_server"]}
    async with RewardEngine(configured(own)) as engine:
        with pytest.raises(ReplicasNotStarted, match="install vllm_of_no_environment here, or name the Python"):
            await engine.score_all(make_samples(1))


async def test_closing_during_the_start_fails_the_samples(stand_ins):
    engine = RewardEngine(configured({"command": stand_ins.command("never")}))
    scoring = asyncio.ensure_future(engine.score_all(make_samples(2)))
    await comes(stand_ins.living)
    await engine.aclose()
    assert [outcome.reason for outcome in await scoring] == ["closed"] * 2
    assert stand_ins.living() == []


async def test_a_reload_keeps_adds_and_removes_servers(stand_ins, caplog):
    def using(used, **commands):
        tree = configured({})
        tree["judges"]["quality"]["sources"] = [used]
        tree["sources"] = {name: {**tree["sources"]["own"], "command": each} for name, each in commands.items()}
        return tree

    own, slow, broken = stand_ins.command(), stand_ins.command("ready_after=0.6"), stand_ins.command("exit=1")
    async with RewardEngine(using("own", own=own)) as engine:
        await engine.score_all(make_samples(2), deadline_s=20)
        kept = stand_ins.living()
        # The deadline of the samples runs from when the servers that were added are ready.
        await engine.reload(using("slow", own=own, slow=slow, broken=broken))
        said(await engine.score_all(make_samples(2), deadline_s=0.5))
        assert "source 'broken' cannot start its servers" in caplog.text
        assert set(kept) < set(stand_ins.living())
        await engine.reload(using("slow", slow=slow))
        await comes(lambda: not set(kept) & set(stand_ins.living()))
    assert stand_ins.living() == []


async def test_a_reward_model_is_asked_by_its_protocol(stand_ins):
    own = {"command": stand_ins.command(), "task": "vllm_classify", "data_parallel": 2}
    async with RewardEngine(configured(own, judges=REWARD_MODEL)) as engine:
        said(await engine.score_all(make_samples(4), deadline_s=30))
    with pytest.raises(ConfigurationError, match="no source of kind"):
        load_config(configured(own))
    with pytest.raises(ConfigurationError, match="sglang does not speak vllm_score"):
        RewardEngine(configured({"server": "sglang", "task": "vllm_score"}, judges=REWARD_MODEL))


ON_CUDA = {"server": "vllm", "platform": "cuda"}
SEEN = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("source", "place", "text"),
    [
        ({}, "server", "no server is named"),
        ({"server": "vllm", "command": ["a", "{port}", "{name}"]}, "command", "not both"),
        ({"command": ["serve", "{port}"]}, "command", r"no word holds \{name\}; the server gets its"),
        ({"command": "serve {port} {name}"}, "command", "a list with the words"),
        ({"server": "vllm", "task": "chatting"}, "task", "a protocol of reward models: vllm_classify"),
        ({"server": "llama_cpp", "platform": "cuda"}, "devices", "1 x 1 = 1, and the number of devices is 0"),
        ({**ON_CUDA, "devices": [-1]}, "devices", "-1"),
        ({**ON_CUDA, "devices": [0, 0], "data_parallel": 2}, "devices", "device 0 is named twice"),
        (
            {**ON_CUDA, "devices": [0, 1, 2], "data_parallel": 2, "tensor_parallel": 2},
            "devices",
            r"2 x 2 = 4, and the number of devices is 3 \(0, 1, 2\)\. Name 4",
        ),
        ({"server": "vllm", "platform": "cpu", "devices": [0]}, "devices", "there are none on the platform cpu"),
        ({**ON_CUDA, "placement": "ray", "devices": [0]}, "devices", "Ray chooses them"),
        ({"server": "vllm", "data_parallel": 0}, "data_parallel", "must be above 0"),
        ({"server": "vllm", "arguments": {"port": 80}}, "arguments.port", "differs between its replicas. Leave it out"),
        ({"server": "vllm", "arguments": {"api_key": "abc"}}, "arguments.api_key", "can see"),
        ({"server": "vllm", "environment": {"A=B": "x"}}, 'environment["A=B"]', "the name of an environment variable"),
        ({**ON_CUDA, "devices": [0], "environment": {SEEN: "3"}}, f"environment.{SEEN}", "by this variable. Set dev"),
        ({"server": "vllm", "routing": "random"}, "routing", "a strategy, or a list of strategies"),
        ({"server": "vllm", "chat_template": "x"}, "chat_template", "only a reward model"),
        ({"server": "vllm", "api_key_env": ["A", "B"]}, "api_key_env", "one key"),
        ({"server": "vllm", "placement": "ray"}, "placement", "needs Ray"),
        ({"server": "vllm", "placement": "ray", "colocated": True}, "colocated", "gives the trainer's GPUs to nobody"),
    ],
)
def test_mistakes_are_found_before_anything_starts(source, place, text):
    path, said = next(iter(mistakes_of(RewardEngine, configured(source)).items()))
    assert (path, re.search(text, said) is not None) == (f"sources.own.{place}", True), said


async def test_the_journal_does_not_ask_where_a_model_is_served(stand_ins, tmp_path):
    journal = {"engine": {"seed": 7, "journal": {"path": str(tmp_path / "journal.db")}}}
    for count in (1, 2):
        own = {"command": stand_ins.command(), "data_parallel": count}
        async with RewardEngine(configured(own, **journal)) as engine:
            await engine.score_all(make_samples(3), deadline_s=30)
            assert engine.upstreams["own"].requests == (3 if count == 1 else 0)
