"""What must not be shown: which values of a configuration are secrets, and text that is fit for a line of a log.

Keys of providers stand in more places than `api_key`: in a function's `kwargs`, in `parameters`, in lists and mappings
below them. Whatever stands there under the name of a secret, or comes out of the environment, is a `Secret`: a text
like any other for those who send it, and asterisks for everything that prints the tree around it. Each source makes an
`Excerpts` of its secrets, through which every foreign text leaves.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

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
"""Beside one of these, `key` and `token` mean what they mean to a model: `eos_token`, `score_key`."""
_LETTERS_ONLY = re.compile(r"[^a-z]")
_GLUED = re.compile(r"(?:api|access|private|secret|auth|client)(?:key|token|secret)|password|passphrase|credential")


class Secret(str):
    """A text that is shown as asterisks by everything that prints a structure around it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(MASK)


class SecretNumber(int):
    """The same for a number: a PIN, or a password of digits that YAML takes for an integer."""

    def __repr__(self) -> str:
        return MASK


def names_secret(name: str) -> bool:
    """Whether a key of this name is likely to hold a secret: `api_key`, `hfToken`, `X-Auth`, `db_password`."""
    words = [word.lower() for word in _WORD.findall(name)]
    if _GLUED.search(_LETTERS_ONLY.sub("", name.lower())):
        return True
    return not _SECRET_WORDS.isdisjoint(words) and _PLAIN_WORDS.isdisjoint(words)


def with_secrets(value: Any, *, secret: bool = False) -> Any:
    """A copy of a tree of plain values in which secrets are `Secret`s: all texts and integers below the name of one,
    with `secret` all of the tree, and those that are one already.
    """
    if isinstance(value, Mapping):
        return {
            key: with_secrets(item, secret=secret or (isinstance(key, str) and names_secret(key)))
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [with_secrets(item, secret=secret) for item in value]
    if not secret or not value or isinstance(value, (bool, Secret, SecretNumber)):
        return value
    if type(value) is str:
        return Secret(value)
    # Settings are numbers, too (`auth_timeout: 30`); a password of digits is longer.
    return SecretNumber(value) if type(value) is int and abs(value) >= 10**5 else value


def without_secrets(value: Any) -> Any:
    """A copy of such a tree with plain texts and numbers, for those who are called with it."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_secrets(item) for item in value]
    if isinstance(value, Secret):
        return str.__str__(value)
    return int(value) if isinstance(value, SecretNumber) else value


def secrets_in(value: Any) -> Iterator[str]:
    """The texts of all secrets in a tree that `with_secrets` made."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from secrets_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from secrets_in(item)
    elif isinstance(value, Secret):
        yield str.__str__(value)
    elif isinstance(value, SecretNumber):
        yield f"{int(value)}"


def one_line(text: str, limit: int) -> str:
    """At most `limit` characters of a text, with everything escaped that does not print: line breaks, colours of
    terminals, marks that change the direction of writing.
    """
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"
