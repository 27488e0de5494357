"""Defines `EndpointKind`: what a kind of source over HTTP says of itself, and `Endpoint` does not know.

A new kind inherits from `Endpoint` and overrides these. `body` and `ANSWER` are required; all others have defaults.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from ..config.source_models import EndpointConfig
from ..quotas.demand import completion_bound, of_messages
from .base import Request
from .http_reading import Streaming
from .kind import SourceKind
from .lists import Lists
from .provider import Provider, provider_of
from .replies import Answer


class EndpointKind(SourceKind):
    """The protocol of a kind of source over HTTP: path, headers, body, and how replies are read.

    `Config` has the key `url: URLs`, or the key that its `URL_KEY` names.
    """

    Config: ClassVar[type[EndpointConfig]] = EndpointConfig

    REQUIRED = ("answers", "ANSWER")

    ANSWER: ClassVar[type[Answer]]
    """The class that reads a reply."""
    PATH: ClassVar[str] = ""
    """The path that is appended to each URL."""
    KEY_HEADER: ClassVar[tuple[str, str]] = ("Authorization", "Bearer ")
    """The name of the header that carries the key, and the text before the key in its value."""
    HEADERS: ClassVar[Mapping[str, str]] = {}
    """Further headers of every request. They are not secret, and headers of the configuration override them."""

    usual_latency_s = 0.5

    @abstractmethod
    def body(self, request: Request) -> Mapping[str, Any]:
        """Return the body of a request, without the configured parameters. Raises `InputError` for a value that JSON
        cannot hold.
        """

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        """Return what the provider counts requests by: the URLs, the model, the key and the headers."""
        return provider_of(config, environment, cls.key_header(config))

    @classmethod
    def key_header(cls, config: Any) -> tuple[str, str]:
        """Return the name of the header that carries the key, and the text before the key. Default: `KEY_HEADER`."""
        return cls.KEY_HEADER

    @classmethod
    def plain_headers(cls, config: Any) -> Mapping[str, str]:
        """Return the headers of every request that are not secret. Default: `HEADERS`."""
        return cls.HEADERS

    @property
    def bound_key(self) -> tuple[str, ...]:
        """The path of the key in the body that bounds a completion. Default: `max_tokens`."""
        return ("max_tokens",)

    @property
    def containers(self) -> tuple[str, ...]:
        """The keys of the body that hold several settings, which `parameters` change one by one. Default: none."""
        return ()

    def prompt(self, body: dict[str, Any]) -> tuple[list[str], int, int]:
        """Remove the prompt from a body. Return its texts, the tokens of its images, and those of the chat template and
        of other parts. Default: the chat messages.
        """
        messages = body.pop("messages", None)
        return of_messages(messages) if isinstance(messages, (list, tuple)) else ([], 0, 0)

    def completion_bound(self, body: Mapping[str, Any]) -> int | None:
        """Return the most completion tokens that a body allows; None if it sets no bound."""
        return completion_bound(body)

    @property
    def lists(self) -> Lists | None:
        """How its server takes several calls in one request; None (default): it takes one. A kind that defines it has
        the key `batch: Batch | None = None` in its `Config`.
        """
        return None

    @property
    def reads(self) -> object:
        """The settings that change how replies are read, for the journal's key. Default: None, there are none."""
        return None

    def streaming(self, request: Request) -> Streaming | None:
        """Return how the reply to `request` is streamed. Default: None, it is not."""
        return None
