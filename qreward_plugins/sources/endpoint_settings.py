"""Reads the settings of an endpoint that depend on the environment: URLs, headers with the key, parameters.

Each function adds what is wrong to `mistakes`, so that one error reports everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from yarl import URL

from ..config.findings import path_text
from ..config.framework import OUTSIDE, is_framework_url
from ..config.source_models import EndpointConfig
from ..errors import InputError, Mistake
from ..samples.json_values import as_json, with_parameters
from ..secrets import without_secrets
from .http import proxy_for
from .passed_requests import can_be_sent

_SET_BY_CLIENT = ("content-length", "transfer-encoding", "content-encoding", "connection", "expect", "host")


def read_urls(where: str, configured: Sequence[str], path: str, mistakes: list[Mistake]) -> dict[str, URL]:
    """Return the URL that requests are posted to, with `path`, for each configured text."""
    urls: dict[str, URL] = {}
    for text in configured:
        if is_framework_url(text):
            mistakes.append(Mistake(where, *OUTSIDE))
            continue
        try:
            url = URL(text + path)
            if not url.host:
                raise ValueError("it has no host")
        except ValueError as error:
            mistakes.append(Mistake(where, f"{text!r} is not a URL: {error}."))
            continue
        try:
            proxy_for(url)
        except ValueError:
            # The value may hold a password, so it is not shown.
            mistakes.append(Mistake(where, f"the environment's proxy for {url.scheme} is not a URL."))
        urls[text] = url
    return urls


def read_headers(
    path: str, config: EndpointConfig, key_header: tuple[str, str], mistakes: list[Mistake]
) -> dict[str, str]:
    """Return the configured headers and the one that carries the key. `key_header` is its name, and the text before
    the key.
    """
    headers: dict[str, str] = {}
    for name, secret in config.headers.items():
        value = secret.get_secret_value().strip()
        where = f"{path}.{path_text(('headers', name))}"
        if not name.isascii() or not name.replace("-", "").replace("_", "").isalnum():
            mistakes.append(Mistake(where, "this is not a valid header name."))
        elif name.lower() in _SET_BY_CLIENT:
            mistakes.append(Mistake(where, "the HTTP client sets this header.", "Leave it out."))
        elif not can_be_sent(value):
            mistakes.append(Mistake(where, "the value holds characters that a header cannot carry."))
        else:
            headers[name] = value
    key, where = _key(path, config, mistakes)
    carrier, before = key_header
    if key and has_header(headers, carrier):
        article = "an" if carrier[0] in "AEIOUaeiou" else "a"
        mistakes.append(Mistake(where, f"headers has {article} {carrier}, too.", "Keep one of the two."))
    elif key and not can_be_sent(key):
        mistakes.append(Mistake(where, "the key holds characters that a header cannot carry."))
    elif key:
        headers[carrier] = f"{before}{key}"
    return headers


def has_header(headers: Mapping[str, str], header: str) -> bool:
    """Whether `headers` have one of this name, in any case of letters."""
    return any(name.lower() == header.lower() for name in headers)


def read_parameters(path: str, config: EndpointConfig, mistakes: list[Mistake]) -> dict[str, Any]:
    """Return the configured parameters in JSON's types, with secrets revealed."""
    try:
        plain: dict[str, Any] = as_json(without_secrets(config.parameters), "")
    except InputError as error:
        place, _, problem = str(error).partition(": ")
        mistakes.append(Mistake(f"{path}{place}", f"{problem}."))
        return {}
    return plain


def _key(path: str, config: EndpointConfig, mistakes: list[Mistake]) -> tuple[str, str]:
    if config.api_key is not None:
        return config.api_key.get_secret_value().strip(), f"{path}.api_key"
    where = f"{path}.api_key_env"
    if isinstance(config.api_key_env, tuple):
        mistakes.append(Mistake(where, "a source that is opened alone has one key.", "Use load_config, or one key."))
        return "", where
    if config.api_key_env is None:
        return "", where
    key = os.environ.get(config.api_key_env, "").strip()
    if not key:
        problem = f"the environment variable {config.api_key_env!r} is not set or empty."
        mistakes.append(Mistake(where, problem, "Set it for every process that scores, Ray workers included."))
    return key, where


def bound_mistakes(
    path: str,
    config: EndpointConfig,
    bound_key: Sequence[str],
    containers: Sequence[str],
    completion_bound: Callable[[Mapping[str, Any]], int | None],
) -> list[Mistake]:
    """Return the mistake of parameters that remove the bound on a completion although `tokens_per_minute` is set.

    `bound_key` is the path of the key in the body that bounds a completion. `containers` are the keys of the body that
    hold several settings.
    """
    bound: Any = 1
    for key in reversed(bound_key):
        bound = {key: bound}
    body = with_parameters(bound, config.parameters, containers)
    if config.limits.tokens_per_minute is None or completion_bound(body) is not None:
        return []
    return [
        Mistake(
            ".".join((path, *bound_key)),
            "it removes the bound on a reply, and without a bound tokens_per_minute cannot be kept.",
            "Set a number of tokens from 1 on, or leave it out: then the judge's max_tokens applies.",
        )
    ]
