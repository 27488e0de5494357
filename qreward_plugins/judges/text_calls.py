"""Makes the call that asks a chat source for a text, for judges of one's own, and for callers of the engine who want
the text itself.

What is wrong with the messages is raised where the request is made: it is an error of this text, and of no other one
that is asked for beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import InputError, InvalidReply
from ..samples import Message, Sample
from ..samples.json_values import as_json
from ..scheduling.calls import Call
from ..sources.base import Reply, Request
from .sample_texts import checked_turns

DEFAULT_MAX_TOKENS = 1024

_SET_BY_SOURCE = ("model", "messages", "stream", "stream_options", "n")
_NO_SAMPLE = Sample([], "")


def text_call(
    sources: Sequence[str],
    messages: Sequence[Message],
    parameters: Mapping[str, Any] | None = None,
    *,
    name: str,
    sample: Sample = _NO_SAMPLE,
) -> Call[Reply]:
    """Return a call for the text that follows `messages`: `text` of the `Reply` that is its answer.

    `sources` are the names of the sources that may answer, `parameters` further keys of the body (default: `max_tokens`
    of 1,024), and `name` says who asks, in logs and events. `sample` is the one that a judge asks about. The journal
    does not keep the answer. Raises `ValueError` for `parameters` that a source sets itself. Messages that cannot be
    sent make the call fail (`input`).
    """
    sent = _checked(parameters or {})
    given = list(messages) if isinstance(messages, (list, tuple)) else messages

    def request(attempt: int) -> Request:
        return Request(sample, _checked_messages(given), sent, max_completion_tokens=sent["max_tokens"], judge=name)

    return Call(tuple(sources), request, _read, name)


def _checked(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plain copy, with `max_tokens`. Raises `ValueError`."""
    taken = [key for key in _SET_BY_SOURCE if key in parameters]
    if taken:
        raise ValueError(f"parameters.{taken[0]} is set by the source; leave it out")
    bound = parameters.get("max_tokens", DEFAULT_MAX_TOKENS)
    if not isinstance(bound, int) or isinstance(bound, bool) or bound < 1:
        raise ValueError(f"parameters.max_tokens must be a whole number from 1 on, not {bound!r}")
    try:
        plain = {key: as_json(value, f"parameters.{key}") for key, value in parameters.items()}
    except InputError as error:
        raise ValueError(str(error)) from None
    return {"max_tokens": bound, **plain}


def _checked_messages(messages: Sequence[Message]) -> tuple[Message, ...]:
    turns = checked_turns(messages)
    if not turns:
        raise InputError("the messages must be a list with at least one message")
    if not all(isinstance(turn["content"], str) for turn in turns):
        raise InputError("each of the messages needs a content that is a text")
    return tuple(Message(role=turn["role"], content=turn["content"]) for turn in turns)


def _read(request: Request, reply: Reply) -> Reply:
    if not isinstance(reply.text, str):
        raise InvalidReply("the reply has no text")
    return reply
