"""What a kind of source is: one class that says how it is configured, what it answers, and what identifies it.

Ours are listed in `registry`. Another package registers its own as an entry point of the group
`qreward_plugins.sources`, and a configuration may name any class: `kind: package.module:Class`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from pydantic import SecretBytes, SecretStr

from ..config.source_models import SourceConfig
from .base import Reply, Request, apart
from .provider import Provider

TEXT = "text"
"""The source reads messages and writes a text: `Request.messages` in, `Reply.text` out."""
VALUE = "value"
"""The source scores a sample: `Request.sample` in, `Reply.value` out."""


class SourceKind(ABC):
    """A source that is opened from a configuration: the base class of every kind.

    A kind defines `answers`, `send`, and usually a nested class `Config` with the keys of its configuration. The first
    line of its docstring describes it in `qreward kinds`. Making an instance opens the source: it gets its name and its
    part of the configuration. It raises `ConfigurationError` for what only the environment shows (an unset key), and
    connects with its first request.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ("answers",)

    Config: ClassVar[type[SourceConfig]] = SourceConfig
    """The model of its configuration. Secrets are `SecretStr`, or stand in a `FreeMapping`."""

    answers: ClassVar[tuple[str, ...]] = ()
    """What it can be asked for: `TEXT`, `VALUE`, or a word of your own that your judges ask for."""

    local: bool = False
    """Whether it works in processes or threads of this machine. If a call hangs, its sample is to blame then, and not
    the source; and `qreward plan` adds no network and no tokens."""

    usual_latency_s: ClassVar[float] = 1.0
    """Seconds that a request usually takes, for `qreward plan` where neither the user nor a journal says."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        answers: Any = cls.answers
        if isinstance(answers, str):
            cls.answers = (answers,)

    def __init__(self, name: str, config: SourceConfig) -> None:
        self._name = name
        self._node = config

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        return self._name

    @property
    def model(self) -> str:
        """What answers, for people and metrics. Default: the key `model`, or the name of the source."""
        return str(getattr(self._node, "model", None) or self._name)

    @property
    def slots(self) -> int | None:
        """How many requests it can work on at once in this process; None (default): as many as its limits allow."""
        return None

    @abstractmethod
    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        """Ask once; see `Source.send`."""

    async def aclose(self) -> None:  # noqa: B027 -- a default
        """Close connections and workers. Idempotent. Default: there are none."""

    def question(self, request: Request) -> object | None:
        """Who is asked and all that is sent, with the nonce cut out (`apart`), for the journal's key; None if the
        answer must not be used again.

        Default: the keys of the configuration that this kind adds, without secrets, and everything in the request.
        """
        messages = [
            [(key, apart(str(text), request.nonce)) for key, text in message.items()] for message in request.messages
        ]
        own = json.dumps(own_settings(self._node, reveal=False), sort_keys=True, default=str)
        sample = None if request.messages else request.sample
        return (class_path(self), self._node.version, own, messages, dict(request.parameters), sample)

    @classmethod
    def reusable(cls, config: Any) -> bool:
        """Whether recorded answers of a source may be used again (`question` is not None), as far as its configuration
        shows.
        """
        return True

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """What the provider counts by: processes whose sources have equal providers share one limit.

        Default: all keys that this kind adds, so that sources are the same only if they are configured alike.
        """
        own = json.dumps(own_settings(config, reveal=True), sort_keys=True, default=str)
        return Provider(config.kind, (own,))


def class_path(source: object) -> str:
    """Identifies the class of a source for the journal. Ours by its name alone: a journal outlives our modules."""
    kind = type(source)
    ours = kind.__module__.startswith(f"{__package__}.")
    return kind.__name__ if ours else f"{kind.__module__}:{kind.__qualname__}"


def own_settings(config: SourceConfig, *, reveal: bool) -> dict[str, Any]:
    """The plain values of the keys that a kind adds to `SourceConfig`; secrets only with `reveal`."""
    own = {name: getattr(config, name) for name in type(config).model_fields if name not in SourceConfig.model_fields}
    plain: dict[str, Any] = _plain(own, reveal)
    return plain


def _plain(value: Any, reveal: bool) -> Any:
    if isinstance(value, (SecretStr, SecretBytes)):
        return str(value.get_secret_value()) if reveal else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item, reveal) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, reveal) for item in value]
    fields = getattr(type(value), "model_fields", None)
    if fields is not None:
        return {name: _plain(getattr(value, name), reveal) for name in fields}
    return value
