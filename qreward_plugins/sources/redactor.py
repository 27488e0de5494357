"""Pieces of foreign text that may be shown in a message: short, on one line, and free of secrets.

Servers echo what they were sent: "Incorrect API key provided: sk-abcd1234..." is a common 401. So nothing of a reply
gets into an exception but through here, and a secret is struck out also where only its beginning or its end is shown.
A secret may come back in another form than it was sent in (quoted for JSON or a URL, in base64), so all of these count.
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
    """Makes excerpts that hold none of `secrets`.

    A secret of 8 characters or more is struck out wherever its first 8 or its last 8 characters occur, together with
    as many more as match; a shorter one where it stands as a word of its own. Of a secret that is a URL these are the
    password and the values of its query; a short number or truth value is taken for a setting.
    """

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        self._long: list[str] = []
        short: list[str] = []
        for secret in dict.fromkeys(form for value in secrets for part in _parts(value) for form in _forms(part)):
            if len(secret) >= _TELLING_CHARS:
                self._long.append(secret)
            elif not _NUMBER.fullmatch(secret):
                short.append(re.escape(secret))
        bare = (secret.replace("\\", "") for secret in self._long)
        self._bare = [secret for secret in dict.fromkeys(bare) if len(secret) >= _TELLING_CHARS]
        self._short = re.compile(rf"(?<!\w)(?:{'|'.join(short)})(?!\w)") if short else None

    def of(self, text: str | bytes, limit: int = EXCERPT_CHARS) -> str:
        """Return at most `limit` characters of `text`, secrets struck out and control characters escaped."""
        if isinstance(text, bytes):
            text = text[: 4 * _READ_CHARS].decode("utf-8", "replace")
        return one_line(self._strike_out(text[:_READ_CHARS]).strip(), limit)

    @property
    def clean(self) -> Callable[[str], str] | None:
        """Returns the whole of a text of a reply with all long secrets struck out; None: there are none. Short ones
        stay: a rationale is full of words and numbers.
        """
        return self._strike_out_long if self._long else None

    def _strike_out(self, text: str) -> str:
        text = self._strike_out_long(text)
        return self._short.sub(STRUCK_OUT, text) if self._short else text

    def _strike_out_long(self, text: str) -> str:
        spans = [span for secret in self._long for span in _spans(text, secret)]
        if "\\" in text:
            # Quoted once or several times, as in the text of a KeyError: all that it adds are backslashes.
            bare = text.replace("\\", "")
            found = [span for secret in self._bare for span in _spans(bare, secret)]
            if found:
                places = [place for place, character in enumerate(text) if character != "\\"]
                spans += [(places[start], places[end - 1] + 1) for start, end in found]
        return _struck(text, spans) if spans else text

    def __repr__(self) -> str:
        return "Redactor()"


def _parts(value: str) -> Iterator[str]:
    """The texts that give a secret away: it, its words, and what stands in it if it is a URL or JSON."""
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
    # A header's value is often a name and a secret ("Token x"). Of a longer text, as a private key is, its lines count.
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
    """User and password of basic authentication."""
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
        # Within a longer text it begins at any of three places in a group; what hangs on its neighbours is left out.
        for shift in range(3):
            coded = base64.b64encode(b"\0" * shift + data).rstrip(b"=").decode()
            coded = coded[2 * shift if shift else 0 : len(coded) - 1]
            yield from (coded, coded.translate(str.maketrans("+/", "-_")))
        yield data.hex()


def _spans(text: str, secret: str) -> Iterator[tuple[int, int]]:
    """Where in a text a secret stands, or its beginning or its end of 8 characters or more."""
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
