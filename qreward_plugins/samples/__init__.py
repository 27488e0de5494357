"""Samples and what becomes of them: what is scored, its verdict, its outcome, and what it cost.

- `sample`: `Sample`, `Verdict`, `Scored`, `Failed`; `Spent`: attempts, tokens and dollars of an outcome.
- `check`: reads foreign values, rejects what cannot be scored.
- `messages`: prompts and responses of several turns, in every form that frameworks give them.
- `json_values`: values of samples as JSON.
- `images`: images of prompts and responses.
"""

from __future__ import annotations

from .sample import (
    FLOAT32_LIMIT,
    SCREENED,
    Cause,
    Failed,
    Message,
    Outcome,
    RawScore,
    ResponseTurn,
    Sample,
    Scored,
    Split,
    Verdict,
    fits_float32,
)

__all__ = [
    "FLOAT32_LIMIT",
    "SCREENED",
    "Cause",
    "Failed",
    "Message",
    "Outcome",
    "RawScore",
    "ResponseTurn",
    "Sample",
    "Scored",
    "Split",
    "Verdict",
    "fits_float32",
]
