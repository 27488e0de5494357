"""`qreward pool` finds the servers that run, shows and changes them, and starts none."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from qreward_plugins import QRewardError, ReplicasNotChanged, RewardEngine, Sample
from qreward_plugins.cli.pool import _change_all, _changing
from qreward_plugins.system.processes import ProcessMark, machine

sys.path.insert(0, str(Path(__file__).parents[1] / "replicas"))
from pools import StandIns

COMMANDS = {
    "status": (),
    "sleep": (),
    "wake": (),
    "update": ("--weights", "new"),
}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """On a busy machine, a pool may answer after a second. Who waits says so on stderr."""
    monkeypatch.setattr("qreward_plugins.replicas.pool_use._SEARCH_SAID_AFTER_S", 30.0)


@pytest.fixture
def stand_ins(tmp_path):
    made = StandIns(tmp_path)
    yield made
    assert made.living() == []


@pytest.fixture
def config(tmp_path, stand_ins, short_directory):
    """Write a configuration of stand-ins for vLLM, and return its path."""

    def write(*options, name="config.yaml", others=(), **more):
        own = {
            "kind": "replicas",
            "server": "vllm",
            "program": stand_ins.program(*options),
            "model": str(stand_ins.weights("first")),
            "platform": "cpu",
            "data_parallel": 2,
            "weight_updates": "in_place",
            "sleep_mode": True,
            **more,
        }
        tree = {
            "sources": dict.fromkeys(("own", *others), own),
            "judges": {"quality": {"kind": "llm", "score_range": [0, 10]}},
            "engine": {"shared_directory": short_directory, "seed": 7},
        }
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


def samples(count):
    return [Sample([{"role": "user", "content": "Why?"}], f"Because of {n}.", id=str(n)) for n in range(count)]


def test_status_shows_what_all_processes_have_sent(run_cli, config):
    path = config()
    with RewardEngine(str(path)).portal() as first, RewardEngine(str(path)).portal() as second:
        for portal, count in ((first, 12), (second, 30)):
            assert {outcome.reward for outcome in portal.score_all(samples(count), deadline_s=60)} == {0.7}
        counted = [portal.statistics().sources["own"].replicas for portal in (first, second)]
        found = run_cli("pool", "status", path, "--json")
        (source,) = json.loads(found.stdout)["sources"]
        table = run_cli("pool", "status", path)
    assert (found.exit_code, table.exit_code) == (0, 0)
    assert (source["source"], source["processes"], source["silent"]) == ("own", 2, 0)
    replicas = source["replicas"]
    for replica in replicas:
        own = [each for process in counted for each in process if each.base_url == f"{replica['url']}/v1"]
        assert (len(own), replica["requests"]) == (2, sum(each.requests for each in own))
        assert (replica["in_flight"], replica["pending_tokens"]) == (0, 0)
    assert sum(replica["requests"] for replica in replicas) >= 42  # with hedges
    assert any(replica["prefix_hit_rate"] for replica in replicas)
    assert {replica["state"] for replica in replicas} == {"up"}
    assert sum(replica["health"]["up"] for replica in replicas) == 4

    lines = table.stdout.splitlines()
    assert lines[:2] == [f"own: 2 replicas of {source['model']} on vllm (cpu)", "used by 2 processes"]
    assert lines[2].split() == [
        *("replica", "address", "devices", "state", "version"),
        *("requests", "pending", "tokens", "hit", "rate", "health", "restarts"),
    ]
    for line, replica in zip(lines[3:], replicas, strict=True):
        number, address, devices, state, version, requests, pending, rate, health, restarts = line.split()
        assert (number, address, devices) == (str(replica["replica"]), replica["url"], "cpu")
        assert (state, version, pending, health, restarts) == ("up", "-", "0", "up", "0")
        assert requests == str(replica["requests"])
        assert rate == ("-" if replica["prefix_hit_rate"] is None else f"{replica['prefix_hit_rate']:.0%}")


def test_servers_of_serve_judge_sleep_wake_and_get_other_weights(run_cli, start_cli, config, stand_ins):
    path, new = config(), stand_ins.weights("second")
    server = start_cli("serve-judge", path)
    while "stop them with Ctrl-C" not in server.stdout.readline():
        assert server.poll() is None

    def status():
        (source,) = json.loads(run_cli("pool", "status", path, "--json").stdout)["sources"]
        return source["weights"], [(replica["state"], replica["version"]) for replica in source["replicas"]]

    asleep = run_cli("pool", "sleep", path, "--level", "2", "--drain", "abort", "--within", "30")
    assert asleep.stdout == f"own: the servers sleep; wake them with: qreward pool wake {path}\n"
    assert status()[1] == [("asleep", "")] * 2
    assert sum("/sleep?level=2" in line for line in stand_ins.notes()) == 2

    assert run_cli("pool", "wake", path).stdout == "own: the servers are awake\n"
    assert status()[1] == [("up", "")] * 2

    updated = run_cli("pool", "update", path, "--weights", new, "--version", "step-2", "--mode", "together")
    assert updated.stdout == f"own: the servers have the weights of {new} as step-2\n"
    assert status() == ({"version": "step-2", "path": str(new), "revision": 1}, [("up", "step-2")] * 2)
    assert "weights step-2 (" in run_cli("pool", "status", path).stdout

    run_cli("pool", "sleep", path)
    later = run_cli("pool", "update", path, "--weights", new, "--version", "step-3")
    assert later.stdout == f"own: the servers sleep; they load the weights of {new} as step-3 when they wake up\n"
    assert status()[1] == [("asleep", "step-2")] * 2
    run_cli("pool", "wake", path)
    assert status()[1] == [("up", "step-3")] * 2

    failed = run_cli("pool", "update", path, "--weights", path.parent / "none")
    assert failed.exit_code == 2
    assert failed.stderr.startswith("error: source 'own': replica 0: ")
    assert "none does not exist" in failed.stderr
    assert status()[1] == [("up", "step-3")] * 2
    server.end(15)


def test_a_source_whose_servers_do_not_run_hides_no_other(run_cli, config):
    path = config()
    with RewardEngine(str(path)).portal() as portal:
        portal.score(samples(1)[0], deadline_s=60)
        both = config(name="both.yaml", others=("second",))
        shown, parsed = run_cli("pool", "status", both), run_cli("pool", "status", both, "--json")
        changed = run_cli("pool", "sleep", both)
        refused = run_cli("pool", "sleep", path, "--within", "inf")
    assert [found.exit_code for found in (shown, parsed, changed, refused)] == [2] * 4
    assert "own: 2 replicas" in shown.stdout
    assert [source["source"] for source in json.loads(parsed.stdout)["sources"]] == ["own"]
    for found in (shown, parsed, changed):
        assert found.stderr.startswith("error: source 'second': no servers of it run")
    assert changed.stdout == ""
    assert refused.stderr == "error: within_s is a number of seconds above 0, not inf\n"


def test_a_change_that_fails_hides_no_other(capsys):
    class Changed:
        def __init__(self, name):
            self.name = name

    async def change(source):
        if source.name != "good":
            raise ReplicasNotChanged(f"source {source.name!r}: calls did not end")
        return "the servers sleep"

    console = Console()
    with pytest.raises(QRewardError, match="source 'bad': calls did not end\\nsource 'worse': calls did not end"):
        asyncio.run(_change_all([Changed("bad"), Changed("good"), Changed("worse")], change, console))
    assert capsys.readouterr().out == "good: the servers sleep\n"


def test_an_interrupted_command_says_that_the_change_goes_on(capsys):
    with pytest.raises(asyncio.CancelledError), _changing(Path("judges.yaml"), Console(), "waiting ..."):
        raise asyncio.CancelledError
    assert "a change that has begun goes on: qreward pool status judges.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_starts_servers(run_cli, config, stand_ins, short_directory, command):
    path = config()
    result = run_cli("pool", command, path, *COMMANDS[command])
    assert (result.exit_code, result.stdout) == (2, "")
    said = f"no servers of it run for this user on this machine (the directory is {short_directory})"
    said += ". `qreward serve-judge` starts them, or the first sample of a training"
    assert result.stderr.splitlines() == [f"error: source 'own': {said}"]
    assert list(Path(short_directory).iterdir()) == []
    assert stand_ins.notes() == []


def test_servers_with_other_settings_are_not_taken_for_these(run_cli, config):
    with RewardEngine(str(config())).portal() as portal:
        portal.score(samples(1)[0], deadline_s=60)
        other = config(name="other.yaml", data_parallel=1, environment={"HF_TOKEN": "hf_secret"})
        result = run_cli("pool", "sleep", other)
    assert result.exit_code == 2
    said = r"those of another source 'own' run: process \d+ differs in: data_parallel, environment\.HF_TOKEN\. Use"
    assert re.search(said, result.stderr)
    assert "hf_secret" not in result.output


@pytest.fixture
def training(config, monkeypatch, tmp_path):
    """Run a training with these devices and keys, of which a shell knows nothing."""
    path = config(
        platform="cuda",
        environment={"HF_TOKEN": "${oc.env:TRAINING_TOKEN}", "MODE": "written"},
        api_key_env="JUDGE_KEY",
        log_folder="logs",
    )

    @contextmanager
    def runs(devices):
        variables = {"CUDA_VISIBLE_DEVICES": devices, "TRAINING_TOKEN": "hf_secret", "JUDGE_KEY": "sk-secret"}
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            patch.chdir(tmp_path)
            engine = RewardEngine(str(path))
        with engine.portal() as portal:
            portal.score(samples(1)[0], deadline_s=60)
            yield path

    for name in ("CUDA_VISIBLE_DEVICES", "TRAINING_TOKEN", "JUDGE_KEY"):
        monkeypatch.delenv(name, raising=False)
    return runs


def test_a_shell_finds_the_servers_of_a_training_with_devices_and_keys_of_its_own(run_cli, training, monkeypatch):
    with training("4,5") as path:
        found = run_cli("pool", "status", path, "--json")
        table = run_cli("pool", "status", path)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        asleep = run_cli("pool", "sleep", path)
    assert (found.exit_code, found.stderr) == (0, "")
    (source,) = json.loads(found.stdout)["sources"]
    assert [replica["devices"] for replica in source["replicas"]] == ["4", "5"]
    assert table.stdout.splitlines()[0] == f"own: 2 replicas of {source['model']} on vllm (cuda)"
    assert asleep.exit_code == 0
    assert "secret" not in found.output + table.output


def test_several_fitting_pools_are_named_with_their_differences(run_cli, training, stand_ins, monkeypatch):
    with training("4,5"), training("6,7") as path:
        assert len(stand_ins.living()) == 4  # engines with other devices share nothing
        result = run_cli("pool", "sleep", path)
        for name, value in {"TRAINING_TOKEN": "hf_secret", "JUDGE_KEY": "sk-secret"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
        meant = run_cli("pool", "status", path, "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    each = r"process \d+ with the devices "
    said = "2 pools of 'own' run that this configuration may mean: "
    said += rf"({each}4, 5; {each}6, 7|{each}6, 7; {each}4, 5)\. They differ in: devices\. Write these keys"
    assert re.search(said, result.stderr)
    (source,) = json.loads(meant.stdout)["sources"]
    assert [replica["devices"] for replica in source["replicas"]] == ["6", "7"]


def test_what_the_configuration_says_itself_is_compared(run_cli, training):
    with training("4,5") as path:
        path.write_text(path.read_text().replace("MODE: written", "MODE: another"))
        result = run_cli("pool", "status", path)
    assert result.exit_code == 2
    assert "with the devices 4, 5 differs in: environment.MODE. Use the configuration of" in result.stderr


def test_a_server_that_nobody_supervises_is_named(run_cli, config, short_directory):
    left = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        mark = ProcessMark.of(left.pid)
        gone = [mark.pid, mark.started - 1]
        known = {"machine": machine(), "guard": gone, "watcher": gone, "server": [mark.pid, mark.started], "output": 0}
        label = {"source": "own", "replica": 1, "devices": "4"}
        (Path(short_directory) / "key.1-a.server").write_text(json.dumps({**known, "label": label}))
        result, parsed = run_cli("pool", "status", config()), run_cli("pool", "status", config(), "--json")
        other = run_cli("pool", "status", config(others=("other",)), "--source", "other")
    finally:
        left.communicate()
    said = "own: a server of replica 1 is unsupervised and holds the devices 4; the next start of servers ends it"
    assert result.stderr.splitlines()[0] == f"{said}, or: kill -9 {left.pid}"
    assert [found.exit_code for found in (result, parsed, other)] == [2, 2, 2]
    assert json.loads(parsed.stdout)["orphans"] == [{**label, "pids": [left.pid]}]
    assert "supervises" not in other.output


def test_an_update_of_several_sources_names_one(run_cli, config):
    result = run_cli("pool", "update", config(others=("other",)), "--weights", "new")
    assert result.exit_code == 2
    assert "several sources have servers; name one of them by --source: other, own" in result.stderr


def test_a_source_without_servers_is_named(run_cli, config):
    result = run_cli("pool", "status", config(), "--source", "else")
    assert result.exit_code == 2
    assert "--source else: it is no source of kind replicas; such sources: own" in result.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_a_terminal(run_cli, command):
    result = run_cli("pool", command, "--help")
    assert f"Usage: qreward pool {command}" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
