"""Connects the parts of an engine that outlive an event loop: sources, judges, journal, observers and the keeper."""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Collection, Iterable, Mapping

from .config import Config
from .config.several_keys import without_keys
from .errors import ConfigurationError, Mistake
from .journal import Journal
from .judges import JudgeRouter, Leaf
from .observers import BatchLog, FailureLog, Observer, Observers, Statistics, load_observers, with_names
from .remote import RemoteServer, open_server
from .scheduling import Upstream, open_upstreams
from .sharing import Channel, Membership, OpenedChannel, open_channel, source_keys
from .source_starts import SourceStarts
from .sources import Source
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
            channel = self.opened_channel = open_channel(settings)
        processes = 1 if settings.shared == "off" else processes
        self.upstreams = open_upstreams(self.config, sources, processes=processes, shared=channel is not None)
        keys = source_keys(self.config)
        self.membership = (
            Membership({keys[name]: upstream for name, upstream in self.upstreams.items()}, channel)
            if channel
            else None
        )
        self.rng = random.Random(settings.seed)
        key = secrets.token_bytes(32) if settings.seed is None else hashlib.sha256(str(settings.seed).encode()).digest()
        self.router = JudgeRouter(self.config, key=key)
        _check_fit(self.router.leaves, self.upstreams, given=sources)
        self.source_starts = SourceStarts([upstream.source for upstream in self.upstreams.values()])
        self.start_probe = StartProbe(self.router.leaves.values(), given=sources)
        self.journal = Journal(settings.journal.path) if settings.journal else None
        self.reuse = bool(settings.journal and settings.journal.reuse)
        """Whether recorded answers of the journal are used instead of asking again."""


def _check_fit(judges: Mapping[str, Leaf], upstreams: Mapping[str, Upstream], *, given: Collection[str]) -> None:
    """Raise `ConfigurationError` for judges that do not suit their sources. Sources that the caller has `given` may
    stand in for others, as in a rehearsal.
    """
    mistakes: list[Mistake] = []
    for judge in judges.values():
        mistakes += judge.mistakes({name: upstreams[name].source for name in judge.sources if name not in given})
    if mistakes:
        raise ConfigurationError(mistakes)
