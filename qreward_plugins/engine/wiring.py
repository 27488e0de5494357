"""Connects the parts of an engine that outlive an event loop: sources, judges, journal, observers and the keeper."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..config import Config, configured_name
from ..config.several_keys import without_keys
from ..errors import ConfigurationError, EngineError, Mistake
from ..journal import Journal
from ..judges import JudgeRouter, Leaf
from ..observers import BatchLog, FailureLog, Observer, Observers, Statistics, load_observers, with_names
from ..scheduling import Upstream, Upstreams, open_upstreams
from ..sharing.channels import OpenedChannel, channel_of, source_keys
from ..sharing.membership import Channel, Membership
from ..sources import Source
from .remote import RemoteServer, open_server
from .source_starts import SourceStarts, has_servers
from .start_probe import StartProbe


class Wiring:
    """The parts of one engine. Nothing in it belongs to an event loop, except what `LoopBinding` starts.

    The arguments are those of `RewardEngine`. Raises `ConfigurationError` with all mistakes.
    """

    def __init__(
        self,
        config: Config,
        *,
        processes: int,
        sources: Mapping[str, Source],
        channel: Channel | None,
        observers: Iterable[Observer],
        statistics: Statistics,
    ) -> None:
        self.given = sources
        """The sources that the caller has opened."""
        self.config = without_keys(config, sources)
        given = with_names(observers)
        self.observers = Observers(
            (statistics, FailureLog(), BatchLog()), [*load_observers(self.config.observers), *given]
        )
        settings = self.config.engine
        self.server: RemoteServer | None = None if settings.server is None else open_server(settings.server)
        """The reward server that scores instead of this process; None: this process scores."""
        self.opened_channel: OpenedChannel | None = None
        """The connection to the keeper, if the engine has opened it itself."""
        if self.server is None and channel is None:
            channel = self.opened_channel = channel_of(config, processes=processes)
        self.processes = 1 if settings.shared == "off" else processes
        self._shared = channel is not None
        self.upstreams = Upstreams(self.opened(self.config))
        # Also without a channel: a kind that cannot name its provider is a mistake before the first reload needs it.
        keys = source_keys(self.config)
        by_key = {keys[name]: upstream for name, upstream in self.upstreams.items()} if channel else {}
        self.membership = Membership(by_key, channel) if channel else None
        self.rng = random.Random(settings.seed)
        self._key = (
            secrets.token_bytes(32) if settings.seed is None else hashlib.sha256(str(settings.seed).encode()).digest()
        )
        self.router = self.routed(self.config, self.upstreams)
        self.source_starts = SourceStarts([upstream.source for upstream in self.upstreams.values()])
        self.start_probe = StartProbe(self.router.leaves.values(), given=sources)
        self.journal = Journal(settings.journal.path) if settings.journal else None
        self.reuse = bool(settings.journal and settings.journal.reuse)
        """Whether recorded answers of the journal are used instead of asking again."""

    def opened(self, config: Config) -> dict[str, Upstream]:
        """Return new upstreams for the sources of `config`. Raises `ConfigurationError`."""
        return open_upstreams(config, self.given, processes=self.processes, shared=self._shared)

    def routed(self, config: Config, upstreams: Mapping[str, Upstream]) -> JudgeRouter:
        """Return new judges for `config`. Raises `ConfigurationError`, also if they do not suit their sources."""
        router = JudgeRouter(config, key=self._key)
        _check_fit(router.leaves, upstreams, given=self.given)
        return router

    def upstreams_of(self, source: str) -> list[Upstream]:
        """Return the upstreams of a source of the configuration, one for each of its keys, or the one named `NAME#1`.
        Raises `EngineError`.
        """
        meant = [each for name, each in self.upstreams.items() if source in (name, configured_name(name))]
        if not meant:
            raise EngineError(f"unknown source {source!r}; sources: {', '.join(self.upstreams)}")
        return meant

    def server_source(self, name: str) -> Any:
        """Return a source that has servers of its own. Raises `EngineError`."""
        sources = {each: upstream.source for each, upstream in self.upstreams.items()}
        found = {each: source for each, source in sources.items() if has_servers(source)}
        if not isinstance(name, str) or name not in found:
            raise EngineError(f"{name!r} is no source of kind replicas; such sources: {', '.join(found) or 'none'}")
        return found[name]

    def by_key(self) -> dict[str, Upstream]:
        """Return the upstreams by the keys under which processes share them."""
        keys = source_keys(self.config)
        return {keys[name]: upstream for name, upstream in self.upstreams.items()}


def _check_fit(judges: Mapping[str, Leaf], upstreams: Mapping[str, Upstream], *, given: Collection[str]) -> None:
    """Raise `ConfigurationError` for judges that do not suit their sources. Sources that the caller has `given` may
    stand in for others, as in a rehearsal.
    """
    mistakes: list[Mistake] = []
    for judge in judges.values():
        mistakes += judge.mistakes({name: upstreams[name].source for name in judge.sources if name not in given})
    if mistakes:
        raise ConfigurationError(mistakes)
