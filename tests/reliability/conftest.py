"""Configurations and samples for tests that run many samples through real sockets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from qreward_plugins import Sample

from .. import kit
from ..kit import no_thread_left  # noqa: F401 -- holds for each test


@pytest.fixture
def make_config() -> Callable[..., dict[str, Any]]:
    """Build the tree of a configuration: one LLM judge, from 0 to 1, over the sources given by name and base URL."""

    def make(base_urls: Mapping[str, str], *, judge: Mapping[str, Any] | None = None, **options: Any) -> dict[str, Any]:
        judge = {"score_range": [0, 1], "max_tokens": 64, **(judge or {})}
        return kit.make_config(base_urls, judge=judge, **{"total_s": 60, **options})

    return make


@pytest.fixture
def make_sample() -> Callable[[int], Sample]:
    """Sample `number`, each with a response of its own and a length of its own."""

    def make(number: int) -> Sample:
        response = f"It is number {number}. " + "word " * (number * 37 % 80)
        question = {"role": "user", "content": f"Write {number} as a word."}
        return kit.make_sample(number, messages=[question], response=response, ground_truth=None)

    return make
