"""`qreward fake-judge`: it serves until it is stopped, and then tells what it saw."""

from __future__ import annotations

import json
import signal
import socket
import urllib.request

from qreward_plugins.testing import FaultKind

from ..kit import each_of, wait_until
from .conftest import reached


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
