"""Two real replicas of vLLM, started by a source of kind `replicas`: score, kill one under load, stop.

`make replicas` runs it. It prints the seconds of each step. An update of weights, and sleep and wake, belong between
the kill and the stop.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from qreward_plugins import RewardEngine, Sample

START_WITHIN_S = 600.0
SAMPLES = 1000


def configuration(model: Path) -> dict[str, Any]:
    own = {
        "kind": "replicas",
        "server": "vllm",
        "model": str(model),
        "platform": "cpu",
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
    return {"sources": {"own": own}, "judges": {"rm": {"kind": "reward_model"}}, "engine": {"seed": 7}}


def samples(count: int, first: int = 0) -> list[Sample]:
    return [
        Sample([{"role": "user", "content": f"What is {n} plus 25?"}], f"It is {n + 25}.", id=str(n))
        for n in range(first, first + count)
    ]


def test_replicas_start_score_survive_a_kill_and_leave_nothing(
    models: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def say(what: str, since: float) -> None:
        with capsys.disabled():
            print(f"\n{what}: {time.monotonic() - since:.1f} s", end="", flush=True)

    asyncio.run(_play(models / "one_logit", say))


async def _play(model: Path, say: Callable[[str, float], None]) -> None:
    began = time.monotonic()
    async with RewardEngine(configuration(model)) as engine:
        (first,) = await engine.score_all(samples(1), deadline_s=60)
        assert first.reward is not None, first.describe()
        say("start of two replicas, and a first score", began)
        source: Any = engine.upstreams["own"].source
        urls = [state.url for state in source.replicas]
        served = {pid for url in urls for pid in processes(str(urlsplit(url).port))}
        assert len(served) >= 2

        began = time.monotonic()
        outcomes = await engine.score_all(samples(SAMPLES), deadline_s=300)
        assert all(outcome.reward is not None for outcome in outcomes)
        say(f"{SAMPLES} samples on two replicas", began)

        began = time.monotonic()
        scoring = asyncio.ensure_future(engine.score_all(samples(SAMPLES, SAMPLES), deadline_s=300))
        requests = engine.upstreams["own"].requests
        await comes(lambda: engine.upstreams["own"].requests >= requests + SAMPLES // 4, 60)
        os.kill(min(processes(str(urlsplit(urls[0]).port), "api_server")), signal.SIGKILL)
        outcomes = await scoring
        lost = [outcome.describe() for outcome in outcomes if outcome.reward is None]
        assert lost == []
        say(f"{SAMPLES} samples, while a replica is killed (-9)", began)
        assert any(state.state != "up" or state.restarts for state in source.replicas)

        await comes(lambda: all(state.state == "up" for state in source.replicas), START_WITHIN_S)
        say("the killed replica is up again", began)
        assert sum(state.restarts for state in source.replicas) == 1
        outcomes = await engine.score_all(samples(200, 2 * SAMPLES), deadline_s=120)
        assert all(outcome.reward is not None for outcome in outcomes)

        # The place for the update of weights under load, and for sleep and wake.

        ports = [urlsplit(state.url).port for state in source.replicas]
        groups = {os.getpgid(pid) for port in ports for pid in processes(str(port))}
        began = time.monotonic()
    say("stop", began)
    left = [pid for pid in all_processes() if group_of(pid) in groups]
    assert left == []
    for port in ports:
        with socket.socket() as here:
            assert here.connect_ex(("127.0.0.1", port)) != 0


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
