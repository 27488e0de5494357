"""`qreward serve` as a process: it serves until it is stopped, and what is under way ends first."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from ..kit import each_of, wait_until
from .conftest import reached


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
