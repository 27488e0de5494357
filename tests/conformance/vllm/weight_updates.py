"""Weights of two real replicas of vLLM, updated under load; their sleep; and what goes wrong meanwhile.

Every version is a model of its own, and every reply must be the logit that transformers computes from the version that
its verdict names. So a reply of half-loaded weights, or of a prefix cached with earlier ones, is seen. `test_replicas`
plays these parts.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qreward_plugins import RewardEngine, Sample
from tests.kit import comes

from .processes import servers
from .servers import START_WITHIN_S
from .test_reward_models import Truth

TOLERANCE = 1e-3
QUESTIONS, ANSWERS = 12, 8
# Longer than two blocks of the prefix cache, which have 128 tokens each on a CPU.
INSTRUCTIONS = "Think step by step, add the tens first, and then the ones. " * 12


def prompt(question: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"{INSTRUCTIONS}What is {question} plus 25?"}]


def samples() -> list[Sample]:
    return [
        Sample(prompt(question), f"It is {question + 25}, I am {answer} times sure.", group_id=f"q{question}")
        for question in range(QUESTIONS)
        for answer in range(ANSWERS)
    ]


class Versions:
    """What each version of the weights answers, by transformers."""

    def __init__(self, folders: Mapping[str, Path]) -> None:
        self.folders = dict(folders)
        self._logits: dict[str, list[float]] = {}
        for version, folder in folders.items():
            truth = Truth(folder)
            self._logits[version] = [truth.logits(rendered(truth, sample))[0] for sample in samples()]

    def of(self, number: int, logit: float) -> list[str]:
        """The versions that give this logit to a sample."""
        return [version for version, logits in self._logits.items() if abs(logits[number] - logit) < TOLERANCE]


def rendered(truth: Truth, sample: Sample) -> str:
    conversation = [*sample.messages, {"role": "assistant", "content": sample.response}]
    return str(truth.tokenizer.apply_chat_template(conversation, tokenize=False))


@dataclass
class Load:
    """Scores the samples again and again. `seen` are time and version of each verdict, in the order of coming."""

    engine: RewardEngine
    versions: Versions
    seen: list[tuple[float, str]] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    mixed: list[str] = field(default_factory=list)
    apart: int = 0
    rounds: int = 0

    async def once(self) -> None:
        """Score all samples once, each by a call of its own."""
        found = await asyncio.gather(*(self._score(number, sample) for number, sample in enumerate(samples())))
        for question in range(QUESTIONS):
            self.apart += len(set(found[question * ANSWERS : (question + 1) * ANSWERS])) > 1
        self.rounds += 1

    async def _score(self, number: int, sample: Sample) -> str:
        outcome = await self.engine.score(sample, deadline_s=600)
        if outcome.reward is None:
            self.failed.append(outcome.describe())
            return ""
        version = outcome.verdict.weight_version
        self.seen.append((time.monotonic(), version))
        given = self.versions.of(number, outcome.reward)
        if given != [version]:
            self.mixed.append(f"sample {number} has {outcome.reward}, says {version!r}, is that of {given}")
        return version

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Score while the block runs, and end the round that is under way then."""
        over = asyncio.Event()

        async def repeat() -> None:
            while not over.is_set():
                await self.once()

        task = asyncio.ensure_future(repeat())
        began = len(self.seen)
        await comes(lambda: len(self.seen) > began + ANSWERS, 120)
        try:
            yield
        finally:
            over.set()
            await task

    def check(self) -> None:
        assert (self.failed[:3], self.mixed[:3]) == ([], [])

    def forget(self) -> None:
        self.seen.clear()
        self.apart = self.rounds = 0


class Watch:
    """Notes when each replica takes no calls."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.history: list[tuple[float, tuple[str, ...]]] = []
        self._task = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        while True:
            states = tuple(state.state for state in self.source.replicas)
            if not self.history or self.history[-1][1] != states:
                self.history.append((time.monotonic(), states))
            await asyncio.sleep(0.001)

    def out_s(self) -> list[float]:
        """The seconds that each replica has not been up."""
        ends = [*(at for at, _ in self.history[1:]), time.monotonic()]
        out = [0.0, 0.0]
        for (at, states), end in zip(self.history, ends, strict=True):
            for number, state in enumerate(states):
                out[number] += (end - at) * (state != "up")
        return out

    def all_out(self) -> bool:
        """Whether no replica was up at some time."""
        return any("up" not in states for _, states in self.history)

    def restart(self) -> None:
        self.history.clear()

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])


@dataclass
class Scene:
    """Two replicas with load, as the parts of the test see them."""

    engine: RewardEngine
    versions: Versions
    load: Load
    watch: Watch
    say: Callable[[str], None]
    now: str = ""
    """The version that the pool serves."""

    @property
    def source(self) -> Any:
        return self.engine.upstreams["own"].source

    async def update(self, version: str, **how: Any) -> float:
        """Update the weights under load; return the seconds."""
        self.load.forget()
        self.watch.restart()
        async with self.load.running():
            began = time.monotonic()
            await self.engine.update_weights("own", path=self.versions.folders[version], version=version, **how)
            took_s = time.monotonic() - began
        out = ", ".join(f"{seconds:.2f}" for seconds in self.watch.out_s())
        counts = dict(Counter(version for _, version in self.load.seen))
        self.say(
            f"update to {version} {how}: {took_s:.2f} s, out of service {out} s; verdicts {counts}; "
            f"{self.load.apart} of {self.load.rounds * QUESTIONS} groups judged by two versions"
        )
        self.load.check()
        self.now = version
        await self.all_up_to_date()
        return took_s

    async def all_up_to_date(self) -> None:
        """Every verdict is of the version that the pool serves."""
        self.load.forget()
        await self.load.once()
        self.load.check()
        assert {each for _, each in self.load.seen} == {self.now}
        assert [state.version for state in self.source.replicas] == [self.now] * 2

    async def all_up(self) -> None:
        await comes(lambda: all(state.state == "up" for state in self.source.replicas), START_WITHIN_S)


Part = Callable[[Scene], Awaitable[None]]


async def change_weights(
    engine: RewardEngine, models: Path, say: Callable[[str], None], parts: Sequence[Part] | None = None
) -> None:
    """Play `parts` at the replicas of the source `own`, which serve the model `one_logit`. Default: all of them."""
    versions = Versions({"": models / "one_logit", "b": models / "one_logit_b", "c": models / "one_logit_c"})
    watch = Watch(engine.upstreams["own"].source)
    scene = Scene(engine, versions, Load(engine, versions), watch, say)
    await scene.all_up_to_date()
    for part in parts or (rolling, together, slept, killed):
        began = time.monotonic()
        await part(scene)
        say(f"{part.__name__}: {time.monotonic() - began:.1f} s")
    await watch.aclose()


async def rolling(scene: Scene) -> None:
    """One replica after the other: there is always one that answers."""
    hits = sum(prefix_hits(state.url) for state in scene.source.replicas)
    await scene.update("b")
    assert not scene.watch.all_out()
    # A prefix that was cached with the earlier weights would have given a logit of neither.
    scene.say(f"tokens of prompts that the prefix caches had: {hits:g}")
    assert hits > 0
    await scene.update("c", within_s=0)
    await scene.update("b")


async def together(scene: Scene) -> None:
    """One version for all at a time."""
    scene.load.forget()
    async with scene.load.running():
        path = scene.versions.folders["c"]
        await scene.engine.update_weights("own", path=path, version="c", mode="together")
    scene.now = "c"
    first = min(at for at, version in scene.load.seen if version == "c")
    assert {version for at, version in scene.load.seen if at > first} == {"c"}


async def slept(scene: Scene) -> None:
    """Calls wait for the end of a sleep, and nothing takes the source for broken."""
    scene.load.forget()
    async with scene.load.running():
        began = time.monotonic()
        await scene.engine.sleep("own")
        slept_s, count = time.monotonic() - began, len(scene.load.seen)
        await scene.engine.sleep("own")
        await asyncio.sleep(3)
        assert len(scene.load.seen) == count
        assert scene.engine.statistics().waiting > 0
        statistics = scene.engine.statistics().sources["own"]
        assert statistics.state != "down", statistics
        began = time.monotonic()
        await scene.engine.wake_up("own")
        scene.say(f"asleep after {slept_s:.2f} s, awake after {time.monotonic() - began:.2f} s")
    scene.load.check()
    await scene.all_up_to_date()


async def killed(scene: Scene) -> None:
    """A replica that dies comes back with the weights of the pool."""
    await scene.update("c")
    restarts = sum(state.restarts for state in scene.source.replicas)
    scene.watch.restart()
    async with scene.load.running():
        os.kill(server_of(scene.source.replicas[0]), signal.SIGKILL)
        await comes(lambda: sum(state.restarts for state in scene.source.replicas) > restarts, 60)
        await scene.all_up()
    scene.load.check()
    scene.say(f"killed after an update: out of service {scene.watch.out_s()[0]:.1f} s")
    await scene.all_up_to_date()


def server_of(state: Any) -> int:
    return min(servers(state.url))


def prefix_hits(url: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        found = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (\S+)$", reply.read().decode(), re.MULTILINE)
    return sum(map(float, found))
