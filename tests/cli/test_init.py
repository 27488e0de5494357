"""`qreward init`: what it asks, what it writes, what it refuses, and what it never writes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from qreward_plugins import load_config
from qreward_plugins.cli import init as init_module
from qreward_plugins.cli.app import app
from qreward_plugins.testing import JudgeServer

from ..kit import each_of

KEY = "sk-very-secret-0123456789abcdef"
NOWHERE = "http://127.0.0.1:9/v1"
GIVEN = ("--framework", "verl", "--url", NOWHERE, "--model", "m")


def right(call) -> float:
    return float(call.blocks["reference"] in call.blocks["response"])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def init(run_cli):
    return lambda *flags: run_cli("init", *flags)


@pytest.fixture
def answer(monkeypatch):
    """Answer the questions at a terminal, one line each; the input ends after them."""
    monkeypatch.setattr(init_module, "has_terminal", lambda: True)

    def run(*lines, flags=()):
        typed = "".join(f"{line}\n" for line in lines)
        return CliRunner().invoke(app, ["init", *flags], input=typed, prog_name="qreward")

    return run


@pytest.fixture(scope="module")
def judge():
    with JudgeServer(right, models=["grader"]) as server:
        yield server


def written(name="judges.yaml"):
    return Path(name).read_text()


def files():
    return sorted(os.listdir())


def test_three_questions_make_a_file_that_is_checked(answer, judge):
    result = answer("", "", judge.base_url + "/chat/completions", flags=["my.yaml"])
    assert result.exit_code == 0, result.output
    source = load_config("my.yaml").sources["judge"]
    # The only model that the endpoint lists.
    assert (source.urls, source.model, source.limits.concurrency) == ((judge.base_url,), "grader", 64)
    assert "my.yaml: valid, with 1 source, 1 judge, 0 routes" in result.stdout
    train = "python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward"
    assert result.stdout.splitlines()[-1] == f"  {train} +qreward.config={Path('my.yaml').absolute()}"
    assert files() == ["my.yaml"]


def test_an_answer_is_asked_again_until_it_can_be_used(answer):
    Path("mine.py").write_text("def score(solution_str, **_):\n    return 1.0\n")
    lines = ("caffe", "verl", "mixture", "gone.py:f", "mine.py:score", "ftp://x", NOWHERE, " ", "m")
    result = answer(*lines, flags=["b.yml"])
    assert result.exit_code == 0, result.output
    for remark in (
        "one of: verl, slime, roll, trl, none",
        "there is no file",
        "must start with http://",
        "at least 1 character",
    ):
        assert remark in result.output
    config = load_config("b.yml")
    assert (config.sources["judge"].model, set(config.judges)) == ("m", {"quality", "correct", "total"})


def test_a_file_is_replaced_only_with_a_flag(init):
    Path("judges.yaml").write_text("mine")
    refused = init(*GIVEN)
    assert (refused.exit_code, written()) == (2, "mine")
    assert "judges.yaml exists; add --overwrite, or name another file" in refused.stderr
    assert init(*GIVEN, "--overwrite").exit_code == 0


def test_the_end_of_the_input_or_ctrl_c_ends_it_and_nothing_is_written(answer):
    result = answer("verl", "judge")
    assert (result.exit_code, files()) == (130, [])
    assert "stopped; nothing was written" in result.stderr


@each_of(
    ("framework", "score"),
    [("verl", "judge"), ("slime", "reward-model"), ("roll", "judge"), ("roll", "mixture"), ("none", "function")],
)
def test_every_template_is_valid_with_and_without_its_marks(init, framework, score):
    """A reader removes the # before a key to set it."""
    Path("mine.py").write_text("def whole(sample):\n    return 1.0\n")
    Path("chat.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    flags = [] if score == "function" else ["--url", NOWHERE, "--model", "1e3"]
    flags += ["--function", "mine.py:whole"] if score in ("function", "mixture") else []
    result = init("j.yaml", "--framework", framework, "--score", score, *flags, "--offline", "--overwrite")
    assert result.exit_code == 0, result.output
    text = written("j.yaml")
    config = load_config(yaml.safe_load(text))
    assert config.engine.journal is None
    if score != "function":
        assert config.sources["rm" if score == "reward-model" else "judge"].model == "1e3"
    if score == "judge":
        # ROLL's `val_correct` counts scores of exactly 1, so it would read 0.
        assert config.judges["quality"].correct_at == (0.6 if framework == "roll" else None)
    if score in ("function", "mixture"):
        rules = config.sources["rules"]
        assert (rules.function, rules.arguments) == (f"{Path('mine.py').absolute()}:whole", "sample")
    unmarked = re.sub(r"^( *)#(?! \S)", r"\1", text, flags=re.MULTILINE)
    unmarked = unmarked.replace("/models/my-reward-model", str(Path("chat.jinja").absolute()))
    config = load_config(yaml.safe_load(unmarked))
    assert config.engine.journal.path == "verdicts.sqlite"
    if score in ("judge", "mixture"):
        assert config.sources["judge"].limits.tokens_per_minute == 400_000
        assert "{% if reference %}" in config.judges["quality"].instructions
    if framework in ("slime", "roll"):
        assert config.groups.min_scored == 6


@each_of(
    ("flags", "message"),
    [
        (("--url", NOWHERE), f"--model is missing; {NOWHERE} lists none (no answer: Connect call failed"),
        (("--url", "ftp://x.y/v1", "--model", "m"), "--url: a URL must start with http:// or https://"),
        (("--url", f"http://x/{KEY}", "--model", "m"), "--url: that holds something that looks like an API key"),
        (("no/such/x.yaml", "--url", NOWHERE, "--model", "m"), "no/such/x.yaml: there is no directory"),
        (("--score", "function", "--framework", "verl"), "--function is missing"),
        (("--function", "math:isclose"), "--function: it takes ("),
        (("--url", NOWHERE, "--model", "m", "--api-key-env", "AKIAIOSFODNN7EXAMPLE"), "--api-key-env: write the name"),
        (("--function", "math:fabs", "--score", "function", "--model", "m"), "--model has no effect with --score func"),
    ],
)
def test_what_is_missing_or_wrong_is_one_message_and_nothing_is_written(init, flags, message):
    result = init(*flags)
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert not any(secret in result.output for secret in ("pw@", KEY, "AKIAIOSFODNN7EXAMPLE"))
    assert files() == []


def test_a_key_is_used_and_its_variable_is_named(init, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    with JudgeServer(right, api_key=KEY) as server:
        result = init("--url", server.base_url, "--api-key-env", "JUDGE_API_KEY")
    assert result.exit_code == 0, result.output
    assert 'api_key_env: "JUDGE_API_KEY"' in written()
    assert KEY not in written() + result.output
    other = init("b.yaml", "--url", "https://api.openai.com/v1", "--model", "m")
    assert 'api_key_env: "OPENAI_API_KEY"' in written("b.yaml")
    assert "OPENAI_API_KEY is not set here, so the endpoint is not asked" in other.stdout
