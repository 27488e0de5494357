from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

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
