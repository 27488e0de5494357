"""Marks the secrets of a configuration, and escapes foreign text for one line of a log.

Secrets occur in more places than `api_key`: in a function's `kwargs`, in `parameters`, and in lists and mappings below
them. A value there becomes a `Secret` if its key names a secret, or an interpolation takes it from the environment. A
`Secret` is sent as plain text, but its repr is asterisks. Each source has a `Redactor` with its secrets, which redacts
foreign text before it is shown.
"""

from __future__ import annotations

import os
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
"""A key with one of these words holds no secret, because `key` or `token` means something else: `eos_token`."""
_FOLDERS = frozenset({"PWD", "OLDPWD"})
"""Shells set these to folders. Masking them would mask every path that a message names."""
_LETTERS_ONLY = re.compile(r"[^a-z]")
_GLUED = re.compile(r"(?:api|access|private|secret|auth|client)(?:key|token|secret)|password|passphrase|credential")


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
    """Yield the texts of all secrets in a tree from `with_secrets`."""
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
