"""The work, the tokens and the verdict of a simulated request.

The work is hidden in the sample's `extras`, which clients do not read. Prompt tokens follow from the text that a client
sees, completion tokens from the work.
"""

from __future__ import annotations

from typing import Any

from ..sources.base import Request
from .draws import share

COMPLETION_TOKENS_PER_UNIT = 150
BYTES_PER_TOKEN = 4
WORK_PER_BYTE = 1 / 3000
"""Work per byte of a request that has no work of its own."""


def work_of(request: Request) -> float:
    """The hidden work of a request: that in its sample's `extras`, else an estimate from its size."""
    work: Any = request.sample.extras.get("work")
    return float(work) if isinstance(work, (int, float)) else request.size * WORK_PER_BYTE


def prompt_tokens(size_bytes: int) -> int:
    """The prompt tokens of a request of this size."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def completion_tokens(work: float, most: int) -> int:
    """The completion tokens of a request with this work, at most `most` (0: any number)."""
    tokens = round(COMPLETION_TOKENS_PER_UNIT * work)
    return min(tokens, most) if most else tokens


def score_of(sample_id: str) -> float:
    """The score from 0 to 10 of a sample, which is the same from every simulated server."""
    return round(10 * share(sample_id), 3)


def verdict_text(request: Request) -> str:
    """The verdict of a simulated server, as text for an LLM judge without criteria."""
    return f'{{"id": "{request.nonce}", "rationale": "simulated", "score": {score_of(request.sample.id or "")}}}'
