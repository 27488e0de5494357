"""Reads samples back from a journal, with the replies to what was asked about them: for `qreward replay`.

A reply is found by its question: everything that was sent, but not how the reply was read. So another judge, or another
version of one, reads it without a request, if it asks the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..samples import Sample
from ..samples.images import is_image_part
from .entries import Entry
from .keys import question_of
from .stories import NOT_KEPT, Story
from .texts import MOST_CHARS


@dataclass(frozen=True)
class PastReply:
    """What a source replied. `nonce` is the one that the reply repeats, if the judge asked for that."""

    source: str
    model: str
    text: str
    nonce: str
    finish_reason: str


@dataclass(frozen=True)
class PastSample:
    """A sample of a journal, and its entries. `replies` are by their questions (`keys.question_of`)."""

    sample: Sample
    replies: Mapping[str, PastReply]
    entries: tuple[Entry, ...]


def past_sample(story: Story) -> PastSample | None:
    """Read a sample back. None if it would differ: a text is cut, JSON cannot hold a value, or it has images
    (journals keep only their hashes).
    """
    entry = story.sample
    texts = (entry.prompt, entry.response, entry.ground_truth, entry.extras)
    if None in texts[:2] or any(text == NOT_KEPT or len(text or "") > MOST_CHARS for text in texts):
        return None
    try:
        messages, rest = json.loads(entry.prompt or ""), json.loads(entry.extras or "{}")
    except ValueError:
        return None
    if rest.get("differs"):
        return None
    if not all(isinstance(message, dict) for message in messages) or any(map(_has_images, messages)):
        return None
    sample = Sample(
        messages,
        entry.response or "",
        rest.get("ground_truth", entry.ground_truth),
        data_source=entry.data_source,
        group_id=entry.group_id,
        step=entry.step,
        split=entry.split,  # type: ignore[arg-type]  # the journal has what a sample had
        extras=rest.get("extras", {}),
        id=entry.sample_id or f"entry {entry.id}",
        prompt=rest.get("prompt"),
        turns=rest.get("turns", ()),
    )
    return PastSample(sample, dict(_replies(story)), story.entries)


def _replies(story: Story) -> Iterator[tuple[str, PastReply]]:
    for entry, attempts in zip(story.entries, story.attempts, strict=True):
        for attempt in attempts:
            reply = attempt.get("reply", NOT_KEPT)
            is_whole = reply != NOT_KEPT and len(reply) <= MOST_CHARS
            # The key of an entry is that of the source which was asked last.
            if entry.key is None or attempt["source"] != entry.source or not is_whole:
                continue
            nonce, finish = attempt.get("nonce", ""), attempt.get("finish", "")
            yield question_of(entry.key), PastReply(entry.source, entry.model or "", str(reply), nonce, finish)


def _has_images(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return isinstance(content, list) and any(map(is_image_part, content))
