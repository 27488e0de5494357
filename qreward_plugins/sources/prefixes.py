"""Finds the part of a request that the siblings of a group share: what a server's prefix cache can use again.

The judge's instructions come first, then the question, then the response. A judge fences the response with a nonce that
it draws for every attempt, and the texts before it with one that follows from the texts themselves. So what comes
before the nonce of the attempt is the shared part. Of other requests, it is what comes before the response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .base import Request

BYTES_PER_TOKEN = 4
"""Bytes of English text for each token."""
_UNKNOWN_TOKENS = 1024
"""Tokens of a prompt without a response in it that count as shared, unless `prefix_tokens` says otherwise."""
_SHORTEST_RESPONSE = 16
"""A shorter response may occur in the question, too, so its place in a prompt is not looked for."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The shared part of a prompt: a hash of it, and its size in tokens (estimated)."""

    key: int
    tokens: int


def shared_prefix(request: Request, most_tokens: int | None = None) -> Prefix | None:
    """Return the shared part of a request, of which the first `most_tokens` count; None if there is no text in it.

    The hash (BLAKE2b, RFC 7693) is the same in every process, so that the siblings of a group that are scored in
    different processes go to the same replica.
    """
    limit: int | None
    if request.passed is not None:
        pieces, limit = list(_texts_of(request.passed.body)), most_tokens or _UNKNOWN_TOKENS
    elif request.messages:
        pieces, ends = _before_the_response(request)
        limit = most_tokens if ends or most_tokens is not None else _UNKNOWN_TOKENS
    else:
        # Scoring services get the sample; the question is what its siblings share.
        pieces, limit = list(_texts(request.sample.messages)), most_tokens
    room = None if limit is None else limit * BYTES_PER_TOKEN
    hashed, size = hashlib.blake2b(digest_size=8), 0
    for piece in pieces:
        data = piece.encode("utf-8", "surrogatepass")
        if room is not None:
            data = data[: room - size]
        hashed.update(len(data).to_bytes(8, "big"))
        hashed.update(data)
        size += len(data)
    return Prefix(int.from_bytes(hashed.digest(), "big"), -(-size // BYTES_PER_TOKEN)) if size else None


def _before_the_response(request: Request) -> tuple[list[str], bool]:
    """Return the texts before the response, and whether the response was found."""
    response: object = request.sample.response
    sought = request.nonce
    if not sought and isinstance(response, str) and len(response) >= _SHORTEST_RESPONSE:
        sought = response
    pieces: list[str] = []
    for text in _texts(request.messages):
        found = text.find(sought) if sought else -1
        if found >= 0:
            return [*pieces, text[:found]], True
        pieces.append(text)
    return pieces, False


def _texts_of(body: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a client's own request, in the order in which servers write them into the prompt."""
    for key in ("system", "instructions", "messages", "input", "contents"):
        value = body.get(key)
        if isinstance(value, str):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _texts(value)


def _texts(messages: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of messages. Other values are skipped: data sets do not hold only texts in messages."""
    for message in messages:
        content = message.get("content", message.get("parts")) if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else [content]:
            text = part.get("text") if isinstance(part, Mapping) else part
            if isinstance(text, str):
                yield str.__str__(text)
