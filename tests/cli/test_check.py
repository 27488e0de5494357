"""`qreward check`: what it says of sources and judges, what a reload would change, the kinds it lists, and the prompts
that judges would send.
"""

from __future__ import annotations

import json

import pytest
import yaml

import qreward_plugins
from qreward_plugins import RewardEngine, Sample
from qreward_plugins.cli import training_lines
from qreward_plugins.config.registry import rooms
from qreward_plugins.testing import Faults, JudgeServer, ServerLimits

from ..kit import each_of
from .conftest import exited, refusal, score_of

KEY = "sk-very-secret-0123456789abcdef"
TRIED = 7
"""Requests to a source that answers a judge: one for the sample, six for the three pairs of the trial."""


@pytest.fixture
def check(run_cli, tmp_path):
    return lambda *options: run_cli("check", tmp_path / "config.yaml", *options)


def table_of(result) -> dict[str, str]:
    """Lines of the table by the source's name."""
    return {line.split()[0]: line for line in result.stdout.splitlines() if "quality" in line and ":" not in line}


def test_a_good_source_shows_latency_limits_and_verdict(check, write_config, tmp_path):
    limits = ServerLimits(requests_per_minute=600, tokens_per_minute=50_000)

    def scorer(call):
        return {"score": score_of(call) / 2, "rationale": "half \x1b[31m right"}

    with JudgeServer(scorer, limits=limits) as server:
        write_config({"fast": server}, engine={"journal": {"path": str(tmp_path / "verdicts.sqlite")}})
        result = check()
        assert (result.exit_code, result.stderr) == (0, ""), result.output
        assert server.report().requests == TRIED
    assert "config.yaml: valid, with 1 source, 1 judge, 0 routes" in result.stdout
    row = table_of(result)["fast"]
    for part in ("0.5", "600 requests per window", "s  "):
        assert part in row
    assert "50,000 tokens per window" in result.stdout
    assert 'fast says: "half \\x1b[31m right"' in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"], "the journal is left alone"


def test_a_dead_and_a_silent_source_are_named_and_the_others_are_asked(check, server, write_config):
    with JudgeServer(faults=Faults(script=["hang"])) as silent:
        servers = {"dead": "http://127.0.0.1:9/v1", "silent": silent, "alive": server}
        write_config(servers, source={"timeouts": {"total_s": 0.5}})
        result = check()
    assert (result.exit_code, server.report().requests) == (1, TRIED)
    assert "judge quality: source 'dead' (http://127.0.0.1" in result.stdout
    assert "source 'silent': silent gave no answer within 0.5 s" in result.stdout
    assert ["none" in table_of(result)[name] for name in servers] == [True, True, False]


def test_keys_are_asked_one_by_one_and_never_shown(check, write_config, monkeypatch):
    keys = [f"{KEY}-one", f"{KEY}-two"]
    for name, key in zip(("QREWARD_KEY_1", "QREWARD_KEY_2"), keys, strict=True):
        monkeypatch.setenv(name, key)
    with JudgeServer(api_key=keys[:1]) as server:
        source = {"api_key_env": ["QREWARD_KEY_1", "QREWARD_KEY_2"], "headers": {"X-Team": KEY[::-1]}}
        write_config({"a": server}, source=source)
        result = check()
    assert result.exit_code == 1
    for part in ("1 source,", "a#1", "source 'a#2'", "401"):
        assert part in result.stdout
    assert not any(secret in result.output for secret in (KEY[::-1], KEY[:12], *keys))


def test_mistakes_come_before_any_request(check, server, write_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for options, said in (
        ({"judge": {"instructions": "{{ respons }}"}}, "config.yaml: judges.quality.instructions"),
        ({"source": {"api_key_env": "QREWARD_NO_SUCH_KEY"}}, "'QREWARD_NO_SUCH_KEY' is not set"),
        ({"engine": {"journal": {"path": "absent/verdicts.sqlite"}}}, "there is no directory"),
        ({"engine": {"journal": {"path": "config.yaml"}}}, "is not a journal; name another file"),
        ({"engine": {"journal": {"path": "."}}}, "is a directory; name a file in it"),
    ):
        write_config({"a": server}, **options)
        result = check()
        assert (result.exit_code, result.stdout, server.report().requests) == (2, "", 0)
        assert said in result.stderr


def test_every_judge_and_part_gets_the_first_row_that_is_routed_to_it(check, write_config, write_rows, row):
    seen = []

    def scorer(call):
        seen.append((json.loads(call.prompt.splitlines()[0])["judge"], call.blocks["response"]))
        return 1.0

    with JudgeServer(scorer) as server:
        judges = {
            name: {"kind": "llm", "instructions": f'{{"judge": "{name}"}}\n', "score_range": [0, 1]}
            for name in ("math", "code")
        }
        judges["both"] = {"kind": "sum", "weights": {"math": 0.75, "code": -1}}
        write_config({"a": server}, judges=judges, routes={"m/*": "both", "c/*": "code"})
        rows = [("m/1", " "), ("x", "nobody's"), ("c/1", "print"), ("m/2", "two")]
        result = check("-r", write_rows([row(0, data_source=source, response=said) for source, said in rows]))
    assert result.exit_code == 0, result.output
    assert dict(reversed(seen[:-1])) == {"math": "two", "code": "print"}
    assert len(seen) == 2 * TRIED + 2
    assert sorted(seen[-2:]) == [("code", "two"), ("math", "two")], "the sum asks both of its parts about its own row"
    assert 'routes: samples of other data sources get no reward; a last route "*" would judge' in result.stdout


def test_a_judge_that_needs_columns_gets_them_from_rollouts(check, server, write_config, write_rows, row):
    write_config({"a": server}, judge={"instructions": "By this rubric: {{ extras.rubric }}"})
    result = check()
    assert (result.exit_code, server.report().requests) == (1, 0)
    assert "use one of yours with --rollouts" in result.stdout
    assert check("--rollouts", write_rows([row(0, rubric="Be kind.")])).exit_code == 0
    assert server.report().requests == TRIED
    assert "cannot be read" in refusal(check("--rollouts", "gone.jsonl"))


def test_a_judge_that_cannot_judge_is_told(check, write_config):
    for scorer, said in (
        (lambda call: 1.0, "gives right answers and nonsense the same reward, 1"),
        (lambda call: {"score": 1.0, "rationale": "<one or two sentences>"}, "copied from the form"),
        (lambda call: "Fine." if "asdf" in call.prompt or "Moon" in call.prompt else score_of(call), "2 of 6"),
    ):
        with JudgeServer(scorer) as server:
            write_config({"tiny": server}, engine={"seed": 3})
            result = check()
        assert result.exit_code == 1
        assert said in result.stdout.replace("\n", " ")
        assert "use a more capable model" in result.stdout


def test_what_is_no_proof_that_a_judge_is_unable(check, write_config):
    """Instructions of its own may ask for something else."""
    with JudgeServer(lambda call: len(call.blocks["response"]) / 100) as server:
        write_config({"long": server}, judge={"instructions": "The longer, the better."})
        result = check()
    assert result.exit_code == 0, result.output
    assert "judge quality: source 'long' may be unable to judge: it cannot tell a right answer from n" in result.stdout


@each_of("extract", ["boxed", "last_line"])
def test_test_answers_stand_where_the_judge_looks_for_them(check, write_config, extract):
    with JudgeServer(score_of) as server:
        judge = {"kind": "llm", "reference": {"extract": extract}}
        write_config({"a": server}, judges={"quality": judge})
        result = check()
        assert (result.exit_code, server.report().requests) == (0, TRIED), result.output
        assert "<<<response" in check("--prompt").stdout
        write_config({"a": server}, judges={"quality": {**judge, "reference": {"extract": {"regex": "x(.)"}}}})
        result = check()
        assert (result.exit_code, server.report().requests) == (1, TRIED)
        assert "the built-in sample does not fit this judge" in result.stdout


def test_a_check_ends_with_the_line_to_train_with(check, server, write_config, monkeypatch):
    path = write_config({"a": server})
    monkeypatch.setattr(training_lines, "installed", lambda: ["verl"])
    verl = "python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward"
    assert check().stdout.splitlines()[-2:] == ["Train with verl (docs/verl.md):", f"  {verl} +qreward.config={path}"]
    monkeypatch.setattr(training_lines, "installed", list)
    told = check().stdout
    slime, trl = "... --custom-rm-path slime_adapter.reward", "reward_funcs=[qreward_plugins.bridges.trl.reward("
    roll = "user_defined_rollout_loop_cls: roll_adapter.QRewardRolloutLoop\n  rewards: {my_domain: {worker_cls: roll_"
    for part in (verl, f"export QREWARD_CONFIG={path}; {slime}", roll, f"[{{config: {path}}}]}}}}", f'{trl}"{path}")'):
        assert part in told


def test_what_loses_samples_in_a_training_is_told_beside_the_line_to_train_with(check, write_config):
    source = {"timeouts": {"total_s": 400}, "parameters": {"reasoning_effort": "high"}}
    write_config({"slow": "http://127.0.0.1:9/v1"}, source=source, judge={"max_tokens": 500})
    said = check("--offline", "--framework", "roll").stdout
    assert "sources.slow.timeouts.total_s: one try may take 400 s, longer than engine.deadline_s (300 s)" in said
    assert "judges.quality.max_tokens: 500 for the thoughts of slow and a verdict" in said
    assert "Train with roll" in said
    assert "Train with verl" not in said


def test_an_offline_check_asks_nothing_and_needs_no_key_and_no_trainer(check, write_config, tmp_path):
    servers = {"a": "http://127.0.0.1:9/v1", "b": "framework://judge/v1"}
    write_config(servers, source={"api_key_env": "QREWARD_NO_SUCH_KEY"})
    result = exited(check("--offline"))
    assert "valid, with 2 sources, 1 judge, 0 routes; nothing was asked" in result.stdout
    assert "a: QREWARD_NO_SUCH_KEY is not set" in result.stdout
    assert "b: its address comes from the training framework" in result.stdout
    write_config({"a": "http://127.0.0.1:9/v1"}, judge={"instructions": "{{ respons }}"})
    assert check("--offline").exit_code == 2
    tree = {"engine": {"server": {"url": "http://127.0.0.1:9", "start_s": 0.2}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert check("--offline").exit_code == 0
    for options, most in (((), "0.2"), (("--timeout", "0.1"), "0.1")):
        result = exited(check(*options), 2)
        assert result.stderr.startswith(f"asking the reward server at http://127.0.0.1:9, for {most} s at most")


@pytest.fixture
def against(check, write_config, monkeypatch):
    """Compare a configuration with another one."""
    monkeypatch.setattr("qreward_plugins.cli.console.OUT.width", 160)

    def run(new, old=None):
        shared = {"judges": {"quality": {"kind": "llm", "sources": ["a"]}}}
        write_config({"a": "http://a.invalid/v1"}, name="old.yaml", **{**shared, **(old or {})})
        path = write_config({"a": "http://a.invalid/v1"}, **{**shared, **new})
        return check("--against", path.with_name("old.yaml"))

    return run


def test_a_difference_is_a_table_and_shows_no_secret(against):
    source = {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "judge"}
    changed = {**source, "limits": {"requests_per_minute": 60}, "api_key": "sk-secret"}
    shown = against({"sources": {"a": changed, "b": source}})
    assert (shown.exit_code, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    for path, said in (
        ("sources.a.limits.requests_per_minute", "60"),
        ("sources.b", "is reloaded"),
        ("sources.a.api_key", "is reloaded"),
    ):
        assert any(path in line and said in line for line in lines), path
    assert "sk-secret" not in shown.stdout
    assert lines[-1] == "a reload would apply this as a whole"


def test_what_needs_a_restart_and_what_is_wrong_have_their_exit_codes(against):
    assert against({}).stdout == "no change\n"
    shown = against({"engine": {"shared": "off"}})
    assert shown.exit_code == 1
    assert shown.stdout.splitlines()[-1] == "a reload would be refused as a whole: engine.shared needs a restart"
    assert "old.yaml: routes" in refusal(against({}, {"routes": {"*": "gone"}}))


def test_kinds_are_listed_with_their_package_and_their_problem(run_cli, install):
    result = exited(run_cli("check", "--kinds"))
    ours = f"qreward-plugins {qreward_plugins.__version__}"
    kinds = [line.split()[0] for line in result.stdout.splitlines() if ours in line]
    assert kinds == [name for room in rooms.values() for name, _ in room.loadable()]
    install("coin-kind", "coin_kind", "", {"qreward_plugins.sources": {"coin": "os:fspath"}})
    result = run_cli("check", "--kinds")
    assert (result.exit_code, "coin coin-kind 1.2" in " ".join(result.stdout.split())) == (1, True)


def test_what_stops_the_test_answers_is_told(check, write_config):
    with JudgeServer(faults=Faults(script=[None], rates={"error_500": 1.0})) as server:
        write_config({"a": server})
        result = check()
    assert result.exit_code == 1
    assert "judge quality: source 'a' did not grade the test answers: " in result.stdout


# `--prompt`: what each judge would send, without sending it


def told(run_cli, *arguments, code=0):
    result = exited(run_cli("check", *arguments, "--prompt"), code)
    return result.stdout


def test_a_prompt_is_what_the_judge_gets(run_cli, write_config, write_rows):
    sent = []
    response = "four\x1b[2J  \n\nsecond line "
    rows = write_rows([{"prompt": "?", "response": "no"}, {"prompt": "2 + 2?", "response": response}])
    with JudgeServer(lambda call: sent.append(call) or 1.0) as server:
        config = write_config({"a": server}, judge={"criteria": {"proof": "Proven?"}}, engine={"seed": 3})
        shown = told(run_cli, config, "--rollouts", rows, "--row", "2")
        assert sent == []
        with RewardEngine(config).portal() as engine:
            engine.score(Sample([{"role": "user", "content": "2 + 2?"}], response))
    (call,) = sent
    lines = shown.splitlines()
    assert lines[0].startswith("judge quality to source a (judge)")
    assert lines[1] == "model: judge"
    block = lines[lines.index("- role: user") + 2 :]
    # The nonce of another process is another one, unless there is a seed.
    expected = [line.replace("\x1b", "\\x1b") for line in call.prompt.split("\n")]
    assert [line[4:] for line in block[: len(expected)]] == expected
    assert f"max_tokens: {call.parameters['max_tokens']}" in lines
    assert "\x1b" not in shown


def test_prompts_of_every_dialect_of_functions_and_of_a_sample_that_does_not_fit(run_cli, write_config):
    sources = {
        "a": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m", "api_key_env": "NOT_SET"},
        "b": {"kind": "openai", "base_url": "http://b.invalid", "model": "claude", "dialect": "anthropic"},
        "f": {"kind": "function", "function": "builtins:dict"},
    }
    judges = {"words": {"kind": "llm", "sources": ["a", "b"]}, "rules": {"kind": "function", "sources": ["f"]}}
    config = write_config(sources=sources, judges=judges, routes={"math": "words", "*": "rules"})
    shown = told(run_cli, config)
    assert [line.split(" (")[0] for line in shown.splitlines() if line.startswith("judge ")] == [
        "judge words to source a",
        "judge words to source b",
        "judge rules to source f",
    ]
    assert shown.count("What is 17 plus 25?") == 3
    assert "the function is called with:" in shown
    needy = write_config({"a": "http://a.invalid/v1"}, judge={"instructions": "{{ extras.topic }} {{ response }}"})
    assert "show a row of yours with --rollouts FILE" in told(run_cli, needy)


def test_a_row_that_is_not_there(run_cli, write_config, write_rows):
    config = write_config({"a": "http://a.invalid/v1"})
    rows = write_rows([{"prompt": "?", "response": "!"}])
    assert "has no row 2" in refusal(run_cli("check", config, "--prompt", "--rollouts", rows, "--row", "2"))
    assert "--row needs --prompt and --rollouts" in refusal(run_cli("check", config, "--row", "2"))


def test_no_secret_is_printed_in_a_prompt(run_cli, write_config):
    source = {"parameters": {"metadata": {"api_token": "HIDDENTOKEN123456"}}}
    config = write_config({"a": "http://a.invalid/v1"}, source=source)
    assert "HIDDENTOKEN123456" not in told(run_cli, config)
