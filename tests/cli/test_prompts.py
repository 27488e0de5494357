"""`qreward check --prompt`: what each judge would send, without sending it."""

from __future__ import annotations

import asyncio
import json

from qreward_plugins import RewardEngine, Sample
from qreward_plugins.testing import JudgeServer


def told(run_cli, *arguments, code=0):
    result = run_cli("check", *arguments, "--prompt")
    assert result.exit_code == code, result.output
    return result.stdout


def rows_of(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_it_is_what_the_judge_gets(run_cli, write_config, tmp_path):
    sent = []
    response = "four\x1b[2J  \n\nsecond line "
    rows = rows_of(tmp_path, {"prompt": "?", "response": "no"}, {"prompt": "2 + 2?", "response": response})
    with JudgeServer(lambda call: sent.append(call) or 1.0) as server:
        config = write_config({"a": server}, judge={"criteria": {"proof": "Proven?"}}, engine={"seed": 3})
        shown = told(run_cli, config, "--rollouts", rows, "--row", "2")
        assert sent == []

        async def main():
            async with RewardEngine(config) as engine:
                await engine.score(Sample([{"role": "user", "content": "2 + 2?"}], response))

        asyncio.run(main())
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


def test_every_dialect_functions_and_a_sample_that_does_not_fit(run_cli, write_config):
    sources = {
        "a": {"kind": "openai", "base_url": "http://a.invalid/v1", "model": "m", "api_key_env": "NOT_SET"},
        "b": {"kind": "openai", "base_url": "http://b.invalid", "model": "claude", "dialect": "anthropic"},
        "f": {"kind": "function", "function": "math:fsum"},
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


def test_a_row_that_is_not_there(run_cli, write_config, tmp_path):
    config = write_config({"a": "http://a.invalid/v1"})
    rows = rows_of(tmp_path, {"prompt": "?", "response": "!"})
    result = run_cli("check", config, "--prompt", "--rollouts", rows, "--row", "2")
    assert (result.exit_code, "has no row 2" in result.stderr) == (2, True)
    result = run_cli("check", config, "--row", "2")
    assert (result.exit_code, "--row needs --prompt and --rollouts" in result.stderr) == (2, True)


def test_no_secret_is_printed(run_cli, write_config):
    source = {"parameters": {"metadata": {"api_token": "HIDDENTOKEN123456"}}}
    config = write_config({"a": "http://a.invalid/v1"}, source=source)
    assert "HIDDENTOKEN123456" not in told(run_cli, config)
