"""Converts an outcome to the value of one column. All rows have the same keys, so that readers see one type."""

from __future__ import annotations

from typing import Any

from ..samples import Outcome, Scored

RESULT = "qreward"
"""Name of the column that holds the outcome."""


def to_result(outcome: Outcome) -> dict[str, Any]:
    """Convert an outcome to plain values.

    `outcome` is "scored", "floor" or "failed". `cause`, `reason` and `detail` say why a sample failed or why its reward
    is a floor. `reward` is None only for a failed sample.
    """
    verdict = outcome.verdict if isinstance(outcome, Scored) else None
    failed = outcome.failure
    told = outcome.verdict if isinstance(outcome, Scored) else outcome
    return {
        "reward": outcome.reward,
        "outcome": "failed" if verdict is None else "floor" if failed else "scored",
        "cause": failed.cause.value if failed else None,
        "reason": failed.reason if failed else None,
        "detail": _text(failed.detail) if failed else None,
        "components": {_text(name): value for name, value in verdict.components.items()} if verdict else {},
        "steps": [{"offset": offset, "score": score} for offset, score in verdict.steps] if verdict else [],
        "correct": verdict.correct if verdict else None,
        "rationale": _text(verdict.rationale) if verdict else None,
        "judge": told.judge,
        "source": told.source,
        "model": _text(verdict.model) if verdict else None,
        "weight_version": _text(verdict.weight_version) if verdict else None,
        "attempts": told.attempts,
        "prompt_tokens": told.usage.prompt_tokens,
        "completion_tokens": told.usage.completion_tokens,
        "latency_s": told.latency_s,
        "cost_usd": told.cost_usd,
        "cached": verdict.cached if verdict else False,
        "cut": verdict.cut if verdict else False,
    }


def _text(text: str) -> str:
    # A judge may write lone surrogates, which UTF-8 and Arrow cannot hold.
    return text.encode("utf-8", "replace").decode()
