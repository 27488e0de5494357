"""Converts outcomes to rows of the journal, and rows back to verdicts.

Rows hold numbers and short texts. Prompts, responses and replies are in the table `texts`; a row has their hashes. Rows
are built in the caller's thread, so that the writing thread holds only plain values that SQLite accepts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeAlias

import orjson

from ..samples import Failed, Outcome, RawScore, Sample, Verdict
from ..samples.spent import NOTHING, Spent
from .history import PastAttempt
from .texts import Redact, Texts

RATIONALE_CHARS = 4000
"""Longest rationale that is recorded, in characters."""

CUT = "cut"
"""Value of `reason` in the row of a verdict on a truncated sample."""

_TEXT_CHARS = 1000

Value: TypeAlias = str | int | float | None


@dataclass(frozen=True)
class Entry:
    """A row of a journal. Without `journal`, its fields are the columns."""

    id: int
    key: str | None
    recorded_at: float
    """In seconds since 1970 (UTC)."""
    process_id: int
    run_id: str
    """The training job."""
    sample_id: str | None
    data_source: str
    group_id: str | None
    step: int | None
    split: str | None
    outcome: str
    """"scored" or "failed"."""
    judge: str
    source: str
    model: str | None
    score: float | None
    raw_score: float | None
    """The judge's number before it was mapped to the reward range, and `raw_components`."""
    raw_components: str | None
    components: str | None
    rationale: str | None
    correct: int | None
    cached: int
    cause: str | None
    reason: str | None
    detail: str | None
    floor: float | None
    attempts: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    """The part of `prompt_tokens` that the server read from its cache; 0 if it did not say."""
    thinking_tokens: int | None
    """The part of `completion_tokens` that the model spent on thoughts; 0 if the server did not say."""
    latency_s: float
    """The time from the sample to its outcome, waiting included."""
    service_s: float | None
    """The time of the answered attempt alone."""
    cost_usd: float
    weight_version: str | None
    """The version of the weights that judged; "" for those of the configuration, and for sources without versions."""
    history: str | None
    """The attempts as a JSON list, see `_history`."""
    prompt: str | None
    """A hash of a text, as `response`, `ground_truth` and `extras` (the rest of the sample, JSON); None if the texts of
    this sample are not kept. In a `Story`, the texts."""
    response: str | None
    ground_truth: str | None
    extras: str | None
    response_chars: int | None
    journal: str = ""
    """The path of its file."""

    @property
    def reward(self) -> float | None:
        """The score, or the floor that stands for it; None if the sample failed."""
        return self.score if self.outcome == "scored" else self.floor


class Trained(NamedTuple):
    """What became of one sample. `reward` is the number that it trains as, `advantage` the mean over the tokens of its
    response. `masked`: it is kept out of training.
    """

    sample_id: str
    group_id: str | None
    step: int | None
    reward: float
    advantage: float | None
    masked: bool


_TYPES = {"str": "TEXT", "int": "INTEGER", "float": "REAL"}

COLUMNS = {
    field.name: _TYPES[field.type.split()[0]] + ("" if "None" in field.type else " NOT NULL")
    for field in fields(Entry)
    if isinstance(field.type, str) and field.name not in ("id", "journal")
}
"""Names and types, without the id."""

VERDICT_COLUMNS = (
    "score, components, rationale, correct, judge, source, model, reason, raw_score, raw_components, weight_version"
)
"""Columns that a verdict is read from."""


def row(
    about: Mapping[str, Value],
    sample: Sample,
    outcome: Outcome,
    history: Sequence[PastAttempt] = (),
    texts: Texts | None = None,
) -> tuple[Value, ...]:
    """Return the values of `COLUMNS` for an outcome. `about` has the key, the time, the process and the run. The texts
    of the sample are added to `texts`; None: not kept.
    """
    values: dict[str, Value] = {
        **about,
        "key": _text(about["key"], None),
        "sample_id": _text(sample.id),
        "data_source": _text(sample.data_source) or "",
        "group_id": _text(sample.group_id),
        "step": _integer(sample.step),
        "split": _text(sample.split),
        "history": _history(sample, history, texts),
        "response_chars": len(sample.response) if isinstance(sample.response, str) else None,
        **({} if texts is None else texts.of_sample(sample)),
    }
    if isinstance(outcome, Failed):
        values |= _failed(outcome)
    elif outcome.verdict.failure is not None:
        # A floor is not a source's answer, so `get` must not find it; the row shows the failure that it replaces.
        failed = replace(outcome.verdict.failure, judge=outcome.verdict.judge, spent=outcome.verdict.spent)
        values |= {**_failed(failed), "floor": float(outcome.verdict.score)}
    else:
        values |= _scored(outcome.verdict)
    return tuple(map(values.get, COLUMNS))


def redacted(outcome: Outcome, history: Sequence[PastAttempt], redact: Redact) -> tuple[Outcome, Sequence[PastAttempt]]:
    """Return an outcome and its attempts with `redact` applied to their texts."""

    def text(value: Any) -> str:
        # A judge of others may give a rationale that is no text.
        return redact(_text(value, None) or "")

    if isinstance(outcome, Failed):
        outcome = replace(outcome, detail=text(outcome.detail))
    else:
        verdict = outcome.verdict
        failure = verdict.failure and replace(verdict.failure, detail=text(verdict.failure.detail))
        outcome = replace(outcome, verdict=replace(verdict, rationale=text(verdict.rationale), failure=failure))
    return outcome, [replace(attempt, problem=text(attempt.problem)) for attempt in history]


def is_answer(verdict: Verdict) -> bool:
    """Return whether a verdict is a new answer of a source: judged, and not from the journal."""
    return verdict.basis == "judged" and not verdict.cached


def _scored(verdict: Verdict) -> dict[str, Value]:
    raw = verdict.raw
    return {
        "outcome": "scored",
        "judge": _text(verdict.judge) or "",
        "source": _text(verdict.source) or "",
        "model": _text(verdict.model),
        "score": float(verdict.score),
        "components": _numbers(verdict.components),
        "rationale": _text(verdict.rationale, RATIONALE_CHARS),
        "correct": None if verdict.correct is None else int(verdict.correct),
        "reason": CUT if verdict.cut else None,
        "cached": int(verdict.cached),
        "service_s": _real(verdict.service_s) or None,
        "weight_version": _text(verdict.weight_version),
        "raw_score": None if raw is None else float(raw.score),
        "raw_components": None if raw is None else _numbers(raw.components),
        **_spent(verdict.spent),
    }


def _numbers(components: Mapping[str, float]) -> str:
    return json.dumps({_text(name): float(value) for name, value in components.items()}, allow_nan=False)


def _failed(failed: Failed) -> dict[str, Value]:
    return {
        "outcome": "failed",
        "judge": _text(failed.judge) or "",
        "source": _text(failed.source) or "",
        "cached": 0,
        "cause": failed.cause.value,
        "reason": _text(failed.reason),
        "detail": _text(failed.detail),
        **_spent(failed.spent),
    }


def _history(sample: Sample, attempts: Sequence[PastAttempt], texts: Texts | None) -> str | None:
    """Write attempts as JSON, in the order in which they started. Times are seconds since the call. `turn` is the turn
    of the policy that was judged, from 1, if it was one of several. `request`, `reply` and `thinking` are hashes of
    texts, where these are kept; see `texts.restored` for what was sent.
    """
    if not attempts:
        return None
    written: list[dict[str, Any]] = [
        {
            "source": _text(attempt.source),
            "result": attempt.result,
            "started_s": round(attempt.started_s, 4),
            "sent_s": None if attempt.sent_s is None else round(attempt.sent_s, 4),
            "ended_s": round(attempt.ended_s, 4),
            "tokens": [attempt.usage.prompt_tokens, attempt.usage.completion_tokens],
            "cost_usd": _real(attempt.cost_usd),
            **({"hedge": True} if attempt.hedge else {}),
            **({"problem": _text(attempt.problem)} if attempt.problem else {}),
            **_finish(attempt),
            **_turn(sample, attempt.request.sample),
            **({} if texts is None else texts.of_attempt(sample, attempt)),
        }
        for attempt in attempts
    ]
    return orjson.dumps(written).decode()


def _finish(attempt: PastAttempt) -> dict[str, Any]:
    """Why the reply ended, unless by itself: a reply that was cut off may be a draft."""
    reason = "" if attempt.reply is None else attempt.reply.finish_reason
    return {"finish": _text(reason, 100)} if reason not in ("", "stop") else {}


def _turn(whole: Sample, judged: Sample) -> dict[str, int]:
    """The number of the turn that was judged: a judge of kind `turns` shows what was said before it as the prompt."""
    if not whole.turns or judged.turns:
        return {}
    before = whole.turns[: len(judged.messages) - len(whole.messages)]
    return {"turn": 1 + sum(turn["role"] == "assistant" for turn in before)}


def _spent(spent: Spent) -> dict[str, Value]:
    return {
        "attempts": _integer(spent.attempts) or 0,
        "prompt_tokens": _integer(spent.usage.prompt_tokens) or 0,
        "completion_tokens": _integer(spent.usage.completion_tokens) or 0,
        "cached_tokens": _integer(spent.usage.cached_tokens),
        "thinking_tokens": _integer(spent.usage.thinking_tokens),
        "latency_s": _real(spent.latency_s) or 0.0,
        "cost_usd": _real(spent.cost_usd) or 0.0,
    }


def verdict(values: tuple[Any, ...]) -> Verdict:
    """Build a verdict from the values of `VERDICT_COLUMNS`, as `as_cached` does. Raises ValueError or TypeError."""
    score, components, rationale, correct, judge, source, model, reason, raw_score, raw_components, version = values
    return Verdict(
        score=score,
        components=json.loads(components),
        rationale=rationale,
        correct=None if correct is None else bool(correct),
        judge=judge,
        source=source,
        model=model,
        cached=True,
        cut=reason == CUT,
        raw=None if raw_score is None else RawScore(raw_score, json.loads(raw_components)),
        weight_version=version or "",
    )


def as_cached(verdict: Verdict) -> Verdict:
    """Return the verdict as `Journal.get` returns it.

    Attempts, usage, latency and cost are 0, because a recorded verdict costs nothing: so the costs of all outcomes of a
    run add up to what the run paid. The row keeps what the verdict cost at first.
    """
    return replace(
        verdict,
        rationale=_text(verdict.rationale, RATIONALE_CHARS) or "",
        spent=NOTHING,
        service_s=0.0,
        cached=True,
        returned=None,
    )


def _text(value: Any, limit: int | None = _TEXT_CHARS) -> str | None:
    if value is None:
        return None
    text = value if isinstance(value, str) else str(value)
    # SQLite stores UTF-8, which cannot encode the lone surrogates that a broken decoder leaves.
    return text[:limit].encode("utf-8", "replace").decode("utf-8")


def _integer(value: Any) -> int | None:
    # A step may be a numpy integer, and SQLite's integers have 64 bits.
    return None if value is None else max(-(2**63), min(2**63 - 1, int(value)))


def _real(value: float | None) -> float | None:
    # SQLite has no NaN.
    return float(value) if value is not None and math.isfinite(value) else None
