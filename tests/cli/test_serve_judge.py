from __future__ import annotations

import os
import signal
import subprocess
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
engine: {{shared_directory: {directory}}}
"""


@pytest.fixture
def config(tmp_path, short_directory):
    def write(more=""):
        path = tmp_path / "config.yaml"
        path.write_text(CONFIG.format(python=sys.executable, stand_in=STAND_IN, more=more, directory=short_directory))
        return path

    return write


def test_check_prints_the_topology(run_cli, config):
    result = run_cli("check", str(config()))
    lines = result.output.splitlines()
    assert "own: 2 replicas of judge on command (cpu)" in lines
    (header,) = (number for number, line in enumerate(lines) if line.startswith("replica"))
    assert lines[header].split() == ["replica", "devices", "port", "address"]
    for number, line in enumerate(lines[header + 1 : header + 3]):
        shown, devices, port, address = line.split()
        assert (shown, devices, address) == (str(number), "cpu", f"http://127.0.0.1:{port}")
    assert any(line.split()[:2] == ["own", "quality"] for line in lines)


def test_check_shows_the_log_of_a_server_that_does_not_start(run_cli, config):
    result = run_cli("check", str(config(", exit=1")))
    assert result.exit_code == 2
    assert "source 'own' cannot start its servers: replica" in result.output
    assert "RuntimeError: no memory for the weights" in result.output


def test_serve_judge_prints_the_addresses_and_stops_at_a_signal(config):
    command = [sys.executable, "-m", "qreward_plugins.cli", "serve-judge", str(config())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as server:
        lines = []
        for line in server.stdout:
            lines.append(line.rstrip())
            if "stop them with Ctrl-C" in line:
                break
        assert lines[0] == "own: 2 replicas of judge on command (cpu)"
        assert sum("http://127.0.0.1:" in line for line in lines) == 2
        os.kill(server.pid, signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(30) == 0
    assert "stopping the servers" in rest


def test_serve_judge_names_what_it_can_start(run_cli, config):
    result = run_cli("serve-judge", str(config()), "--source", "other")
    assert result.exit_code == 2
    assert "--source other: it is no source of kind replicas; such sources: own" in result.output
