"""Configurations, samples and books for tests that run many samples through real sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from qreward_plugins import Sample
from qreward_plugins.testing import ScoreCall, ServerLimits, overlap_score

# A server counts over one second, and the engine keeps the same numbers over a somewhat longer window. The engine's own
# margin is for what a network does; a server that gets no processor for half a second, as happens on a busy machine,
# sees requests closer together than they were written. (tests/quotas and tests/scheduling are exact, in virtual time.)
SERVER_WINDOW_S = 1.0
ENGINE_WINDOW_S = 1.35


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """Build the tree of a configuration: one LLM judge, from 0 to 1, over the sources given by name and base URL."""

    def make(
        base_urls: Mapping[str, str],
        *,
        limits: Mapping[str, Mapping[str, Any]] | None = None,
        total_s: float = 60,
        judge: Mapping[str, Any] | None = None,
        engine: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "sources": {
                name: {
                    "kind": "openai",
                    "base_url": base_url,
                    "model": "judge",
                    "limits": dict((limits or {}).get(name, {})),
                    "timeouts": {"total_s": total_s},
                }
                for name, base_url in base_urls.items()
            },
            "judges": {"quality": {"kind": "llm", "score_range": [0, 1], "max_tokens": 64, **(judge or {})}},
            "engine": {"seed": 7, **(engine or {})},
        }

    return make


@pytest.fixture
def make_limits() -> Callable[..., tuple[ServerLimits, dict[str, Any]]]:
    """Build the limits of a strict server, and what the configuration says of them: so much in any second."""

    def make(requests: int, tokens: int, concurrency: int) -> tuple[ServerLimits, dict[str, Any]]:
        theirs, ours = (
            {
                "requests_per_minute": requests * 60 / window_s,
                "tokens_per_minute": tokens * 60 / window_s,
                "concurrency": concurrency,
                "window_s": window_s,
            }
            for window_s in (SERVER_WINDOW_S, ENGINE_WINDOW_S)
        )
        return ServerLimits(**theirs), {**ours, "window": "sliding"}

    return make


@pytest.fixture
def make_sample() -> Callable[[int], Sample]:
    """Sample `number`, each with a response of its own and a length of its own."""

    def make(number: int) -> Sample:
        return Sample(
            messages=[{"role": "user", "content": f"Write {number} as a word."}],
            response=f"It is number {number}. " + "word " * (number * 37 % 80),
            data_source="test/numbers",
            id=f"sample-{number}",
        )

    return make


@pytest.fixture
def score_of() -> Callable[[Sample], float]:
    """What a judge server with the built-in scorer says of a sample."""

    def score(sample: Sample) -> float:
        return overlap_score(ScoreCall("judge", sample.messages, {}, sample.response))

    return score


@pytest.fixture
def other_tasks() -> Callable[[], list[asyncio.Task[Any]]]:
    """The tasks of the running loop beside the caller's."""
    return lambda: [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before
