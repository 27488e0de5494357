"""Samples and outcomes as JSON values, for those who ask a reward server."""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import orjson

from ..errors import InputError, RewardServerError
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..samples.images import Image, is_picture
from ..samples.json_values import as_json, without_lone_surrogates
from ..samples.spent import Spent, Usage
from ..secrets import one_line

_log = logging.getLogger("qreward_plugins.remote")

FRAMEWORK_PROMPT = "framework_prompt"
"""The column of `Sample.prompt`. `prompt` is another name of `messages` in a row."""
_left_out: set[str] = set()
"""Extras that were left out of a row; the log names each once."""
_MOST_LEFT_OUT = 1000


def row_of_sample(sample: Sample, what: str) -> dict[str, Any]:
    """Return a sample as a row of `/score`. Raises `InputError`, which calls it `what`, if JSON cannot express it."""
    row: dict[str, Any] = orjson.loads(written_sample(sample, what))
    return row


def written_sample(sample: Sample, what: str) -> bytes:
    """Return a sample as the JSON text of a row; see `row_of_sample`.

    A value that JSON does not have (NaN, an object) fails the sample in its ground truth and its prompt, as it does at
    a service. Extras with such a value are left out, because most judges read none: a data set may have any columns.
    """
    row = {
        "messages": list(sample.messages),
        "response": sample.response,
        "ground_truth": as_json(sample.ground_truth, f"{what}: ground_truth"),
        "data_source": sample.data_source,
        "id": sample.id,
        "group_id": sample.group_id,
        "step": sample.step,
        "split": sample.split,
        "extra_info": _columns(sample.extras),
    }
    if sample.prompt is not None and not _is_text_of(sample.messages, sample.prompt):
        row[FRAMEWORK_PROMPT] = _column(sample.prompt, f"{what}: prompt")
    if sample.response_images:
        row["response_images"] = list(sample.response_images)
    try:
        return _written(row)
    except TypeError:
        pass
    try:
        return _written(without_lone_surrogates(row))
    except TypeError as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from None


def _written(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, default=_data_url, option=orjson.OPT_SERIALIZE_NUMPY)


def _columns(extras: Mapping[str, Any]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in extras.items():
        try:
            columns[str(name)] = _column(value, "")
        except InputError as error:
            if name not in _left_out and len(_left_out) < _MOST_LEFT_OUT:
                _left_out.add(name)
                shown = one_line(str(name), 60)
                _log.warning("extras[%r] is left out of samples for the reward server%s", shown, error)
    return columns


def _column(value: Any, field: str) -> Any:
    try:
        return as_json(value, field)
    except InputError:
        if _is_image(value) or (isinstance(value, (list, tuple)) and _holds_image(value)):
            return value
        raise


def _holds_image(value: Any) -> bool:
    """Whether an image is among the items, or among the parts of messages."""
    if isinstance(value, Mapping):
        return any(map(_holds_image, value.values()))
    return any(map(_holds_image, value)) if isinstance(value, (list, tuple)) else _is_image(value)


def _is_image(value: Any) -> bool:
    return isinstance(value, (Image, bytes)) or is_picture(value)


def _is_text_of(messages: Sequence[Mapping[str, Any]], prompt: Any) -> bool:
    """Whether a prompt is the text of the only message, which services take for it by default."""
    return isinstance(prompt, str) and [dict(message) for message in messages] == [{"role": "user", "content": prompt}]


def _data_url(value: Any) -> Any:
    """Return an image as a data URL; the server finds its format. An array that orjson does not write becomes a list.

    Raises TypeError for other values.
    """
    if _is_image(value):
        return "data:;base64," + base64.b64encode(Image.of(value).data).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


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
    texts = {column: _typed(row[column], column, str) for column in ("judge", "source")}
    usage = Usage(_typed(row["prompt_tokens"], "prompt_tokens", int), _typed(row["completion_tokens"], "tokens", int))
    attempts = _typed(row["attempts"], "attempts", int)
    spent = Spent(attempts, usage, _number(row["latency_s"], "latency_s"), _number(row["cost_usd"], "cost_usd"))
    failed = None
    if row["cause"] is not None:
        detail = _typed(row["detail"] or "", "detail", str)
        failed = Failed(Cause(row["cause"]), _typed(row["reason"], "reason", str), detail, **texts, spent=spent)
    if row["outcome"] == "failed":
        if failed is None:
            raise ValueError("a failure without a cause")
        return failed
    returned = row.get("returned")
    return Scored(
        Verdict(
            row["reward"],
            components=_typed(row["components"], "components", Mapping),
            rationale=_typed(row["rationale"] or "", "rationale", str),
            correct=None if row["correct"] is None else _typed(row["correct"], "correct", bool),
            **texts,
            model=_typed(row["model"] or "", "model", str),
            weight_version=_typed(row.get("weight_version") or "", "weight_version", str),
            basis="floor" if failed else "judged",
            failure=failed,
            spent=spent,
            cached=bool(row["cached"]),
            cut=bool(row["cut"]),
            returned=None if returned is None else _typed(returned, "returned", Mapping),
            steps=_steps(row["steps"]),
        )
    )


def _steps(steps: Sequence[Mapping[str, Any]]) -> tuple[tuple[int, float], ...]:
    return tuple((_typed(step["offset"], "offset", int), _number(step["score"], "score")) for step in steps)


def _typed(value: Any, what: str, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{what} is of type {type(value).__name__}")
    return value


def _number(value: Any, what: str) -> float:
    return float(_typed(value, what, (int, float)))
