"""Redacts secrets in foreign text, and shortens it to one line for messages.

Servers echo what they receive: "Incorrect API key provided: sk-abcd1234..." is a common 401. Every part of a reply that
goes into an exception passes through here. A secret is redacted even if only its beginning or its end is shown, and in
every form in which it may come back (quoted for JSON or a URL, in base64).
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
from collections.abc import Callable, Iterable, Iterator
from urllib.parse import parse_qsl, quote, urlsplit

from ..redaction import one_line

EXCERPT_CHARS = 200
STRUCK_OUT = "***"
_READ_CHARS = 4_000
_TELLING_CHARS = 8
_SCHEMES = ("bearer", "basic", "token", "digest", "apikey")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_NUMBER = re.compile(r"[+-]?[0-9.]{1,5}|true|false|null|none", re.IGNORECASE)


class Redactor:
    """Redacts `secrets` in texts.

    A secret of 8 characters or more is redacted wherever its first 8 or its last 8 characters occur, with all adjacent
    characters that match. A shorter secret is redacted where it is a whole word. Of a URL, the secrets are the password
    and the values of the query. A short number or a truth value is taken for a setting and not redacted.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._secrets = tuple(secrets)
        self._long: list[str] = []
        short: list[str] = []
        for secret in dict.fromkeys(form for value in self._secrets for part in _parts(value) for form in _forms(part)):
            if len(secret) >= _TELLING_CHARS:
                self._long.append(secret)
            elif not _NUMBER.fullmatch(secret):
                short.append(re.escape(secret))
        bare = (secret.replace("\\", "") for secret in self._long)
        self._bare = [secret for secret in dict.fromkeys(bare) if len(secret) >= _TELLING_CHARS]
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def beside(self, secrets: Iterable[str]) -> Redactor:
        """Return a redactor of these secrets and its own."""
        return Redactor([*self._secrets, *secrets])

    def of(self, text: str | bytes, limit: int = EXCERPT_CHARS) -> str:
        """Return at most `limit` characters of `text`, with secrets redacted and control characters escaped."""
        if isinstance(text, bytes):
            text = text[: 4 * _READ_CHARS].decode("utf-8", "replace")
        return one_line(self._strike_out(text[:_READ_CHARS]).strip(), limit)

    @property
    def clean(self) -> Callable[[str], str] | None:
        """A function that returns a whole text with all long secrets redacted; None if there are no long secrets.

        Short secrets stay, because they may be ordinary words and numbers of a rationale.
        """
        return self._strike_out_long if self._long else None

    def _strike_out(self, text: str) -> str:
        text = self._strike_out_long(text)
        return self._short.sub(STRUCK_OUT, text) if self._short else text

    def _strike_out_long(self, text: str) -> str:
        spans = [span for secret in self._long for span in _spans(text, secret)]
        if "\\" in text:
            # The text may be quoted once or several times, as in a KeyError. Quoting only adds backslashes.
            bare = text.replace("\\", "")
            found = [span for secret in self._bare for span in _spans(bare, secret)]
            if found:
                places = [place for place, character in enumerate(text) if character != "\\"]
                spans += [(places[start], places[end - 1] + 1) for start, end in found]
        return _struck(text, spans) if spans else text

    def __repr__(self) -> str:
        return "Redactor()"


def _parts(value: str) -> Iterator[str]:
    """Yield the texts to redact for a secret: itself, its words, and the secret parts of a URL or of JSON."""
    value = value.strip()
    scheme, _, rest = value.partition(" ")
    if scheme.lower() in _SCHEMES:
        value = rest.strip()
        yield from _decoded(value)
    if _URL.match(value):
        yield from _of_url(value)
        return
    if value.startswith(("{", "[")):
        yield from _of_json(value)
    if value:
        yield value
    words = value.split()
    # A header's value is often a name and a secret ("Token x"). Of a longer text, such as a private key, each long word
    # counts.
    yield from (word for word in words if len(words) > 1 and (len(words) == 2 or len(word) >= 2 * _TELLING_CHARS))


def _of_url(value: str) -> Iterator[str]:
    try:
        url = urlsplit(value)
        hidden = [url.password or "", *(item for _, item in parse_qsl(url.query)), url.fragment]
    except ValueError:
        hidden = [value.partition("://")[2]]
    yield from (item for item in hidden if item)


def _of_json(value: str) -> Iterator[str]:
    try:
        pending = [json.loads(value)]
    except (ValueError, RecursionError):
        return
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
        elif isinstance(item, str) and len(item) >= _TELLING_CHARS and not _URL.match(item):
            yield item


def _decoded(value: str) -> Iterator[str]:
    """Yield the password of basic authentication."""
    try:
        _, _, password = base64.b64decode(value, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        return
    if password:
        yield password


def _forms(value: str) -> Iterator[str]:
    data = value.encode("utf-8", "surrogatepass")
    yield value
    yield json.dumps(value)[1:-1]
    yield repr(value)[1:-1]
    yield html.escape(value)
    quoted = quote(data, safe="")
    yield from (quoted, quote(data), re.sub("%[0-9A-F]{2}", lambda code: code[0].lower(), quoted))
    if len(data) >= _TELLING_CHARS:
        # In the base64 of a longer text, the secret has one of three alignments. Characters that also depend on the
        # neighbouring bytes are left out.
        for shift in range(3):
            coded = base64.b64encode(b"\0" * shift + data).rstrip(b"=").decode()
            coded = coded[2 * shift if shift else 0 : len(coded) - 1]
            yield from (coded, coded.translate(str.maketrans("+/", "-_")))
        yield data.hex()


def _spans(text: str, secret: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of `text` that match a secret, or 8 or more characters of its beginning or its end."""
    head, tail = secret[:_TELLING_CHARS], secret[-_TELLING_CHARS:]
    end = 0
    while (start := text.find(head, end)) >= 0:
        end = start + len(head)
        while end - start < len(secret) and text[end : end + 1] == secret[end - start]:
            end += 1
        yield start, end
    end = 0
    while (start := text.find(tail, end)) >= 0:
        end = start + len(tail)
        while start > 0 and end - start < len(secret) and text[start - 1] == secret[start - 1 - end]:
            start -= 1
        yield start, end


def _struck(text: str, spans: list[tuple[int, int]]) -> str:
    pieces: list[str] = []
    done = 0
    for start, end in sorted(spans):
        if start > done or not pieces:
            pieces += (text[done:start], STRUCK_OUT)
        done = max(done, end)
    return "".join(pieces) + text[done:]
