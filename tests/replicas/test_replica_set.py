"""The source of kind `replicas`, in an engine, over stand-in servers."""

from __future__ import annotations

import asyncio

import pytest
from pools import comes, kill

from qreward_plugins import ConfigurationError, ReplicasNotStarted, RewardEngine, Sample, load_config
from qreward_plugins.sources.replica_set import pool_spec

pytestmark = pytest.mark.anyio


def tree(source, **more):
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64}
    own = {"kind": "replicas", "model": "judge", "platform": "cpu", "start_within_s": 30.0, **source}
    return {"sources": {"own": own}, "judges": {"quality": judge}, "engine": {"seed": 7}, **more}


def samples(count):
    return [Sample([{"role": "user", "content": "Why?"}], f"Because of {n}.", id=str(n)) for n in range(count)]


async def test_servers_start_with_the_first_samples_and_end_with_the_engine(stand_ins):
    own = {"command": stand_ins.command("ready_after=0.2"), "data_parallel": 2}
    engine = RewardEngine(tree(own))
    assert stand_ins.living() == []
    async with engine:
        # The deadline runs from when the servers are ready.
        outcomes = await engine.score_all(samples(20), deadline_s=20)
        assert [outcome.reward for outcome in outcomes] == [0.7] * 20
        assert len({outcome.verdict.rationale for outcome in outcomes}) == 2  # each wrote its process id
        states = engine.upstreams["own"].source.replicas
        assert [state.state for state in states] == ["up", "up"]
    assert stand_ins.living() == []


async def test_a_verdict_names_the_model_of_the_configuration(stand_ins):
    async with RewardEngine(tree({"command": stand_ins.command("private"), "data_parallel": 2})) as engine:
        outcomes = await engine.score_all(samples(4), deadline_s=30)
    assert {outcome.verdict.model for outcome in outcomes} == {"judge"}


async def test_servers_that_list_their_models_only_to_who_has_the_key(stand_ins, monkeypatch):
    monkeypatch.setenv("OWN_KEY", "sk-own-0123456789")
    own = {"command": stand_ins.command("key=sk-own-0123456789"), "api_key_env": "OWN_KEY"}
    async with RewardEngine(tree(own)) as engine:
        assert [outcome.reward for outcome in await engine.score_all(samples(2), deadline_s=30)] == [0.7] * 2
        spec = engine.upstreams["own"].source.spec
    assert (spec.api_key, "sk-own" in repr(spec)) == ("sk-own-0123456789", False)


async def test_a_killed_replica_comes_back_and_is_asked_again(stand_ins):
    """Calls wait for it, as long as their deadlines allow."""
    async with RewardEngine(tree({"command": stand_ins.command(), "data_parallel": 1})) as engine:
        await engine.score(samples(1)[0])
        source = engine.upstreams["own"].source
        kill(*stand_ins.living())
        await comes(lambda: not source.replicas[0].url)
        outcomes = await engine.score_all(samples(50), deadline_s=60)
        assert [outcome.reward for outcome in outcomes] == [0.7] * 50
        assert engine.upstreams["own"].breaker.closed


async def test_a_start_that_fails_is_an_error_with_the_log_and_without_secrets(stand_ins, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefghijklmnop")
    async with RewardEngine(tree({"command": stand_ins.command("only=1", "exit=1"), "data_parallel": 2})) as engine:
        with pytest.raises(ReplicasNotStarted) as caught:
            await engine.score_all(samples(3))
    said = str(caught.value)
    assert said.startswith("source 'own' cannot start its servers: replica 1: it ended before it was ready")
    assert said.endswith("RuntimeError: no memory for the weights, token ***")
    assert stand_ins.living() == []


async def test_no_secret_of_the_configuration_is_shown_with_the_log(monkeypatch):
    """vLLM logs its arguments, and a program that fails may log anything that it was given."""
    monkeypatch.setenv("MINE", "plain-name-secret")
    own = {
        "command": [
            "sh",
            "-c",
            "echo $0 $@; exit 1",
            "{port}",
            "{name}",
            "header-secret",
            "key-secret",
            "${oc.env:MINE}",
        ],
        "arguments": {"tool_token": "argument-secret", "beside": "${oc.env:MINE}"},
        "headers": {"X-Team": "header-secret"},
        "api_key": "key-secret",
    }
    async with RewardEngine(tree(own)) as engine:
        with pytest.raises(ReplicasNotStarted) as caught:
            await engine.score_all(samples(1))
        spec, config = engine.upstreams["own"].source.spec, engine.config.sources["own"]
    assert spec.arguments == {"tool_token": "argument-secret", "beside": "plain-name-secret"}
    assert "*** *** ***" in str(caught.value)
    assert "secret" not in str(caught.value) + repr(spec)
    assert not any(secret in repr(config) for secret in ("argument-secret", "plain-name-secret"))


async def test_closing_during_the_start_fails_the_samples(stand_ins):
    engine = RewardEngine(tree({"command": stand_ins.command("never")}))
    scoring = asyncio.ensure_future(engine.score_all(samples(2)))
    await comes(stand_ins.living)
    await engine.aclose()
    assert [outcome.reason for outcome in await scoring] == ["closed"] * 2
    assert stand_ins.living() == []


async def test_a_reload_keeps_adds_and_removes_servers(stand_ins, caplog):
    def using(used, **sources):
        found = {name: {**tree({})["sources"]["own"], "command": command} for name, command in sources.items()}
        judge = {**tree({})["judges"]["quality"], "sources": [used]}
        return {"sources": found, "judges": {"quality": judge}, "engine": {"seed": 7}}

    own, slow, broken = stand_ins.command(), stand_ins.command("ready_after=0.6"), stand_ins.command("exit=1")
    async with RewardEngine(using("own", own=own)) as engine:
        await engine.score_all(samples(2), deadline_s=20)
        kept = stand_ins.living()
        # The deadline of the samples runs from when the servers that were added are ready.
        await engine.reload(using("slow", own=own, slow=slow, broken=broken))
        outcomes = await engine.score_all(samples(2), deadline_s=0.5)
        assert [outcome.reward for outcome in outcomes] == [0.7] * 2
        assert "source 'broken' cannot start its servers" in caplog.text
        assert set(kept) < set(stand_ins.living())
        await engine.reload(using("slow", slow=slow))
        await comes(lambda: not set(kept) & set(stand_ins.living()))
    assert stand_ins.living() == []


async def test_a_source_that_does_not_start_can_be_removed_by_a_reload(stand_ins):
    both = {"own": tree({"command": stand_ins.command("exit=1")})["sources"]["own"]}
    both["other"] = {"kind": "openai", "base_url": "http://127.0.0.1:9/v1", "model": "m"}
    judge = {**tree({})["judges"]["quality"], "sources": ["other"]}
    config = {"sources": both, "judges": {"quality": judge}, "engine": {"seed": 7}}
    async with RewardEngine(config) as engine:
        with pytest.raises(ReplicasNotStarted):
            await engine.score_all(samples(1))
        await engine.reload({**config, "sources": {"other": both["other"]}})
        (outcome,) = await engine.score_all(samples(1), deadline_s=0.05)
        assert outcome.reward is None


async def test_a_reward_model_is_asked_by_its_protocol(stand_ins):
    own = {"command": stand_ins.command(), "task": "vllm_classify", "data_parallel": 2}
    rm = {"rm": {"kind": "reward_model"}}
    async with RewardEngine(tree(own, judges=rm)) as engine:
        outcomes = await engine.score_all(samples(4), deadline_s=30)
        assert all(outcome.reward is not None for outcome in outcomes), [outcome.describe() for outcome in outcomes]


def test_a_server_that_does_not_speak_the_protocol_is_refused():
    with pytest.raises(ConfigurationError, match="sglang does not speak vllm_score"):
        RewardEngine(tree({"server": "sglang", "task": "vllm_score"}, judges={"rm": {"kind": "reward_model"}}))


def test_the_task_decides_which_judges_may_ask():
    with pytest.raises(ConfigurationError, match="no source of kind"):
        load_config(tree({"server": "vllm", "task": "vllm_classify"}))
    load_config(tree({"server": "vllm"}))


async def test_a_folder_that_cannot_be_made_is_named_with_its_key(tmp_path):
    (tmp_path / "file").touch()
    source = {"command": ["/bin/false", "{port}", "{name}"], "log_folder": str(tmp_path / "file")}
    async with RewardEngine(tree(source)) as engine:
        with pytest.raises(ReplicasNotStarted, match=r"its log .*file/own-0\.log .* \(File exists\)\. See `log_f"):
            await engine.upstreams["own"].source.start()


@pytest.mark.parametrize(
    ("source", "place", "text"),
    [
        ({}, "sources.own.server", "no server is named"),
        ({"server": "vllm", "command": ["a", "{port}", "{name}"]}, "sources.own.command", "not both"),
        ({"command": ["serve", "{port}"]}, "sources.own.command", r"no word holds \{name\}; the server gets its"),
        ({"server": "vllm", "task": "chatting"}, "sources.own.task", "a protocol of reward models: vllm_classify"),
        ({"server": "llama_cpp", "platform": "cuda"}, "sources.own.devices", "1 x 1 = 1, and there are 0 devices"),
        ({"server": "vllm", "data_parallel": 0}, "sources.own.data_parallel", "must be above 0"),
        ({"server": "vllm", "tensor_parallel": True}, "sources.own.tensor_parallel", "not true"),
        (
            {"server": "vllm", "arguments": {"port": 80}},
            "sources.own.arguments.port",
            "differs between its replicas. Leave it out",
        ),
        (
            {"server": "vllm", "environment": {"A=B": "x"}},
            'sources.own.environment["A=B"]',
            "the name of an environment variable",
        ),
        (
            {"server": "vllm", "platform": "cuda", "devices": [0], "environment": {"CUDA_VISIBLE_DEVICES": "3"}},
            "sources.own.environment.CUDA_VISIBLE_DEVICES",
            "each replica sees its own devices by this variable. Set devices.",
        ),
        ({"server": "vllm", "platform": "cuda", "devices": [-1]}, "sources.own.devices", "-1"),
        ({"command": "serve {port} {name}"}, "sources.own.command", "a list with the words"),
        (
            {"server": "vllm", "routing": "random"},
            "sources.own.routing",
            "a strategy, or a list of strategies",
        ),
        ({"server": "vllm", "arguments": {"api_key": "abc"}}, "sources.own.arguments.api_key", "can see"),
        ({"server": "vllm", "chat_template": "x"}, "sources.own.chat_template", "only a reward model"),
        ({"server": "vllm", "api_key_env": ["A", "B"]}, "sources.own.api_key_env", "one key"),
        ({"server": "vllm", "placement": "ray"}, "sources.own.placement", "needs Ray"),
        ({"server": "vllm", "base_url": "http://a"}, "sources.own.base_url", "unknown"),
    ],
)
def test_mistakes_are_found_before_anything_starts(source, place, text):
    with pytest.raises(ConfigurationError, match=text) as caught:
        RewardEngine(tree(source))
    assert caught.value.mistakes[0].path == place


def test_a_spec_has_the_devices_and_no_secret_in_its_repr(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    config = load_config(
        tree(
            {
                "server": "vllm",
                "platform": "cuda",
                "data_parallel": 2,
                "tensor_parallel": 2,
                "environment": {"HF_TOKEN": "hf_secret_token"},
                "arguments": {"max_model_len": 16384},
            }
        )
    ).sources["own"]
    spec = pool_spec("own", config)
    assert spec.topology.groups == ((4, 5), (6, 7))
    assert spec.environment == {"HF_TOKEN": "hf_secret_token"}
    assert "hf_secret_token" not in repr(spec) + repr(config)


async def test_the_journal_does_not_ask_where_a_model_is_served(stand_ins, tmp_path):
    journal = {"engine": {"seed": 7, "journal": {"path": str(tmp_path / "journal.db")}}}
    for replicas in (1, 2):
        own = {"command": [*stand_ins.command()[:-1], "pids=" + str(stand_ins.pids_file)], "data_parallel": replicas}
        async with RewardEngine(tree(own, **journal)) as engine:
            await engine.score_all(samples(3), deadline_s=30)
            assert engine.upstreams["own"].requests == (3 if replicas == 1 else 0)
