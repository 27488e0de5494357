"""Writes the plain values of a configuration file as a text that may be sent to other processes.

Interpolations stay as they are written, so that each process resolves them with its own variables. Comments are left
out, because they may hold anything. A file that holds a secret itself is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson
from pydantic import BaseModel, SecretStr

from ..secrets import names_secret, secrets_in
from .findings import Path
from .models import Config

_FROM_ELSEWHERE = re.compile(r"\$\{oc\.env:\s*[A-Za-z_][A-Za-z0-9_]*\s*\}")
_SCHEME = re.compile(r"\s*(?:Bearer|Basic|Token)?\s*")
_DEFAULT = re.compile(r"oc\.env:\s*([A-Za-z_][A-Za-z0-9_]*)\s*,")
_LEAST_CHARS = 8
"""Shorter secrets, such as the key `EMPTY` of a local server, may be part of other words."""
_FREE = frozenset({"body", "kwargs", "parameters"})
_SECRET_KEYS = frozenset({"api_key", "api_keys", "headers", "environment", "proxy", "cert_password"})
_OWN_KEYS = 3
"""Depth in the tree from which the keys are not those of a model: `sources.NAME.parameters.KEY`."""


class NotSendable(Exception):
    """The configuration must not be sent; the message says why and shows no value that may be one."""


def as_text(tree: Any) -> str | None:
    """Return the plain values of a file as JSON; None if JSON cannot hold them."""
    try:
        data = orjson.dumps(tree)
        return data.decode() if orjson.loads(data) == tree else None
    except (TypeError, ValueError, RecursionError):
        return None


def check_sendable(tree: Any, config: Config) -> None:
    """Check that the plain values of a file hold no secret. `config` was made of them.

    Raises `NotSendable` for a value other than `${oc.env:NAME}` where a secret belongs, and for a secret of `config`
    anywhere.
    """
    if isinstance(tree, dict) and list(tree) == ["qreward"]:
        tree = tree["qreward"]
    for path, value in _values(tree):
        is_free = path[0] == "sources" or not _FREE.isdisjoint(path)
        own = [key for key in path[_OWN_KEYS:] if isinstance(key, str) and is_free]
        keys = [str(key) for key in path[2:]]
        of_model = not _SECRET_KEYS.isdisjoint(keys) or keys[-1:] == ["token"]
        hidden = of_model or (any(map(names_secret, own)) and _may_be_secret(value))
        literal = hidden and not _SCHEME.fullmatch(_FROM_ELSEWHERE.sub("", str(value)))
        if literal or any(map(names_secret, _DEFAULT.findall(str(value)))):
            place = ".".join(map(str, path[:_OWN_KEYS]))
            raise NotSendable(f"{place} may hold a secret that is written in the file. Write ${{oc.env:NAME}} instead.")
    written = [str(item) for path, value in _values(tree) for item in (value, *path)]
    for secret in set(_secrets(config)):
        if len(secret) >= _LEAST_CHARS and any(secret in text for text in written):
            raise NotSendable("the value of a secret is written in the file. Write ${oc.env:NAME} instead.")


def _values(node: Any, path: Path = ()) -> Iterator[tuple[Path, str | int | float]]:
    """Yield each text and number with its path."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _values(value, (*path, str(key)))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from _values(value, (*path, number))
    elif isinstance(node, (str, int, float)) and not isinstance(node, bool):
        yield path, node


def _may_be_secret(value: str | float) -> bool:
    # A short number is more likely a setting (`auth_timeout: 30`), as in `with_secrets`.
    return isinstance(value, str) or (isinstance(value, int) and abs(value) >= 10**5)


def _secrets(value: Any) -> Iterator[str]:
    """Yield the secrets of a configuration."""
    if isinstance(value, SecretStr):
        yield value.get_secret_value()
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secrets(getattr(value, name))
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _secrets(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secrets(item)
    else:
        yield from secrets_in(value)
