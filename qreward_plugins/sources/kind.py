"""Defines `SourceKind`, the base class of every kind of source, with its identity, and opens a source of a kind.

`registry` lists the kinds of this package. Another package registers a kind as an entry point of the group
`qreward_plugins.sources`. A configuration may also name any class: `kind: package.module:Class`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

from pydantic import SecretBytes, SecretStr

from ..config.names import with_written_path
from ..config.registry import kind_or_mistake, sources
from ..config.source_models import SourceConfig
from ..errors import ConfigurationError, Mistake
from ..secrets import described_error
from .base import Request, Source, sent_of

_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, repr=False)
class Provider:
    """The identity of one source at its provider. It may hold a key, so it has no repr."""

    kind: str
    addresses: tuple[str, ...]
    """The URLs in canonical form (`address`)."""
    model: str = ""
    settings: tuple[str, ...] = ()
    """Further settings that may distinguish two accounts, such as headers; without the header of the key."""
    credentials: str | None = ""
    """The key as it is sent; "" if none is sent, None if it is unknown in this process."""

    @property
    def parts(self) -> tuple[str, ...]:
        """All fields as texts, for hashing."""
        return (self.kind, joined(self.addresses), self.model, self.credentials or "", joined(self.settings))


def http_provider(config: Any, environment: Mapping[str, str], key_header: tuple[str, str]) -> Provider:
    """Return the `Provider` of an HTTP source.

    `key_header` is the name of the header that carries the key, and the text before the key in its value.
    """
    headers = {name.lower(): value.get_secret_value().strip() for name, value in sorted(config.headers.items())}
    key = key_of(config, environment)
    carrier, before = key_header
    credentials: str | None = headers.pop(carrier.lower(), "")
    if config.httpx is not None and config.httpx.auth is not None:
        key, before = config.httpx.auth, "auth "
    if key != "":
        credentials = None if key is None else f"{before}{key}"
    return Provider(
        config.kind,
        tuple(sorted(set(map(address, config.urls)))),
        getattr(config, "model", None) or "",
        tuple(f"{name}: {value}" for name, value in sorted(headers.items())),
        credentials,
    )


def key_of(config: Any, environment: Mapping[str, str]) -> str | None:
    """Return the key of an HTTP source; "" if it has none, and None if its variable is not set or empty."""
    if config.api_key is not None:
        return str(config.api_key.get_secret_value().strip())
    if isinstance(config.api_key_env, str):
        return environment.get(config.api_key_env, "").strip() or None
    return ""


def address(url: str) -> str:
    """Return a URL in canonical form: lower-case host, explicit port, no trailing slash, no percent-encoding."""
    try:
        parts = urlsplit(url.strip())
        port = parts.port or _DEFAULT_PORTS.get(parts.scheme)
    except ValueError:  # opening the source reports the invalid URL
        return url
    host = (parts.hostname or "").removesuffix(".")
    with suppress(ValueError):
        host = ip_address(host).compressed
    return f"{parts.scheme}://[{host}]:{port}{unquote(parts.path).rstrip('/')}"


def joined(parts: tuple[str, ...]) -> str:
    """Join parts to one text. Each has its length before it, so that different parts never give the same text."""
    return "".join(f"{len(part)}:{part}" for part in parts)


TEXT = "text"
"""The source reads messages and writes a text: `Request.messages` in, `Reply.text` out."""
LOGITS = "logits"
"""The source reads a conversation and answers with numbers: `Request.messages` in, whose last turn is the response;
in `Reply.value` a mapping of labels to logits out."""
VECTORS = "vectors"
"""The source turns texts into vectors: the contents of `Request.messages` in, as many vectors in `Reply.value` out."""
VALUE = "value"
"""The source scores a sample: `Request.sample` in, `Reply.value` out."""
RUN = "run"
"""The source runs a program: `Request.parameters` in; what it printed in `Reply.text`, the end of its error output in
`Reply.value`, and how it ended in `Reply.finish_reason`: `finished`, `run_error`, `timeout` or `compile_error`."""


class SourceKind(Source):
    """The base class of every kind of source.

    A kind defines `answers`, `send`, and usually a nested class `Config` with the keys of its configuration. `qreward
    kinds` shows the first sentence of its docstring. The constructor takes the name of the source and its part of the
    configuration. It raises `ConfigurationError` for mistakes that depend on the environment (an unset key). The first
    request connects.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("answers",)

    Config: ClassVar[type[SourceConfig]] = SourceConfig
    """The model of its configuration. A secret is a `SecretStr`, or a value in a `FreeMapping`."""

    answers: ClassVar[tuple[str, ...]] = ()
    """The types of answer that it gives: `TEXT`, `LOGITS`, `VALUE`, or a word of your own that your judges ask for."""

    usual_latency_s: ClassVar[float] = 1.0
    """Usual seconds of a request. `qreward plan` uses it if neither the user nor a journal gives the latency."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        answers: Any = cls.answers
        if isinstance(answers, str):
            cls.answers = (answers,)

    def __init__(self, name: str, config: SourceConfig) -> None:
        self._name = self.name = name
        self._node = config
        self.model = str(getattr(config, "model", None) or name)
        self.batch = getattr(config, "batch", None)

    def question(self, request: Request) -> object | None:
        """See `Source.question`. Default: the keys of the configuration that this kind adds, without secrets, and
        everything in the request.
        """
        own = json.dumps(own_settings(self._node, reveal=False), sort_keys=True)
        return (class_path(self), self._node.version, own, *sent_of(request))

    @classmethod
    def answered(cls, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the types of answer that a source with these settings gives. The settings may be wrong, and are never
        complete. Default: `answers`.
        """
        return cls.answers

    @classmethod
    def reusable(cls, config: Any) -> bool:
        """Whether a source with this configuration has answers that may be used again (`question` is not None)."""
        return True

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what the provider counts requests by. Sources with equal providers share one limit, in all processes.

        Default: all keys that this kind adds, so that only sources with equal configurations share a limit.
        """
        own = json.dumps(own_settings(config, reveal=True), sort_keys=True)
        return Provider(config.kind, (own,))


def class_path(source: object) -> str:
    """Return a text that identifies the class of a source, for the journal's key.

    For a class of this package it is the bare name, so that recorded answers survive a move between modules.
    """
    kind = type(source)
    ours = kind.__module__.startswith(f"{__package__}.")
    return kind.__name__ if ours else f"{kind.__module__}:{kind.__qualname__}"


def own_settings(config: SourceConfig, *, reveal: bool) -> dict[str, Any]:
    """Return the keys that a kind adds to `SourceConfig`, as JSON values; without `reveal`, a secret is None."""

    def written(value: Any) -> str | None:
        if isinstance(value, (SecretStr, SecretBytes)):
            return str(value.get_secret_value()) if reveal else None
        return str(value)

    own = config.model_dump(exclude=set(SourceConfig.model_fields), warnings=False)
    plain: dict[str, Any] = json.loads(json.dumps(own, default=written))
    return plain


def kind_of(config: SourceConfig) -> type[SourceKind]:
    """Return the kind of source that `config` is for. Raises ConfigurationError if it cannot be loaded."""
    return kind_or_mistake(sources, config.kind)


def open_source(name: str, config: SourceConfig) -> Source:
    """Make the source `name` of the configuration. Its first request connects, or starts workers.

    Raises ConfigurationError for mistakes that depend on the environment: an unset key, a function that cannot be
    loaded, a kind of another package whose constructor raises.
    """
    kind = kind_of(config)
    try:
        source = kind(name, config)
        if source.name == name:
            return source
        problem = f"its name is {source.name!r}; its `__init__` must call `super().__init__(name, config)`"
    except ConfigurationError as error:
        raise ConfigurationError(
            [with_written_path(mistake, name) for mistake in error.mistakes], origin=error.origin
        ) from None
    except Exception as error:
        problem = described_error(error)
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    raise ConfigurationError([Mistake(f"sources.{name}", f"{_origin(config)} cannot open the source: {problem}.")])


def provider_of(name: str, config: SourceConfig, environment: Mapping[str, str]) -> Provider:
    """Return what the provider of the source `name` counts requests by.

    Raises ConfigurationError if `SourceKind.provider` raises.
    """
    kind = kind_of(config)
    try:
        return kind.provider(config, environment)
    except Exception as error:
        problem = described_error(error)
    raise ConfigurationError(
        [Mistake(f"sources.{name}", f"{_origin(config)} cannot identify its provider: {problem}.")]
    )


def _origin(config: SourceConfig) -> str:
    return sources.registrations(config.kind)[0].origin
