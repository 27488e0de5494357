"""Marks the secrets of a configuration, and escapes foreign text for one line of a log.

Secrets occur in more places than `api_key`: in a function's `kwargs`, in `parameters`, and in lists and mappings below
them. A value there becomes a `Secret` if its key names a secret, or an interpolation takes it from the environment. A
`Secret` is sent as plain text, but its repr is asterisks. Each source has a `Redactor` with its secrets, which redacts
foreign text before it is shown.

Servers echo what they receive: "Incorrect API key provided: sk-abcd1234..." is a common 401. Every part of a reply that
goes into an exception passes through a `Redactor`. A secret is redacted even if only its beginning or its end is shown,
and in every form in which it may come back (quoted for JSON or a URL, in base64, characters by their codes).
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

MASK = "**********"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_SECRET_WORDS = frozenset(
    {"apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials", "key", "passphrase", "passwd"}
    | {"password", "pat", "pin", "private", "pw", "pwd", "secret", "secrets", "signature", "token", "accesskey"}
)
_PLAIN_WORDS = frozenset(
    {"answer", "begin", "bos", "cache", "cls", "column", "end", "eos", "field", "image", "label", "mask", "max", "min"}
    | {"output", "pad", "primary", "prompt", "response", "result", "reward", "score", "sep", "sort", "special", "start"}
    | {"stop", "think", "unk"}
)
"""A key with one of these words holds no secret, because `key` or `token` means something else: `eos_token`."""
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Shells set these to folders. Masking them would mask every path that a message names."""
_LETTERS_ONLY = re.compile(r"[^a-z]")
_GLUED = re.compile(r"(?:api|access|private|secret|auth|client)(?:key|token|secret)|password|passphrase|credential")

EXCERPT_CHARS = 200
STRUCK_OUT = "***"
_READ_CHARS = 4_000
_TELLING_CHARS = 8
_SCHEMES = ("bearer", "basic", "token", "digest", "apikey")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ESCAPE = re.compile(r"\\+(?:u([0-9A-Fa-f]{4}))?")
_NUMBER = re.compile(r"[+-]?[0-9.]{1,5}|true|false|null|none", re.IGNORECASE)


class Secret(str):
    """A text whose repr is asterisks, so that printing a structure around it does not show it.

    `within` holds parts that are secrets by themselves: for "at ${oc.env:HOST}" the value of the variable.
    """

    within: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return repr(MASK)


class SecretNumber(int):
    """An integer whose repr is asterisks: a PIN or a password of digits, which YAML reads as an integer."""

    def __repr__(self) -> str:
        return MASK


def names_secret(name: str) -> bool:
    """Return whether a key of this name is likely to hold a secret: `api_key`, `hfToken`, `X-Auth`, `db_password`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _GLUED.search(_LETTERS_ONLY.sub("", name.lower())):
        return True
    return not _SECRET_WORDS.isdisjoint(words) and _PLAIN_WORDS.isdisjoint(words)


def environment_secrets() -> list[str]:
    """Return the values of the environment variables whose names are those of secrets."""
    return [value for name, value in os.environ.items() if value and names_secret(name) and name not in _FOLDERS]


def with_secrets(value: Any, *, secret: bool = False, within: tuple[str, ...] = ()) -> Any:
    """Copy a tree of plain values, and turn its secrets into `Secret` and `SecretNumber`.

    Secrets are texts, and integers of six digits or more, below a key that names a secret. If `secret` is true, all in
    the tree are.
    """
    if isinstance(value, Mapping):
        return {
            key: with_secrets(item, secret=secret or (isinstance(key, str) and names_secret(key)), within=within)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [with_secrets(item, secret=secret, within=within) for item in value]
    if not secret or not value or isinstance(value, (bool, Secret, SecretNumber)):
        return value
    if type(value) is str:
        marked = Secret(value)
        marked.within = tuple(part for part in within if part != value)
        return marked
    # A short number is more likely a setting (`auth_timeout: 30`) than a password.
    return SecretNumber(value) if type(value) is int and abs(value) >= 10**5 else value


def without_secrets(value: Any) -> Any:
    """Copy a tree from `with_secrets` with plain texts and numbers, for the function or server that it is sent to."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, Secret):
        return str.__str__(value)
    return int(value) if isinstance(value, SecretNumber) else value


def secrets_in(value: Any) -> Iterator[str]:
    """Yield the texts of all secrets in a tree from `with_secrets`, which may hold those of pydantic, too."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from secrets_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from secrets_in(item)
    elif isinstance(value, Secret):
        yield str.__str__(value)
        yield from value.within
    elif isinstance(value, SecretNumber):
        yield f"{int(value)}"
    elif reveal := getattr(value, "get_secret_value", None):  # `SecretStr` and `SecretBytes` of pydantic
        shown = reveal()
        yield shown.decode(errors="replace") if isinstance(shown, bytes) else shown


def masked(value: Any, marked: Any) -> Any:
    """Copy a tree of JSON, with asterisks where `marked`, a tree from `with_secrets`, has secrets."""
    if isinstance(marked, (Secret, SecretNumber)):
        return MASK
    if isinstance(value, dict) and isinstance(marked, Mapping):
        return {key: masked(item, marked.get(key)) for key, item in value.items()}
    if isinstance(value, list) and isinstance(marked, list) and len(value) == len(marked):
        return [masked(*items) for items in zip(value, marked, strict=True)]
    return value


def one_line(text: str, limit: int) -> str:
    """Escape all unprintable characters of `text` and cut it to `limit` characters.

    Escaped are line breaks, terminal colours and marks that change the direction of writing, among others.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def described_error(error: BaseException, limit: int = 200) -> str:
    """The type and the message of an error of other code, on one line of at most `limit` characters.

    Only the type if the message cannot be read: `__str__` of a foreign error may raise.
    """
    try:
        return one_line(f"{type(error).__name__}: {error}", limit)
    except Exception:
        return type(error).__name__


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
        self.clean: Callable[[str], str] | None = self._strike_out_long if self._long else None
        """A function that returns a whole text with all long secrets redacted; None if there are no long secrets.
        Short secrets stay, because they may be ordinary words and numbers of a rationale."""

    def beside(self, secrets: Iterable[str]) -> Redactor:
        """Return a redactor of these secrets and its own."""
        return Redactor([*self._secrets, *secrets])

    def of(self, text: str | bytes, limit: int = EXCERPT_CHARS) -> str:
        """Return at most `limit` characters of `text`, with secrets redacted and control characters escaped."""
        if isinstance(text, bytes):
            text = text[: 4 * _READ_CHARS].decode("utf-8", "replace")
        return one_line(self.strike_out(text[:_READ_CHARS]).strip(), limit)

    def strike_out(self, text: str) -> str:
        """Return a whole text with all secrets redacted, the short ones, too."""
        text = self._strike_out_long(text)
        return self._short.sub(STRUCK_OUT, text) if self._short else text

    def _strike_out_long(self, text: str) -> str:
        if len(text) < _TELLING_CHARS:
            return text
        spans = [span for secret in self._long for span in _spans(text, secret)]
        if "\\" in text:
            # The text may be quoted once or several times, as in a KeyError. Quoting only adds backslashes. In JSON, a
            # server may write any character by its code.
            bare = _ESCAPE.sub(_character, text)
            found = [span for secret in self._bare for span in _spans(bare, secret)]
            if found:
                places = list(_places(text))
                spans += [(places[start][0], places[end - 1][1]) for start, end in found]
        return _struck(text, spans) if spans else text

    def __repr__(self) -> str:
        return "Redactor()"


def _character(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)).strip("\\") if match[1] else ""


def _places(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each character begins and ends in `text` that is left without its escapes."""
    done = 0
    for match in _ESCAPE.finditer(text):
        yield from ((place, place + 1) for place in range(done, match.start()))
        if _character(match):
            yield match.span()
        done = match.end()
    yield from ((place, place + 1) for place in range(done, len(text)))


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
