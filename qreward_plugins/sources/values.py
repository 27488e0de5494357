"""Reads a successful reply of a scoring service: a `Reply` with a value, or an error.

A reply that is not JSON is a TransientError, because another try may help. JSON with NaN or a duplicate key is an
InvalidReply: it is the service's answer to this sample, and many tries would not change it. The judge decides whether
the value is a score.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidReply, QRewardError
from ..samples import fits_float32
from ..samples.json_values import MOST_NESTING, raw_decode, too_deep
from ..samples.spent import Usage
from .base import Reply
from .replies import Answer, Problem, usage_of


class StrictAnswer(Answer):
    """One HTTP reply with numbers, whose body is read strictly: one with NaN is an answer to this sample, which another
    try would not change.
    """

    __slots__ = ()

    def parsed(self) -> Any:
        content = read_json(self)
        if isinstance(content, Mapping) and content.get("error"):
            return self.error_of(Problem.of(content))
        return content

    def usage_in(self, content: Any) -> Usage | None:
        # SGLang states it in `meta_info`. Nothing is generated, and not every server says so.
        stated = (content.get("usage") or content.get("meta_info")) if isinstance(content, Mapping) else None
        return usage_of({"completion_tokens": 0, **stated}) if isinstance(stated, Mapping) else None


def is_number(value: Any) -> bool:
    """Whether a value of a reply is a number that float32 holds."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and fits_float32(value)


NOTHING = object()


@dataclass(slots=True, eq=False)
class ValueAnswer(Answer):
    """One HTTP reply of a scoring service. `score_key` is the path to the value; None: the whole reply is the value."""

    score_key: str | None = None

    def parsed(self) -> Any:
        content = read_json(self)
        return self._error_in(content) or content

    def _error_in(self, value: Any) -> QRewardError | None:
        error = value.get("error") if isinstance(value, Mapping) else None
        # A score beside an error is a default of the service.
        return self.error_of(Problem.of(value)) if error and isinstance(error, (Mapping, str)) else None

    def read_content(self, content: Any) -> Reply | QRewardError:
        for value in _along(content, self.score_key):
            error = self._error_in(value)
            if error is not None:
                return error
        if value is NOTHING:
            return InvalidReply(f"source {self.name!r} gave no value: its reply has no {self.score_key!r}")
        return self.replied(content, value=value)


def read_json(answer: Answer) -> Any:
    """Return the body of a reply, read strictly as JSON; or the error that it is, a `QRewardError`."""
    try:
        text = answer.http.body.decode("utf-8-sig")
    except UnicodeDecodeError:
        return answer.unreadable("text that is not UTF-8", answer.http.body)
    if too_deep(text):
        return answer.unreadable(f"JSON nested more than {MOST_NESTING} deep", answer.http.body)
    text = text.strip(" \t\n\r")
    try:
        content, end, flaw = raw_decode(text, 0)
    except (json.JSONDecodeError, RecursionError):
        end = -1
    if end != len(text):
        return answer.unreadable(f"{answer.content_type()} that is not JSON", answer.http.body)
    return InvalidReply(f"source {answer.name!r} gave no valid value: its reply {flaw}") if flaw else content


def at_path(content: Any, path: str) -> Any:
    """Return the value at a path of keys joined by dots; `NOTHING` if there is none."""
    *_, found = _along(content, path)
    return found


def _along(content: Any, path: str | None) -> Iterator[Any]:
    """Yield `content` and every value on the way to the one at `path`."""
    yield (found := content)
    for key in () if path is None else path.split("."):
        if isinstance(found, Mapping) and key in found:
            found = found[key]
        elif isinstance(found, list) and key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < len(found):
            found = found[int(key)]
        else:
            found = NOTHING
        yield found
