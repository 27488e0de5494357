"""The commands that serve until they are stopped: `qreward serve`, `serve-judge` and `fake-judge`."""

from __future__ import annotations

import json
import signal
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from qreward_plugins.testing import FaultKind

from ..kit import each_of, wait_until
from .conftest import reached

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
    assert "not reloaded, and nothing has changed: " in line
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


@each_of(
    ("arguments", "said"),
    [
        (["--token-env", "NO_SUCH_TOKEN"], "--token-env NO_SUCH_TOKEN: this environment variable is not set"),
        (["--host", "0.0.0.0"], "0.0.0.0 can be reached by others, so a token is needed"),
        (["--host", "192.0.2.1", "--token-env", "PATH"], "cannot listen on 192.0.2.1:"),
    ],
)
def test_a_mistake_is_one_line(run_cli, server, write_config, arguments, said):
    result = run_cli("serve", write_config({"judge": server}), "--port", 0, *arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert said in result.stderr


# `qreward serve-judge`, and servers of a configuration


STAND_IN = Path(__file__).parents[1] / "replicas" / "stand_in.py"
CONFIG = """
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
        path.write_text(CONFIG.format(python=sys.executable, stand_in=STAND_IN, more=more))
        return path

    return write


def test_check_prints_the_topology(run_cli, config):
    result = run_cli("check", str(config()))
    lines = result.output.splitlines()
    first = lines.index("own: 2 replicas of judge on command (cpu)")
    for number in range(2):
        assert lines[first + 1 + number].startswith(f"  replica {number} on cpu: http://127.0.0.1:")
    assert any(line.split()[:2] == ["own", "quality"] for line in lines)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["m", "--dp", "0"], "Invalid value for '--dp'"),
        (["m", "--server", "other"], "error: m: sources.judge.server: must be 'vllm', 'sglang' or 'llama_cpp'"),
        (
            ["m", "--dp", "3", "--devices", "0,1"],
            "data_parallel x tensor_parallel = 3 x 1 = 3, and the number of devices is 2",
        ),
        (["judges", "--tp", "2"], "judges is a configuration, so write tensor_parallel into its source"),
        (["judges", "--source", "other"], "it is no source of kind replicas; such sources: own"),
    ],
)
def test_a_topology_is_of_a_model(run_cli, config, monkeypatch, words, says):
    monkeypatch.chdir(config().parent)
    Path("config.yaml").rename("judges")
    result = run_cli("serve-judge", *words)
    assert (result.exit_code, says in " ".join(result.output.split())) == (2, True), result.output


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
    result = run_cli("check", "--offline", on_ray)
    assert result.exit_code == 0
    assert "own: its servers run on a Ray cluster, which was not joined" in result.stdout


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
        url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as reply:
            assert json.load(reply)["model"] == "mine"

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
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr


@each_of(
    ("options", "message"),
    [
        (["--fault", "x=0.1"], "unknown fault 'x'; `qreward fake-judge --list-faults` shows all"),
        (["--fault", "error_500"], "--fault error_500: write KIND=RATE"),
        (["--requests-per-minute", "0"], "error: requests_per_minute must be a finite number above 0"),
    ],
)
def test_options_that_cannot_be_are_refused(run_cli, options, message):
    result = run_cli("fake-judge", "--port", 0, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
