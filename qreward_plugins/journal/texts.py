"""Chooses the samples whose texts are kept, and writes the texts: prompt, response, what was sent, what was replied.

Texts are large, and most of them are never read. So by default they are kept of the samples that people ask about:
those without a reward or with a floor, those with an invalid reply, the best and the worst of a step, and some at
random. A sample is chosen when it ends, because a killed process must not lose it. So the first samples of a step count
as its best, and a step keeps more than the numbers below.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import random
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import NoneType
from typing import Any, Final, Literal, TypeAlias

import orjson

from ..errors import SampleRefused
from ..samples import Outcome, Sample, Scored
from ..samples.images import EncodedImage
from ..samples.json_values import without_lone_surrogates
from ..sources.base import Reply, Request, identity_of
from .history import PastAttempt

Keep = Literal["interesting", "all", "none"]

EXTREME: Final = 8
RANDOM: Final = 32
"""Samples of each judge in a step, in each process, whose texts are kept at least."""

MOST_CHARS: Final = 200_000
"""Longest text that is kept whole, in characters. A longer one loses its middle."""

Redact: TypeAlias = Callable[[str], str]
"""Replaces what a journal must not hold."""

_REDACTED: Final = "[redacted]"

_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

_ESCAPED_NULL: Final = "\\u0000"
_SHORT: Final = 32
"""Longest response, in characters, that gets no mark: it may be a part of everything, and the mark is as long."""
_RESPONSE: Final = "\0response\0"
_NONCE: Final = "\0nonce\0"

_STEPS: Final = 64
"""Most steps and judges whose best and worst scores are known at once."""


class Interest:
    """Decides by `keep` whose texts are kept. `rng` draws those at random."""

    def __init__(self, keep: Keep, rng: random.Random) -> None:
        self._keep = keep
        self._rng = rng
        self._seen: OrderedDict[tuple[Any, ...], _Scores] = OrderedDict()
        self._lock = threading.Lock()

    def in_texts(self, sample: Sample, outcome: Outcome, history: Sequence[PastAttempt]) -> bool:
        """Whether the texts of a sample are kept."""
        if self._keep != "interesting":
            return self._keep == "all"
        if not isinstance(outcome, Scored) or outcome.failure is not None:
            return True
        invalid = any(attempt.result == "invalid" for attempt in history)
        key = (sample.split, sample.step, outcome.verdict.judge)
        with self._lock:
            scores = self._seen.setdefault(key, _Scores())
            if len(self._seen) > _STEPS:
                self._seen.popitem(last=False)
            return scores.stand_out(outcome.verdict.score, self._rng) or invalid


class _Scores:
    """The scores of one judge in one step so far."""

    __slots__ = ("_best", "_count", "_worst")

    def __init__(self) -> None:
        self._count = 0
        self._best: list[float] = []
        """The best scores, the least of them first."""
        self._worst: list[float] = []
        """The worst scores, negated, in the same way."""

    def stand_out(self, score: float, rng: random.Random) -> bool:
        """Whether a new score is one of the best or worst so far, or is drawn."""
        self._count += 1
        drawn = rng.random() * self._count < RANDOM
        best, worst = _enters(self._best, score, EXTREME), _enters(self._worst, -score, EXTREME)
        return drawn or best or worst


def _enters(highest: list[float], value: float, most: int) -> bool:
    """Add `value` to the heap of the `most` highest ones; return whether it is one of them. An equal one comes late."""
    if len(highest) < most:
        heapq.heappush(highest, value)
        return True
    return heapq.heappushpop(highest, value) < value


_CODE = re.compile(r"(?<!\\)\\u([0-9A-Fa-f]{4})")


def _character(code: re.Match[str]) -> str:
    character = chr(int(code[1], 16))
    return character if character.isprintable() and character not in '"\\' else code[0]


def redaction(patterns: Sequence[str]) -> Redact | None:
    """Return what replaces the matches of regular expressions; None if there are none. Raises `re.error`."""
    compiled = [re.compile(pattern) for pattern in patterns]

    def redact(text: str) -> str:
        if "\\u" in text:
            # A server may have written characters of a match by their codes, as JSON allows.
            plain = _CODE.sub(_character, text)
            text = plain if any(pattern.search(plain) for pattern in compiled) else text
        for pattern in compiled:
            text = pattern.sub(_REDACTED, text)
        return text

    return redact if compiled else None


class Texts:
    """The texts of one entry of the journal, by their hashes. `redact` is applied to each."""

    def __init__(self, redact: Redact | None = None) -> None:
        self.by_hash: dict[str, bytes] = {}
        self._redact = redact

    def of_sample(self, sample: Sample) -> dict[str, str | None]:
        """Add the texts of a sample; return the hashes for the columns of the journal."""
        found: dict[str, str | None] = {}
        for name, read in _OF_SAMPLE.items():
            try:
                found[name] = self._add_json(read(sample))
            except Exception:  # a foreign object may raise anything, and this must not cost the row
                found[name] = None
        return found

    def of_attempt(self, sample: Sample, attempt: PastAttempt) -> dict[str, str | None]:
        """Add the texts of an attempt for a sample; return their hashes: what was sent, the reply and the thoughts
        before it, or what the server said instead.
        """
        found: dict[str, str | None] = {}
        request = attempt.request
        written = "" if attempt.sent_s is None else _body(attempt)
        if written and request.nonce and _ESCAPED_NULL not in written:
            # With marks in place of the response and the nonce, the siblings of a group share this text.
            written, found["nonce"] = _marked(written, request, sample.response), request.nonce
        if written:
            found["request"] = self._add_written(written)
        if attempt.said:
            found["said"] = self._add_written(attempt.said)
        if attempt.reply is not None:
            found["reply"] = self._add(_said(attempt.reply))
            if attempt.reply.thinking:
                found["thinking"] = self._add(attempt.reply.cleaned(attempt.reply.thinking))
        return found

    def _add_json(self, value: Any) -> str | None:
        if value is None or isinstance(value, str):
            return None if value is None else self._add(value)
        return self._add_written(_json(value))

    def _add_written(self, written: str) -> str:
        """Add JSON. A pattern may match quotes and brackets, so it gets the texts in it."""
        return self._insert(written if self._redact is None else _redacted_json(written, self._redact))

    def _add(self, text: str) -> str:
        return self._insert(text if self._redact is None else self._redact(text))

    def _insert(self, text: str) -> str:
        if len(text) > MOST_CHARS:
            half = MOST_CHARS // 2
            text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters are left out ...]\n{text[-half:]}"
        body = text.encode("utf-8", "replace")
        name = hashlib.blake2b(body, digest_size=16).hexdigest()
        self.by_hash[name] = body
        return name


def _rest(sample: Sample) -> Mapping[str, Any] | None:
    """What a sample has beside its other texts, by the names of its fields; None for nothing. A ground truth that is no
    text is here, too, because its text does not tell what it was. `differs`: it has something that is not here.
    """
    rest: dict[str, Any] = {"extras": dict(sample.extras)} if sample.extras else {}
    if sample.prompt is not None:
        rest["prompt"] = sample.prompt
    if not isinstance(sample.ground_truth, (str, NoneType)):
        rest["ground_truth"] = sample.ground_truth
    if sample.turns:
        rest["turns"] = list(sample.turns)
    if sample.response_images or not _is_json(rest):
        rest["differs"] = True
    return rest or None


def _is_json(value: Any) -> bool:
    """Whether a value comes back from JSON as it was."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except Exception:  # an object of others may refuse the comparison
        return False


_OF_SAMPLE: Final[Mapping[str, Callable[[Sample], Any]]] = {
    "prompt": lambda sample: list(sample.messages),
    "response": lambda sample: sample.response,
    "ground_truth": lambda sample: sample.ground_truth,
    "extras": _rest,
}


def _body(attempt: PastAttempt) -> str:
    """The body that was sent; of a source that does not tell it, the messages and parameters, as JSON, or ""."""
    request = attempt.request
    if request.passed is None:
        try:
            written = attempt.written()
        except SampleRefused:
            return ""
        if written is not None:
            return written
    return _json({"messages": list(request.messages), **request.parameters}) if request.messages else ""


def _marked(body: str, request: Request, response: Any) -> str:
    """Replace the response of the sample and the nonce in JSON, as they are written there. Requests without a nonce may
    be joined, and all of their samples share the text as it is.
    """
    if isinstance(response, str) and _SHORT < len(response) < MOST_CHARS:
        with suppress(TypeError):  # lone surrogates, which were written in another way
            body = body.replace(_written(response), _written(_RESPONSE))
    return body.replace(request.nonce, _written(_NONCE))


def restored(request: str, nonce: str, response: str | None) -> str:
    """Return what was sent, as JSON, from a text with marks, the attempt's nonce and the sample's response."""
    return request.replace(_written(_NONCE), nonce).replace(_written(_RESPONSE), _written(response or ""))


def _written(text: str) -> str:
    return orjson.dumps(text).decode()[1:-1]


def _said(reply: Reply) -> str:
    return reply.cleaned(reply.text or ("" if reply.value is None else _json(reply.value)))


def _json(value: Any) -> str:
    """Write any value as JSON; what JSON cannot hold is named by its type, and an image by its hash."""
    try:
        return orjson.dumps(value, default=_named, option=_OPTIONS).decode()
    except TypeError:
        pass
    try:
        # Integers of more than 64 bits.
        return json.dumps(without_lone_surrogates(value), default=_named, ensure_ascii=False)
    except Exception:  # data sets hold anything
        return f"[a {type(value).__name__} that cannot be shown]"


def _redacted_json(written: str, redact: Redact) -> str:
    def walked(value: Any) -> Any:
        if isinstance(value, str):
            return redact(value)
        if isinstance(value, dict):
            return {redact(name): walked(each) for name, each in value.items()}
        return [walked(each) for each in value] if isinstance(value, list) else value

    try:
        return json.dumps(walked(json.loads(written)), ensure_ascii=False)
    except ValueError:
        # It is the note on what cannot be shown.
        return redact(written)


def _named(value: Any) -> str:
    return identity_of(value) if type(value) is EncodedImage else f"[{type(value).__name__}]"
