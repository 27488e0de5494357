"""Pieces of foreign text that may be shown in a message: short, on one line, and free of secrets.

Servers echo what they were sent: "Incorrect API key provided: sk-abcd1234..." is a common 401. So nothing of a reply
gets into an exception but through here, and a secret is struck out also where only its beginning or its end is shown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from urllib.parse import quote

EXCERPT_CHARS = 200
STRUCK_OUT = "***"
_READ_CHARS = 4_000
_TELLING_CHARS = 8


class Excerpts:
    """Makes excerpts that hold none of `secrets`.

    A secret of 8 characters or more is struck out wherever its first 8 or its last 8 characters occur, together with
    as many more as match; a shorter one where it stands as a word of its own.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._long: list[str] = []
        short: list[str] = []
        for secret in dict.fromkeys(form for value in secrets for form in _forms(value)):
            if len(secret) >= _TELLING_CHARS:
                self._long.append(secret)
            else:
                short.append(re.escape(secret))
        # The longest first, so that no secret survives as the rest of another one that it contains.
        self._long.sort(key=len, reverse=True)
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def of(self, text: str | bytes, limit: int = EXCERPT_CHARS) -> str:
        """Return at most `limit` characters of `text`, secrets struck out and control characters escaped."""
        if isinstance(text, bytes):
            text = text[: 4 * _READ_CHARS].decode("utf-8", "replace")
        beginning = self._strike_out(text[:_READ_CHARS]).strip()
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in beginning)
        return shown if len(shown) <= limit else shown[: limit - 1] + "…"

    def _strike_out(self, text: str) -> str:
        for secret in self._long:
            text = _strike_beginning(text, secret)
            text = _strike_beginning(text[::-1], secret[::-1])[::-1]
        return self._short.sub(STRUCK_OUT, text) if self._short else text

    def __repr__(self) -> str:
        return "Excerpts()"


def _forms(value: str) -> list[str]:
    # A header's value is often a scheme and a secret ("Bearer x"), and a server may show it quoted for JSON or a URL.
    plain = [form for form in (value.strip(), *value.split()) if form and form.lower() not in ("bearer", "basic")]
    return [form for word in plain for form in (word, json.dumps(word)[1:-1], quote(word, safe=""))]


def _strike_beginning(text: str, secret: str) -> str:
    head = secret[:_TELLING_CHARS]
    pieces: list[str] = []
    done = 0
    while (start := text.find(head, done)) >= 0:
        length = len(head)
        while length < len(secret) and text[start + length : start + length + 1] == secret[length]:
            length += 1
        pieces += (text[done:start], STRUCK_OUT)
        done = start + length
    return "".join(pieces) + text[done:]
