"""The command itself: help, version, wrong words, streams that are closed or full, and where it may be started; and
`qreward init`: what it asks, what it writes, what it refuses, and what it never writes.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import qreward_plugins
from qreward_plugins import load_config
from qreward_plugins.cli import init as init_module
from qreward_plugins.cli import main as run_main
from qreward_plugins.cli.app import COMMANDS, app
from qreward_plugins.cli.console import OUT
from qreward_plugins.testing import JudgeServer

from ..kit import each_of

CONFIG = "sources: {f: {kind: function, function: 'math:isclose', mode: thread}}\njudges: {j: {kind: function}}\n"


def test_help_names_the_commands_and_imports_none_of_them():
    """Importing the engine takes a second."""
    program = "import sys; from qreward_plugins.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    *lines, modules = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ") and line.split()[0] in COMMANDS] == [*COMMANDS]
    loaded = modules.split()
    assert "qreward_plugins.cli.app" in loaded
    assert not {"pydantic", "aiohttp", "qreward_plugins.config", "qreward_plugins.engine"} & {*loaded}


def test_no_command_shows_the_help_and_the_version_is_printed(run_cli):
    assert "fake-judge" in run_cli().output
    result = run_cli("--version")
    assert (result.exit_code, result.stdout) == (0, f"qreward-plugins {qreward_plugins.__version__}\n")


def test_a_wrong_word_of_an_option_is_told_without_the_words_of_a_library(run_cli):
    result = run_cli("init", "--framework", "nope")
    assert result.exit_code == 2
    assert "'nope' is not one of 'verl', 'slime'" in result.stderr
    assert "Value error" not in result.stderr


@pytest.fixture
def main(tmp_path, monkeypatch):
    """Run the command in this process as its program does, with a standard output of its own. Returns its exit code."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments, stdout=None, encoding="utf-8"):
        monkeypatch.setattr(sys, "argv", ["qreward", *arguments])
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stdout or io.BytesIO(), encoding))
        with pytest.raises(SystemExit) as ended:
            run_main()
        sys.stdout.close()
        return ended.value.code

    return run


def test_functions_of_the_working_directory_are_found(main, tmp_path, write_config):
    """Also by an installed command, which lives in another folder."""
    (tmp_path / "my_rewards.py").write_text("def right(**_):\n    return 1.0\n")
    source = {"kind": "function", "function": "my_rewards:right", "workers": 1}
    write_config(sources={"f": source}, judges={"f": {"kind": "function"}})
    assert main("check", "config.yaml") == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_a_full_disk_is_one_message():
    line = [sys.executable, "-m", "qreward_plugins.cli", "--help"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == b"error: the output cannot be written (No space left on device)"
    assert b"Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_error_of_ours(main, capfd, monkeypatch):
    monkeypatch.setattr(OUT, "quiet", False)  # rich sets it
    reader, writer = os.pipe()
    os.close(reader)
    assert main("check", "config.yaml", stdout=os.fdopen(writer, "wb")) == 1
    assert capfd.readouterr().err == ""


def test_characters_that_a_stream_lacks_are_escapes(main, tmp_path):
    (tmp_path / "config.yaml").rename(tmp_path / "\u4f60.yaml")
    kept = tmp_path / "out.txt"
    assert main("check", "--offline", "\u4f60.yaml", stdout=kept.open("wb"), encoding="ascii") == 0
    assert b"\\u4f60.yaml: valid" in kept.read_bytes()


# `qreward init`


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
