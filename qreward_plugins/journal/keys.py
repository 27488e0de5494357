"""Computes the keys of recorded answers: a hash of everything that is sent to a source, one key for each source.

A key is derived from the request as the source would write it (`Source.question`), so it covers everything that is
sent. It also covers the source, how the judge reads the reply, and what the judge sees only as a placeholder, such as
the image of `[image]`. An image that is sent counts by a hash of its content.

The nonce of the fences is drawn per process and must not change the key. It does not occur in the sample's texts, so
each text is split at the nonce, and the parts are hashed.

A question that cannot be encoded safely has no key. Asking again costs one request; a wrong hit would give a wrong
reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..samples.images import is_image_part
from ..scheduling.calls import Call
from ..sources.base import Request, Source, content_apart
from .encoding import encoded

_PERSON = b"qreward key 2"
"""Change this whenever the content of keys changes, so that new keys do not match old answers."""


def question_keys(call: Call[Any], sources: Mapping[str, Source]) -> dict[str, str]:
    """Return the key of each source's answer to `call`, by the source's name; 40 hexadecimal digits each.

    A source is missing if its question cannot be encoded safely, or if its answers must not be used again. The
    mapping is empty for a call without an identity, or without a request. Equal questions have equal keys, in every
    process. Raises nothing.
    """
    if not call.identity:
        return {}
    try:
        request = call.request(0)
        unseen = tuple(_attachments(request)) if request.messages else ()
        common = encoded((call.identity, unseen))
    except Exception:
        # Methods of the values in a sample may raise anything.
        return {}
    keys = {}
    for name in call.sources:
        key = _key(common, request, sources[name])
        if key is not None:
            keys[name] = key
    return keys


def _key(common: bytes, request: Request, source: Source) -> str | None:
    try:
        question = _question(source, request)
        if question is None:
            return None
        digest = hashlib.blake2b(common, digest_size=20, person=_PERSON)
        digest.update(encoded(question))
    except Exception:
        return None
    return digest.hexdigest()


def _question(source: Source, request: Request) -> object | None:
    ask = getattr(source, "question", None)
    if ask is not None:
        question: object | None = ask(request)
        return question
    # A foreign source may lack `question`. Then everything in the request counts as sent, and the source's name counts,
    # too, because another source may answer differently.
    messages = [[(name, content_apart(text, request.nonce)) for name, text in m.items()] for m in request.messages]
    return (source.name, source.model, messages, dict(request.parameters), None if request.messages else request.sample)


def _attachments(request: Request) -> Iterator[Any]:
    """Yield the parts of the prompt and the response that are neither text nor sent, such as videos. The judge sees
    placeholders for them.
    """
    sends_images = any(not isinstance(message["content"], str) for message in request.messages)
    sample = request.sample
    for messages in (sample.messages, sample.prompt):
        for message in messages if isinstance(messages, (list, tuple)) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, (list, tuple)) else ():
                if not isinstance(part, Mapping) or isinstance(part.get("text"), str):
                    continue
                if not (sends_images and is_image_part(part)):
                    yield part
    if not sends_images:
        yield from sample.response_images
