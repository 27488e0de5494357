"""A pool on a real local Ray: placed, shared by name, survived, ended; and one that the cluster cannot place."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
ray = pytest.importorskip("ray", reason="Ray is not installed (pip install 'qreward-plugins[ray]')")

from pools import comes  # noqa: E402

from qreward_plugins import ReplicasNotStarted, RewardEngine, Sample  # noqa: E402
from qreward_plugins.replicas import ray_pool  # noqa: E402
from qreward_plugins.replicas.ray_pool import RayPoolActor  # noqa: E402
from qreward_plugins.replicas.weights import Weights  # noqa: E402

# Ray leaves sockets and log files of its own to the garbage collector.
pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*Tip.*"),
]


@pytest.fixture(scope="module")
def private():
    """The directory of the cluster's processes, in which replicas write their logs."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="qr", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster():
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def tree(command, directory=None, **more):
    own = {
        "kind": "replicas",
        "model": "judge",
        "placement": "ray",
        **command,
        "start_within_s": 180.0,
        **more,
    }
    judge = {"kind": "llm", "score_range": [0, 10], "max_tokens": 64}
    engine = {"seed": 7, "shared": "off", "shared_directory": directory and str(directory)}
    return {"sources": {"own": own}, "judges": {"quality": judge}, "engine": engine}


def samples(count):
    return [Sample([{"role": "user", "content": "Why?"}], f"Because of {n}.", id=str(n)) for n in range(count)]


def groups():
    return [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]


async def in_a_shell(folder, tree, command, *options):
    """Run `qreward pool` outside the job, and return its exit code and output."""
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    words = ("-m", "qreward_plugins.cli", "pool", command, str(folder / "config.yaml"), *options)
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    shell = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, **pipes)
    out, err = await shell.communicate()
    return shell.returncode, out.decode(), err.decode()


async def test_a_pool_on_ray(cluster, stand_ins, private, tmp_path):
    first_weights, second = stand_ins.weights("first"), stand_ins.weights("second")
    servers = {"server": "vllm", "program": stand_ins.program(), "model": str(first_weights)}
    own = tree({**servers, "weight_updates": "in_place"}, private, data_parallel=2)
    async with RewardEngine(own) as first, RewardEngine(own) as other:
        assert [outcome.reward for outcome in await first.score_all(samples(10), deadline_s=180)] == [0.7] * 10
        assert [outcome.reward for outcome in await other.score_all(samples(10), deadline_s=180)] == [0.7] * 10
        states, theirs = (engine.upstreams["own"].source.replicas for engine in (first, other))
        assert {state.url for state in states} == {state.url for state in theirs}
        assert len(stand_ins.living()) == 2
        assert sorted(row["bundles"][0]["CPU"] for row in groups()) == [1.0, 1.0]

        # A replica whose actor is lost is placed and started again, and its processes are gone.
        before = stand_ins.living()
        os.kill(actor_of(before[0]), 9)
        source = first.upstreams["own"].source
        await comes(lambda: any(state.restarts and state.url for state in source.replicas))
        assert len(stand_ins.living()) == 2
        assert [outcome.reward for outcome in await first.score_all(samples(10), deadline_s=180)] == [0.7] * 10

        # All engines of the job see an update.
        await other.update_weights("own", path=second, version="step-1")
        outcomes = await first.score_all(samples(10), deadline_s=180)
        assert {outcome.verdict.rationale for outcome in outcomes} == {"second"}
        assert {outcome.verdict.weight_version for outcome in outcomes} == {"step-1"}
        code, out, _ = await in_a_shell(tmp_path, own, "status", "--json")
        (found,) = json.loads(out)["sources"]
        assert (code, found["processes"], found["silent"], found["weights"]["version"]) == (0, 2, 0, "step-1")
        assert {replica["url"] for replica in found["replicas"]} == {state.url for state in source.replicas}
        assert sum(replica["requests"] for replica in found["replicas"]) >= 20
        assert (await in_a_shell(tmp_path, own, "sleep"))[0] == 0
        assert stand_ins.living() == []
        await comes(lambda: {state.state for state in other.upstreams["own"].source.replicas} == {"asleep"})
        await other.wake_up("own")
        outcomes = await first.score_all(samples(10), deadline_s=180)
        assert {outcome.verdict.rationale for outcome in outcomes} == {"second"}
    await comes(lambda: not stand_ins.living() and not groups() and not list(private.glob("*-logs")))
    # The actor of the pool is still there, without a pool.
    code, out, err = await in_a_shell(tmp_path, own, "status")
    # A busy cluster is said to be waited for.
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(
        "error: source 'own': no servers of it run on this Ray cluster. `qreward serve"
    )
    assert groups() == []


async def test_a_shell_joins_the_cluster_and_starts_servers_there(cluster, stand_ins, private, tmp_path):
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree({"command": stand_ins.command()}, private)))
    words = ("-m", "qreward_plugins.cli", "serve-judge", str(tmp_path / "config.yaml"))
    env = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    pipe = {"stdout": subprocess.PIPE}
    shell = await asyncio.create_subprocess_exec(sys.executable, *words, env=env, **pipe)
    while (line := await shell.stdout.readline()) and b"stop them with Ctrl-C" not in line:
        pass
    assert len(stand_ins.living()) == len(groups()) == 1
    shell.terminate()
    assert b"stopping the servers" in await shell.stdout.read()
    assert await shell.wait() == 0
    await comes(lambda: not stand_ins.living() and not groups())


async def test_a_pool_ends_with_its_last_user_although_a_shell_was_killed(monkeypatch, stand_ins):
    """Ray reports the end of no process, so a guest may never leave."""
    stopped = []

    class QuietPool:
        states, weights, starts_asleep = (), Weights(), False

        def __init__(self, *_: object, **__: object) -> None: ...

        async def start(self) -> None: ...

        async def stop(self) -> None:
            stopped.append(self)

        def learn(self, weights: Weights) -> None: ...

    monkeypatch.setattr(ray_pool, "Pool", QuietPool)
    actor, spec, known = RayPoolActor(), stand_ins.spec().to_json(), Weights().as_mapping()
    assert not await actor.join("early guest", spec, known, False, False)
    assert await actor.join("user", spec, known, False)
    assert await actor.join("guest", spec, known, False, False)
    assert actor._present() == {"user"}
    assert await actor.poll("guest", -1) is not None
    await actor.leave("user")
    assert len(stopped) == 1
    assert await actor.poll("guest", -1) is None
    actor._note_silent("guest")
    assert not actor._guests
    await actor.leave("guest")


async def test_a_pool_that_the_cluster_cannot_place(cluster, stand_ins):
    own = tree({"command": stand_ins.command()}, tensor_parallel=3, start_within_s=4.0)
    async with RewardEngine(own) as engine:
        with pytest.raises(ReplicasNotStarted, match=r"it asks for 3 CPU on one node; free: .*: 2 CPU"):
            await engine.score_all(samples(1))
    await comes(lambda: not groups())


def actor_of(pid):
    """The actor above the guard and the watcher of a server."""
    for _ in range(3):
        with open(f"/proc/{pid}/stat") as file:
            pid = int(file.read().rpartition(")")[2].split()[1])
    return pid
