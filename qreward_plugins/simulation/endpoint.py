"""A kind of source for trials with reloads: it opens a name of the configuration at a simulated server.

An engine opens and closes such sources itself, as in production. Several of them may lead to one server, one after the
other: under another name, or with another key. The server counts their requests together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ClassVar

from ..config.source_models import BaseURLs, Batch, EndpointConfig
from ..errors import ConfigurationError, Mistake
from ..sources.base import Reply, Request
from ..sources.kind import TEXT, Provider, SourceKind, address
from .simulated_server import SimulatedServer

KIND = f"{__name__}:SimulatedEndpoint"
"""The `kind` of such a source."""


class SimulatedEndpoint(SourceKind):
    """An endpoint of a simulated server of the trial that is played."""

    answers = (TEXT,)

    class Config(EndpointConfig):
        URL_KEY: ClassVar[str] = "base_url"

        base_url: BaseURLs
        model: str = "simulated"
        server: str
        """The name of the server that answers."""

    def __init__(self, name: str, config: Any) -> None:
        super().__init__(name, config)
        stage = _stage.get()
        if stage is None:
            problem = "there is no simulated server outside a simulation."
            raise ConfigurationError([Mistake(f"sources.{name}.kind", problem)])
        self.closed = False
        self._server = stage.servers[config.server]
        stage.opened.append(self)

    @property
    def batch(self) -> Batch | None:
        return self._server.batch

    async def send_batch(self, requests: Sequence[Request], *, on_sent: Callable[[], None]) -> Sequence[Reply]:
        return await self._server.send_batch(requests, on_sent=on_sent, sender=self.name)

    async def send(self, request: Request, *, on_sent: Callable[[], None]) -> Reply:
        return await self._server.send(request, on_sent=on_sent, sender=self.name)

    async def aclose(self) -> None:
        self.closed = True

    @classmethod
    def provider(cls, config: Any, environment: Mapping[str, str]) -> Provider:
        key = "" if config.api_key is None else config.api_key.get_secret_value()
        return Provider(config.kind, tuple(map(address, config.urls)), config.model, (), key)


class Stage:
    """The servers that endpoints lead to, and all endpoints that were opened."""

    def __init__(self, servers: Mapping[str, SimulatedServer]) -> None:
        self.servers = servers
        self.opened: list[SimulatedEndpoint] = []


@contextmanager
def endpoints_of(servers: Mapping[str, SimulatedServer]) -> Iterator[Stage]:
    """Let endpoints lead to `servers`, by name."""
    stage = Stage(servers)
    token = _stage.set(stage)
    try:
        yield stage
    finally:
        _stage.reset(token)


_stage: ContextVar[Stage | None] = ContextVar("stage", default=None)
