"""The command itself: help, version, wrong words, streams that are closed or full, and where it may be started;
`qreward init`: what it asks, what it writes, what it refuses, and what it never writes; and the commands that serve
until they are stopped: `qreward serve`, `serve-judge` and `fake-judge`.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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
from qreward_plugins.testing import FaultKind, JudgeServer

from ..kit import each_of, wait_until
from .conftest import exited, reached, refusal, score_of

CONFIG = "sources: {f: {kind: function, function: 'builtins:dict', mode: thread}}\njudges: {j: {kind: function}}\n"


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


def written(name="judges.yaml"):
    return Path(name).read_text()


def files():
    return sorted(os.listdir())


def test_three_questions_make_a_file_that_is_checked(answer):
    with JudgeServer(score_of, models=["grader"]) as judge:
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
    result = exited(answer(*lines, flags=["b.yml"]))
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
    exited(init("j.yaml", "--framework", framework, "--score", score, *flags, "--offline", "--overwrite"))
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
        (("--framework", "nope"), "'nope' is not one of 'verl', 'slime'"),
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
    assert message in refusal(result)
    assert not any(word in result.output for word in ("Value error", KEY, "AKIAIOSFODNN7EXAMPLE"))
    assert files() == []


def test_a_key_is_used_and_its_variable_is_named(init, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    with JudgeServer(score_of, api_key=KEY) as server:
        result = init("--url", server.base_url, "--api-key-env", "JUDGE_API_KEY")
    assert result.exit_code == 0, result.output
    assert 'api_key_env: "JUDGE_API_KEY"' in written()
    assert KEY not in written() + result.output
    other = init("b.yaml", "--url", "https://api.openai.com/v1", "--model", "m")
    assert 'api_key_env: "OPENAI_API_KEY"' in written("b.yaml")
    assert "OPENAI_API_KEY is not set here, so the endpoint is not asked" in other.stdout


# `qreward serve`: what is under way ends first


def post(url: str, body: object, **headers: str):
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json", **headers})
    with urllib.request.urlopen(request, timeout=30) as reply:
        return json.load(reply)


def started(start_cli, *arguments, **options):
    process = start_cli("serve", *arguments, "--port", 0, **options)
    line = process.stdout.readline()
    assert line.startswith("reward server at http://127.0.0.1:"), process.end()
    return process, line.split()[3].rstrip(";")


def test_it_serves_reloads_and_is_stopped(start_cli, server, write_config, row, monkeypatch):
    monkeypatch.setenv("REWARD_TOKEN", "s3cret")
    config = write_config({"judge": server})
    process, url = started(start_cli, config, "--token-env", "REWARD_TOKEN")
    token = {"Authorization": "Bearer s3cret"}
    assert post(f"{url}/score", row(1), **token)["reward"] == 1.0
    assert post(f"{url}/slime", {"prompt": "?", "response": "It is 002.", "label": "002"}, **token) == 1.0
    with pytest.raises(urllib.error.HTTPError) as error:
        post(f"{url}/score", row(1))
    assert error.value.code == 401
    error.value.close()
    write_config({"judge": server}, engine={"deadline_s": 77})
    process.send_signal(signal.SIGHUP)
    assert process.stdout.readline().startswith("reloaded: engine.deadline_s: ")
    config.write_text("sources: [")
    process.send_signal(signal.SIGHUP)
    line = process.stdout.readline()
    assert line.startswith(f"{config} was not reloaded, and nothing has changed: ")
    assert "\\n" not in line
    server.hold()
    with ThreadPoolExecutor(1) as threads:
        asked = threads.submit(post, f"{url}/score", row(3), **token)
        server.wait_for(lambda report: report.in_flight == 1, timeout_s=30)
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline().startswith("no new samples")
        server.release()
        assert asked.result()["reward"] == 1.0, "what is under way ends before the server"
    assert process.communicate(timeout=30) == ("3 samples have a reward, 0 have none\n", "")
    assert process.returncode == 0


def test_who_is_left_at_the_end_is_told(stop_cli, server, write_config, row, port):
    server.hold()
    with ThreadPoolExecutor(1) as threads:

        def ask():
            wait_until(lambda: reached(port))
            asked.append(threads.submit(post, f"http://127.0.0.1:{port}/score", row(1)))
            server.wait_for(lambda report: report.in_flight == 1, timeout_s=30)

        asked = []
        options = ("--drain", "0", "--port", port)
        result = stop_cli(ask, "serve", write_config({"judge": server}), *options, number=signal.SIGTERM)
        with pytest.raises(urllib.error.HTTPError) as error:
            asked[0].result()
        error.value.close()
    assert (error.value.code, result.exit_code) == (503, 3)
    assert result.stdout.splitlines()[-1] == "0 samples have a reward, 1 have none"


# `qreward serve-judge`, and servers of a configuration


SERVE = ("serve", "rules.yaml", "--port", 0)
FAKE = ("fake-judge", "--port", 0)
STAND_IN = Path(__file__).parents[1] / "replicas" / "stand_in.py"
REPLICAS = """
sources:
  own:
    kind: replicas
    command: [{python}, -I, -S, {stand_in}, "{{port}}", "{{name}}", "{{model}}"{more}]
    model: judge
    platform: cpu
    data_parallel: 2
judges:
  quality: {{kind: llm, score_range: [0, 10]}}
"""


@pytest.fixture
def config(tmp_path):
    def write(more=""):
        path = tmp_path / "config.yaml"
        path.write_text(REPLICAS.format(python=sys.executable, stand_in=STAND_IN, more=more))
        return path

    return write


def test_check_prints_the_topology(run_cli, config):
    result = run_cli("check", str(config()))
    lines = result.output.splitlines()
    first = lines.index("own: 2 replicas of judge on command (cpu)")
    for number in range(2):
        assert lines[first + 1 + number].startswith(f"  replica {number} on cpu: http://127.0.0.1:")
    assert any(line.split()[:2] == ["own", "quality"] for line in lines)


@each_of(
    ("words", "said"),
    [
        (["serve-judge", "m", "--dp", "0"], "Invalid value for '--dp'"),
        (["serve-judge", "m", "--server", "other"], "m: sources.judge.server: must be 'vllm', 'sglang' or 'llama_cpp'"),
        (["serve-judge", "m", "--dp", "3", "--devices", "0,1"], "= 3 x 1 = 3, and the number of devices is 2"),
        (["serve-judge", "judges", "--tp", "2"], "is a configuration, so write tensor_parallel into its source"),
        (["serve-judge", "judges", "--source", "other"], "no source of kind replicas; such sources: own"),
        ([*SERVE, "--token-env", "NO_SUCH_TOKEN"], "--token-env NO_SUCH_TOKEN: this environment variable is not set"),
        ([*SERVE, "--host", "0.0.0.0"], "0.0.0.0 can be reached by others, so a token is needed"),
        ([*SERVE, "--host", "192.0.2.1", "--token-env", "PATH"], "cannot listen on 192.0.2.1:"),
        ([*FAKE, "--fault", "x=0.1"], "unknown fault 'x'; `qreward fake-judge --list-faults` shows all"),
        ([*FAKE, "--fault", "error_500"], "--fault error_500: write KIND=RATE"),
        ([*FAKE, "--requests-per-minute", "0"], "error: requests_per_minute must be a finite number above 0"),
    ],
)
def test_a_command_that_cannot_serve_says_why(run_cli, config, words, said):
    config().rename("judges")
    Path("rules.yaml").write_text(CONFIG)
    result = run_cli(*words)
    assert (said in refusal(result), result.stdout) == (True, "")


@pytest.fixture
def on_ray(config):
    """A configuration whose servers are to be placed on Ray."""
    path = config(', "host={host}"')
    path.write_text(path.read_text().replace("platform: cpu", "placement: ray"))
    return path


def test_without_a_ray_cluster_a_command_says_what_to_start(run_cli, on_ray, write_rows, row, monkeypatch):
    """A user of a shell cannot call `ray.init()`."""
    pytest.importorskip("ray")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("RAY_ADDRESS", address := f"127.0.0.1:{unused.getsockname()[1]}")
        result = run_cli("score", on_ray, write_rows([row(1)]), "--out", on_ray.parent / "out.jsonl")
    assert result.exit_code == 2
    remedy = "start one with `ray start --head`, or set RAY_ADDRESS to the address of one"
    said = f"source 'own' runs on Ray, and no Ray cluster answers at RAY_ADDRESS={address}: {remedy}"
    assert result.stderr.splitlines()[-1] == f"error: {on_ray}: {said}"


def test_an_offline_check_needs_no_cluster(run_cli, on_ray):
    told = exited(run_cli("check", "--offline", on_ray)).stdout
    assert "own: its servers run on a Ray cluster, which was not joined" in told


def test_serve_judge_starts_a_model_prints_the_addresses_and_stops_at_a_signal(start_cli, tmp_path, monkeypatch):
    module = tmp_path / "packages" / "vllm" / "entrypoints" / "openai" / "api_server.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import runpy, sys\n"
        "print(*sys.argv[1:], flush=True)\n"
        "sys.argv[1:1] = ['vllm']\n"
        f"runpy.run_path({str(STAND_IN)!r}, run_name='__main__')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"), prepend=":")
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights.bin").write_text("1")
    server = start_cli("serve-judge", model, "--dp", 2)
    lines = []
    while "stop them with Ctrl-C" not in (line := server.stdout.readline()):
        assert line, server.end()
        lines.append(line.rstrip())
    assert lines[0].startswith(f"judge: 2 replicas of {model} on vllm")
    assert sum("http://127.0.0.1:" in line for line in lines) == 2
    code, rest, _ = server.end(signal.SIGTERM)
    assert (code, "stopping the servers" in rest) == (0, True)


# `qreward fake-judge`: it tells what it saw


def test_it_serves_until_it_is_stopped_and_prints_what_it_saw(stop_cli, port):
    def ask():
        wait_until(lambda: reached(port))
        body = {"model": "mine", "messages": [{"role": "user", "content": "How good is this?"}]}
        assert post(f"http://127.0.0.1:{port}/v1/chat/completions", body)["model"] == "mine"

    options = ("--model", "mine", "--requests-per-minute", 600)
    result = stop_cli(ask, "fake-judge", "--port", port, *options, number=signal.SIGTERM)
    assert (result.exit_code, result.stderr) == (0, "")
    line, *lines = result.stdout.splitlines()
    at = f"http://127.0.0.1:{port}"
    assert line == f"fake judge at {at}/v1 (model mine) and {at}/score ; stop it with Ctrl-C"
    facts = {line[:16].strip(): line[16:].strip() for line in lines}
    assert facts["requests"].startswith("1 in ")
    assert (facts["answered"], facts["statuses"], facts["over a limit"]) == ("1", "200: 1", "none")
    assert (facts["faults played"], facts["most in 60 s"]) == ("none", "1")


def test_faults_are_listed_and_a_taken_port_is_one_line(run_cli):
    assert all(f"\n{kind} " in f"\n{run_cli('fake-judge', '--list-faults').stdout}" for kind in FaultKind)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_cli("fake-judge", "--port", port)
    assert (result.stdout, result.stderr.count("\n")) == ("", 1)
    assert f"cannot listen on 127.0.0.1:{port}" in refusal(result)
