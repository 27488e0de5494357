"""Samples and outcomes as JSON values, for those who ask a reward server."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from ..errors import InputError, RewardServerError
from ..images import Image, is_picture
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..spent import Spent, Usage


def row_of_sample(sample: Sample, what: str) -> dict[str, Any]:
    """Return a sample as a row of `/score`. Raises `InputError`, which calls it `what`, if JSON cannot express it."""
    row: dict[str, Any] = orjson.loads(written_sample(sample, what))
    return row


def written_sample(sample: Sample, what: str) -> bytes:
    """Return a sample as the JSON text of a row; see `row_of_sample`."""
    row = {
        "messages": list(sample.messages),
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
        "id": sample.id,
        "group_id": sample.group_id,
        "step": sample.step,
        "split": sample.split,
        "extra_info": dict(sample.extras),
    }
    if sample.response_images:
        row["response_images"] = list(sample.response_images)
    try:
        return orjson.dumps(row, default=_data_url, option=orjson.OPT_SERIALIZE_NUMPY)
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from None


def _data_url(value: Any) -> str:
    """Return an image as a data URL; the server finds its format. Raises TypeError for what is no image."""
    if not (isinstance(value, (Image, bytes)) or is_picture(value)):
        raise TypeError(f"a value of type {type(value).__name__}")
    return "data:;base64," + base64.b64encode(Image.of(value).data).decode()


def rows_of(answer: bytes, count: int) -> list[Mapping[str, Any]]:
    """Return the rows of a reply of `/score` to `count` samples. Raises `RewardServerError`."""
    try:
        rows: list[Mapping[str, Any]] = orjson.loads(answer)["results"]
        if len(rows) != count:
            raise ValueError(f"{len(rows)} outcomes for {count} samples")
        return rows
    except (orjson.JSONDecodeError, LookupError, TypeError, ValueError) as error:
        raise unreadable(error) from None


def unreadable(error: Exception) -> RewardServerError:
    """Return the error for a reply that is not in the form of this version."""
    return RewardServerError(f"the reward server sent a reply that cannot be read: {error}")


def was_closed(row: Mapping[str, Any]) -> bool:
    """Whether a sample has no reward only because its server stopped. The next server may score it."""
    return (row["outcome"], row["cause"], row["reason"]) == ("failed", "infra", "closed")


def outcome_of_row(row: Mapping[str, Any], *, latency_s: float | None = None) -> Outcome:
    """Return the outcome of a row of `/score`. `latency_s` replaces the latency at the server, in seconds.

    Raises `RewardServerError` for a row that cannot be read.
    """
    try:
        outcome = _outcome(row)
    except (LookupError, TypeError, ValueError) as error:
        raise unreadable(error) from None
    if latency_s is None:
        return outcome
    if isinstance(outcome, Failed):
        return replace(outcome, spent=replace(outcome.spent, latency_s=latency_s))
    verdict = outcome.verdict
    return Scored(replace(verdict, spent=replace(verdict.spent, latency_s=latency_s)))


def _outcome(row: Mapping[str, Any]) -> Outcome:
    usage = Usage(row["prompt_tokens"], row["completion_tokens"])
    spent = Spent(row["attempts"], usage, row["latency_s"], row["cost_usd"])
    failed = None
    if row["cause"] is not None:
        failed = Failed(Cause(row["cause"]), row["reason"], row["detail"] or "", row["judge"], row["source"], spent)
    if row["outcome"] == "failed":
        if failed is None:
            raise ValueError("a failure without a cause")
        return failed
    return Scored(
        Verdict(
            row["reward"],
            components=row["components"],
            rationale=row["rationale"] or "",
            correct=row["correct"],
            judge=row["judge"],
            source=row["source"],
            model=row["model"] or "",
            basis="floor" if failed else "judged",
            failure=failed,
            spent=spent,
            cached=row["cached"],
            cut=row["cut"],
            returned=row.get("returned"),
            steps=_steps(row["steps"]),
        )
    )


def _steps(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((step["offset"], step["score"]) for step in steps)
