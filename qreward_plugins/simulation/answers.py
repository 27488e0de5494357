"""What simulated servers answer, and what it costs: the work and the tokens of a request, the words of a verdict.

The work is hidden in the sample's `extras`, where no client looks; the tokens of the prompt follow from the text that a
client sees, those of the completion from the work.
"""

from __future__ import annotations

from typing import Any

from ..sources.base import Request
from .draws import share

COMPLETION_TOKENS_PER_UNIT = 150
BYTES_PER_TOKEN = 4
WORK_PER_BYTE = 1 / 3000
"""Work of a request that does not say its own."""


def work_of(request: Request) -> float:
    """The hidden work of a request: what its sample says in `extras`, else what its size suggests."""
    work: Any = request.sample.extras.get("work")
    return float(work) if isinstance(work, (int, float)) else request.size * WORK_PER_BYTE


def prompt_tokens(size_bytes: int) -> int:
    """The prompt tokens of a request of so many bytes."""
    return -(-size_bytes // BYTES_PER_TOKEN)


def completion_tokens(work: float, most: int) -> int:
    """The completion tokens of a request of so much work, `most` of them allowed (0: any number)."""
    tokens = round(COMPLETION_TOKENS_PER_UNIT * work)
    return min(tokens, most) if most else tokens


def score_of(sample_id: str) -> float:
    """The score from 0 to 10 that simulated servers give a sample: always the same, whichever of them answers."""
    return round(10 * share(sample_id), 3)


def verdict_text(request: Request) -> str:
    """The verdict of a simulated server in the words that an LLM judge without criteria reads."""
    return f'{{"id": "{request.nonce}", "rationale": "simulated", "score": {score_of(request.sample.id or "")}}}'
