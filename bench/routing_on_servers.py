"""What routing does for the prefix caches of real vLLM servers, which run already with the same model.

A judge with long instructions grades several answers to each question. Every policy sends the same requests, after the
caches were emptied (`VLLM_SERVER_DEV_MODE=1`). Prefix hits and computed prompt tokens are the servers' own counters
(`/metrics`). `alone` sends everything to the first server: what the hit rate could be.

    python bench/routing_on_servers.py URL URL ... --model NAME [--questions N] [--answers N] [--json FILE]

The URLs are those of the servers, without `/v1`. Only the cost of the prompts is measured: replies have 4 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from qreward_plugins.config.source_models import Routing
from qreward_plugins.judges import LLMJudge
from qreward_plugins.samples import Sample
from qreward_plugins.sources import OpenAISource, Request

POLICIES: dict[str, tuple[str, ...]] = {
    "round_robin": ("round_robin",),
    "least_requests": ("least_requests",),
    "prefix_aware": ("prefix_aware", "least_pending_tokens"),
}
_WORDS = ("claim", "step", "proof", "reason", "check", "answer", "number", "clear", "unit", "source", "value", "term")
_COUNTER = re.compile(r"^vllm:prefix_cache_(queries|hits)_total(?:\{[^\n]*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Result:
    """The cost of one policy: its prompt tokens (`queried`), and those of them that came from the caches (`hits`)."""

    policy: str
    seconds: float
    queried: int
    hits: int
    requests: tuple[int, ...]

    @property
    def hit_rate(self) -> float:
        return self.hits / self.queried

    @property
    def computed(self) -> int:
        return self.queried - self.hits


def requests_of(questions: int, answers: int, words: Sequence[int], seed: int) -> list[Request]:
    """Return the requests of a judge, group after group. `words` are those of instructions, question and answer."""
    rng = random.Random(seed)

    def text(count: int) -> str:
        return " ".join(rng.choices(_WORDS, k=count))

    config = LLMJudge.Config(
        kind="llm", sources=("judge",), instructions=text(words[0]), response_format="none", max_tokens=4
    )
    judge = LLMJudge("quality", config, sources=("judge",), key=bytes(range(16)))
    found = []
    for number in range(questions):
        question = f"{number} {text(words[1])}"
        for _ in range(answers):
            sample = Sample([{"role": "user", "content": question}], text(words[2]))
            found.append(judge.request(sample, attempt=0))
    return found


async def measure(
    policy: str, strategies: Sequence[str], urls: Sequence[str], model: str, requests: Sequence[Request], window: int
) -> Result:
    for url in urls:
        await asyncio.to_thread(_post, f"{url}/reset_prefix_cache")
    before = [await asyncio.to_thread(_counters, url) for url in urls]
    routing = Routing(strategies=strategies)  # type: ignore[arg-type]
    config = OpenAISource.Config(
        kind="openai", base_url=tuple(f"{url}/v1" for url in urls), model=model, routing=routing
    )
    source = OpenAISource("judge", config)
    room = asyncio.Semaphore(window * len(urls))

    async def send(request: Request) -> None:
        async with room:
            await source.send(request, on_sent=lambda: None)

    began_at = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for request in requests:
                group.create_task(send(request))
        seconds = time.perf_counter() - began_at
        sent = [replica.requests for replica in source.replica_statistics(asyncio.get_running_loop().time())]
    finally:
        await source.aclose()
    await asyncio.sleep(1.0)  # the counters are written once for each step of the engine
    after = [await asyncio.to_thread(_counters, url) for url in urls]
    queried, hits = (
        sum(late[which] - early[which] for early, late in zip(before, after, strict=True)) for which in (0, 1)
    )
    return Result(policy, seconds, round(queried), round(hits), tuple(sent) or (len(requests),))


def _counters(url: str) -> tuple[float, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found = {"queries": 0.0, "hits": 0.0}
    for name, value in _COUNTER.findall(text):
        found[name] += float(value)
    return found["queries"], found["hits"]


def _post(url: str) -> None:
    with urllib.request.urlopen(urllib.request.Request(url, b"", method="POST"), timeout=30):
        pass


def table(results: Sequence[Result]) -> Table:
    shown = Table(title="Routing between vLLM servers", title_justify="left", box=None, pad_edge=False)
    shown.add_column("policy", no_wrap=True)
    for column in ("prefix hits", "of one alone", "prompt tokens computed", "seconds", "requests"):
        shown.add_column(column, justify="right")
    for one in results:
        shown.add_row(
            one.policy,
            f"{one.hit_rate:.3f}",
            f"{one.hits / results[0].hits:.3f}" if results[0].hits else "-",
            f"{one.computed:,} of {one.queried:,}",
            f"{one.seconds:.1f}",
            " ".join(map(str, one.requests)),
        )
    return shown


async def _all(given: argparse.Namespace) -> list[Result]:
    requests = requests_of(given.questions, given.answers, given.words, given.seed)
    urls = [url.rstrip("/") for url in given.urls]
    results = [await measure("alone", ("round_robin",), urls[:1], given.model, requests, given.window)]
    for policy, strategies in POLICIES.items():
        results.append(await measure(policy, strategies, urls, given.model, requests, given.window))
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("urls", nargs="+", metavar="URL")
    parser.add_argument("--model", required=True)
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--answers", type=int, default=8)
    parser.add_argument(
        "--words", type=int, nargs=3, default=[250, 200, 60], metavar=("INSTRUCTIONS", "QUESTION", "ANSWER")
    )
    parser.add_argument("--window", type=int, default=8, help="requests under way for each server (default: 8)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    results = asyncio.run(_all(given))
    Console(width=100).print(table(results))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in results], indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
