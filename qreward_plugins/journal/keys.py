"""The keys that an answer is found by: one for each source that may be asked, a hash of everything that it is sent.

A key is derived from the request itself, as the source would write it (`Source.question`), so nothing that is sent can
be forgotten. Three more things are in it: who is asked, how the judge reads the reply, and what the judge is shown only
as a placeholder, such as the image behind `[image]`.

The identifier of the fences is drawn per process and must not tell keys apart. It occurs nowhere in the texts of the
sample, so a text is cut at it, and the pieces are hashed.

A question that cannot be written for certain has no key: a sample that is asked again costs one request, a wrong hit
costs a wrong reward.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from ..judges.base import Judge
from ..samples import Sample
from ..sources.base import Request, Source, apart
from .encoding import encoded

_PERSON = b"qreward key 2"
"""Change it with any change of what a key is made of."""


def question_keys(sample: Sample, judge: Judge, sources: Mapping[str, Source]) -> dict[str, str]:
    """The keys of what `judge` would ask about `sample`, by the source that would be asked; 40 hexadecimal digits each.

    A source is missing where its answers are never to be used again: its question cannot be told from others for
    certain, or it does not want that. Nothing is asked about a sample that the judge fails by itself, so it has no
    keys. Sources that are asked the same have the same key. Keys are the same in every process.
    """
    try:
        if judge.screen(sample) is not None:
            return {}
        request = judge.request(sample, attempt=0)
        unseen = tuple(_attachments(sample)) if request.messages else ()
        common = encoded((judge.fingerprint, unseen))
    except Exception:
        # A sample is made by others, and the methods of its values may raise anything.
        return {}
    keys = {}
    for name in judge.sources:
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
    # A source of somebody else's that does not say what it sends: everything that it is handed, by what `Request` is.
    messages = [[(name, apart(str(text), request.nonce)) for name, text in m.items()] for m in request.messages]
    return (source.model, messages, dict(request.parameters), None if request.messages else request.sample)


def _attachments(sample: Sample) -> Iterator[Any]:
    """The parts of the prompt that are no text, such as images; a judge that reads texts is only told of them."""
    for messages in (sample.messages, sample.prompt):
        for message in messages if isinstance(messages, (list, tuple)) else ():
            content = message.get("content") if isinstance(message, Mapping) else None
            for part in content if isinstance(content, (list, tuple)) else ():
                if isinstance(part, Mapping) and not isinstance(part.get("text"), str):
                    yield part


__all__ = ["question_keys"]
