"""What a reward server and its clients say to each other, as JSON: samples, outcomes, and the facts of a server.

Both sides must be of one version, so `ServerFacts` carries it, and rows have no version of their own.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import orjson

from .. import __version__
from ..errors import InputError, RewardServerError
from ..samples import Cause, Failed, Outcome, Sample, Scored, Verdict
from ..samples.images import Image, is_image_part, is_picture
from ..samples.json_values import as_json, without_lone_surrogates
from ..samples.spent import Spent, Usage
from ..secrets import one_line

_log = logging.getLogger("qreward_plugins.client")

FACTS_PATH = "/facts"
JUDGES_HEADER = "X-QReward-Judges"
"""The fingerprint that a request expects of its server. One with another fingerprint refuses it (409)."""
LINES = "application/x-ndjson"
"""The type of a reply of `/score` that has a line for each outcome, in any order, as soon as it is known: a row with
its `number` in the request. Empty lines are signs of life."""
FRAMEWORK_PROMPT = "framework_prompt"
"""The column of `Sample.prompt`. `prompt` is another name of `messages` in a row."""


@dataclass(frozen=True)
class ServerFacts:
    """What a server says of itself. Workers of one run must get the same keys for every sample, and rewards from the
    same judges, so an engine asks for it before its first sample.

    `fingerprint` names judges, routes and models: what may change a reward. `components` and `defines_correct` are
    those of `observers.Facts`. `window` is the number of samples that keep its sources busy. `compares`: whether one of
    its judges compares the samples of a group.
    """

    fingerprint: str
    components: tuple[str, ...]
    defines_correct: bool
    window: int
    compares: bool = False

    def as_row(self) -> dict[str, Any]:
        """Return them as a JSON value."""
        return {"version": __version__, **asdict(self)}

    @classmethod
    def of_row(cls, row: Any) -> ServerFacts:
        """Return the facts in a JSON value. Raises `RewardServerError` for another version, or no such value."""
        try:
            facts = dict(row)
            theirs = facts.pop("version")
            if theirs == __version__:
                return cls(**{**facts, "components": tuple(facts["components"])})
        except (LookupError, TypeError, ValueError) as error:
            missing = f"it has no {error}; does `qreward serve` answer there?" if isinstance(error, KeyError) else error
            raise unreadable(missing) from None
        shown = one_line(str(theirs), 40)
        problem = f"the reward server has version {shown} of qreward-plugins, and this side {__version__}"
        raise RewardServerError(f"{problem}; install the same on both sides", reason="server_refused")


def written_sample(sample: Sample, what: str) -> bytes:
    """Return a sample as the JSON text of a row of `/score`. Raises `InputError`, which calls it `what`.

    A value that JSON does not have (NaN, an object) fails the sample in its ground truth, as it does at a service.
    Extras with such a value are left out, because most judges read none: a data set may have any columns. An image in
    them fails the sample.
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
        "extra_info": _columns(sample.extras, what),
    }
    if sample.prompt is not None and not _is_text_of(sample.messages, sample.prompt):
        try:
            row[FRAMEWORK_PROMPT] = as_json(sample.prompt, f"{what}: prompt")
        except InputError:
            if not any(map(_shows_image, sample.messages)):  # which the messages have, too
                raise
    if sample.response_images:
        row["response_images"] = list(sample.response_images)
    if sample.turns:
        row["turns"] = list(sample.turns)
    try:
        return _written(row)
    except TypeError:
        pass
    try:
        return _written(without_lone_surrogates(row))
    except TypeError as error:
        raise InputError(f"{what} cannot be written as JSON: {error}") from None


def outcome_of_row(row: Mapping[str, Any], *, latency_s: float) -> Outcome:
    """Return the outcome of a row of `/score`. `latency_s` is that of its caller, in seconds.

    Both sides are of one version, so only what trains is checked: the numbers, by `Verdict`. Raises LookupError,
    TypeError, ValueError or AttributeError for a row that cannot be read.
    """
    asked = {column: row[column] for column in ("judge", "source")}
    usage = Usage(row["prompt_tokens"], row["completion_tokens"])
    spent = Spent(row["attempts"], usage, latency_s, row["cost_usd"])
    failed = None
    if row["cause"] is not None:
        failed = Failed(Cause(row["cause"]), row["reason"], row["detail"] or "", **asked, spent=spent)
        if row["outcome"] == "failed":
            return failed
    verdict = Verdict(
        row["reward"],
        components=row["components"],
        rationale=row["rationale"] or "",
        correct=row["correct"],
        **asked,
        model=row["model"] or "",
        weight_version=row["weight_version"] or "",
        basis="floor" if failed else "judged",
        failure=failed,
        spent=spent,
        cached=row["cached"],
        cut=row["cut"],
        returned=row.get("returned"),
        steps=tuple((step["offset"], step["score"]) for step in row["steps"]),
        dense=tuple((step["offset"], step["reward"]) for step in row["dense"]),
    )
    return Scored(verdict)


def was_closed(row: Mapping[str, Any]) -> bool:
    """Whether a sample has no reward only because its server stopped. The next server may score it."""
    return (row.get("outcome"), row.get("cause"), row.get("reason")) == ("failed", "infra", "closed")


def unreadable(error: Exception | str) -> RewardServerError:
    """Return the error for a reply that is not in the form of this version."""
    return RewardServerError(f"the reward server sent a reply that cannot be read: {error}", reason="server_refused")


def _written(row: Mapping[str, Any]) -> bytes:
    return orjson.dumps(row, default=_data_url, option=orjson.OPT_SERIALIZE_NUMPY)


def _columns(extras: Mapping[str, Any], what: str) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name, value in extras.items():
        if any(isinstance(one, Image) or is_picture(one) for one in (value if isinstance(value, list) else [value])):
            where = f"{what}: extras[{one_line(str(name), 60)!r}]"
            raise InputError(f"{where} is an image; a reward server gets those of messages and response_images only")
        try:
            columns[str(name)] = as_json(value, "")
        except InputError as error:
            _tell_left_out(one_line(str(name), 60), str(error))
    return columns


@lru_cache(maxsize=1000)
def _tell_left_out(name: str, problem: str) -> None:
    """Log once that an extra is left out."""
    _log.warning("extras[%r] is left out of samples for the reward server%s", name, problem)


def _shows_image(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return not isinstance(content, str) and any(map(is_image_part, content or ()))


def _is_text_of(messages: Sequence[Mapping[str, Any]], prompt: Any) -> bool:
    """Whether a prompt is the text of the only message, which services take for it by default."""
    return isinstance(prompt, str) and [dict(message) for message in messages] == [{"role": "user", "content": prompt}]


def _data_url(value: Any) -> Any:
    """Return an image as a data URL; the server finds its format. An array that orjson does not write becomes a list.

    Raises TypeError for other values.
    """
    if isinstance(value, (Image, bytes)) or is_picture(value):
        return "data:;base64," + base64.b64encode(Image.of(value).data).decode()
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
