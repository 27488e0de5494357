"""Applies another configuration to an engine that runs: on demand, and when its file changes.

Everything that can fail is done first: the new sources, judges and limits are made and checked beside those that run.
What follows cannot fail, and happens in one step of the event loop. So a reload changes everything or nothing.

Each process looks at its file once a second, which works for files that editors replace, for links that Kubernetes
swaps, and on network file systems. A file that is missing, or still being written, is no news until it is there and
stays the same for `SETTLED_S`.

What was spent of a limit stays spent, because the provider goes on counting. So a quota goes on for the same account
under any name, and for the same name at the same address. A source that was removed is remembered for as long as what
it spent counts.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from ..config import Config, load_config
from ..config.load import Origin, origin_of, with_origin
from ..config.names import without_keys
from ..errors import ConfigurationError, EngineError, Mistake
from ..judges.leaf import Leaf
from ..judges.router import JudgeRouter
from ..scheduling.upstream import Upstream
from ..secrets import one_line
from ..sharing.membership import channel_of, source_keys
from ..system.threads import cancel_all, in_thread
from .difference import Difference, difference, opened_anew, starts_servers

if TYPE_CHECKING:
    from .lifetime import Lifetime

_log = logging.getLogger("qreward_plugins.engine")

END_WITHIN_S = 2.0
LOOK_EVERY_S = 1.0
"""Seconds between two looks at the file."""
SETTLED_S = 0.2
"""Seconds for which the file has to stay the same."""
REMEMBERED_WINDOWS = 2.0
"""Windows for which a removed source is remembered, in addition to its time limit."""
_LINE_CHARS = 1_000


@dataclass
class _Prepared:
    """A reload that was checked and only has to be applied."""

    config: Config
    difference: Difference
    upstreams: dict[str, Upstream]
    router: JudgeRouter
    unused: list[Upstream]
    """Sources that were opened for the check only."""


@dataclass(frozen=True, eq=False)
class _Predecessor:
    """A source that was removed, or that another one replaces. `forgotten_at` is a time of the event loop's clock."""

    upstream: Upstream
    account: str
    urls: object
    forgotten_at: float

    def suits(self, name: str, account: str, urls: object) -> int:
        """Return how well a new source continues this one: 0 not at all. A key that was rotated counts at the same
        provider, so a source with the same name and URLs goes on with what was spent.
        """
        return 2 * (self.account == account) + ((self.upstream.name, self.urls) == (name, urls))


class Reloader:
    """Reloads the configuration of one engine: on demand, and when its file changes. `on_applied` is called in the step
    of the event loop in which the sources have changed.
    """

    def __init__(self, lifetime: Lifetime, *, on_applied: Callable[[], None]) -> None:
        self._lifetime = lifetime
        self._on_applied = on_applied
        self._watching: asyncio.Task[None] | None = None
        self._predecessors: list[_Predecessor] = []
        """Removed sources that have no successor yet."""
        lifetime.on_started = self.watch
        lifetime.closed_first["the watch of the configuration"] = self._stop
        if lifetime.config.engine.reload:
            self._check_file(lifetime.config)

    @property
    def origin(self) -> Origin | None:
        """The file of the configuration; None if the engine was not made from one."""
        return origin_of(self._lifetime.config)

    def reload(self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None) -> Difference:
        """Apply `config`, or what the file holds now. See `RewardEngine.reload`."""
        prepared = self._prepare(self._read(config))
        self._apply(prepared)
        return prepared.difference

    # Checking

    def _read(self, config: Any) -> Config:
        origin = self.origin
        if config is not None:
            return with_origin(load_config(config), origin)
        if origin is None:
            problem = "the engine was not made from a file."
            raise ConfigurationError([Mistake("", problem, "Give reload() the new configuration.")])
        return origin.read()

    def _prepare(self, config: Config) -> _Prepared:
        """Check `config` as a whole. Nothing is changed. Raises `ConfigurationError`."""
        lifetime = self._lifetime
        if lifetime.server is not None:
            problem = "the server does the scoring, so there is nothing to reload here."
            raise ConfigurationError([Mistake("engine.server", problem, "Reload the configuration of the server.")])
        before, after = lifetime.config, without_keys(config, lifetime.given)
        found = difference(before, after)
        mistakes = [
            Mistake(change.path, "this change needs a restart.", "Undo it, or restart the run.")
            for change in found.refused
        ]
        if mistakes:
            raise ConfigurationError(mistakes, origin=_origin_name(config))
        if after.engine.reload:
            self._check_file(after)
        if lifetime.membership is None and channel_of(after, processes=lifetime.processes, starts=False):
            problem = "the first limit of all sources needs a restart: with it, processes begin to share limits."
            mistake = Mistake("sources", problem, "Restart the run.")
            raise ConfigurationError([mistake], origin=_origin_name(config))
        changed = {
            name: node
            for name, node in after.sources.items()
            if before.sources.get(name) != node and not (name in before.sources and starts_servers(node))
        }
        fresh = lifetime.opened(after.model_copy(update={"sources": changed})) if changed else {}
        upstreams: dict[str, Upstream] = {}
        unused: list[Upstream] = []
        for name, node in after.sources.items():
            known = before.sources.get(name)
            if known is None or (name not in lifetime.given and opened_anew(known, node)):
                upstreams[name] = fresh[name]
            else:
                upstreams[name] = lifetime.upstreams[name]
                if name in fresh and name not in lifetime.given:
                    unused.append(fresh[name])
        router = lifetime.routed(after, upstreams)
        return _Prepared(after, found, upstreams, router, unused)

    def _check_file(self, config: Config) -> None:
        """Raise `ConfigurationError` if the file cannot be watched, or if a server does the scoring."""
        if self._lifetime.server is not None:
            problem = "`engine.server` does the scoring, with a configuration of its own."
            raise ConfigurationError([Mistake("engine.reload", problem, "Set it there, and leave it out here.")])
        if origin_of(config) is None:
            problem = "the configuration has no file that could be watched."
            remedy = "Load it from a YAML file, or call engine.reload() yourself."
            raise ConfigurationError([Mistake("engine.reload", problem, remedy)])

    # Applying

    def _apply(self, prepared: _Prepared) -> None:
        """Change everything in this step of the event loop."""
        loop = asyncio.get_running_loop()
        lifetime, scoring = self._lifetime, self._lifetime.bound_to(loop)
        before, now = lifetime.config, loop.time()
        leaving = {name: each for name, each in lifetime.upstreams.items() if prepared.upstreams.get(name) is not each}
        entering = {name: each for name, each in prepared.upstreams.items() if lifetime.upstreams.get(name) is not each}
        self._remember(before, leaving.values(), now)
        self._continue(prepared.config, entering)
        for name, upstream in prepared.upstreams.items():
            node = prepared.config.sources[name]
            upstream.retune(timeout_s=node.timeouts.total_s, price=node.price, weight=node.weight)
            if name in entering or node.limits != before.sources[name].limits:
                # This cannot fail: the same was done with a new quota.
                upstream.quota.retune(node.limits, now)
        moves = _moves(lifetime.router, prepared.router, prepared.upstreams)
        lifetime.config, lifetime.router = prepared.config, prepared.router
        engine = prepared.config.engine
        lifetime.reuse = bool(engine.journal and engine.journal.reuse)
        if scoring is None:
            lifetime.upstreams.change(prepared.upstreams, moves)
        else:
            sources = {name: upstream.source for name, upstream in prepared.upstreams.items()}
            scoring.change(prepared.router, sources=sources, reuse=lifetime.reuse)
            scoring.dispatcher.change(
                prepared.upstreams, moves, max_attempts=engine.max_attempts, settings=engine.scheduling
            )
        lifetime.source_starts.change(upstream.source for upstream in prepared.upstreams.values())
        if lifetime.membership is not None:
            lifetime.membership.change(lifetime.by_key())
        if scoring is None:
            lifetime.upstreams.let_drained_go()
        for upstream in prepared.unused:
            lifetime.close_later(upstream)
        self._on_applied()
        self.watch()

    def _remember(self, config: Config, leaving: Iterable[Upstream], now: float) -> None:
        """Remember the sources that leave, and forget those whose spending counts no more."""
        self._predecessors = [each for each in self._predecessors if each.upstream.live or now < each.forgotten_at]
        accounts = source_keys(config)
        for each in leaving:
            name, (_, window_s) = each.name, each.quota.per_window()
            remembered_s = REMEMBERED_WINDOWS * max(window_s, config.sources[name].limits.window_s) + each.timeout_s
            self._predecessors.append(_Predecessor(each, accounts[name], _urls(config, name), now + remembered_s))

    def _continue(self, config: Config, entering: Mapping[str, Upstream]) -> None:
        """Let each new source go on with the quota of the predecessor that suits it best, the latest of several."""
        if not self._predecessors or not entering:
            return
        accounts = source_keys(config)
        pairs = [
            (old.suits(name, accounts[name], _urls(config, name)), number, name)
            for number, old in enumerate(self._predecessors)
            for name in entering
        ]
        left, wanted = dict(enumerate(self._predecessors)), dict(entering)
        for fit, number, name in sorted(pairs, reverse=True):
            if fit and number in left and name in wanted:
                old = left.pop(number)
                wanted.pop(name).take_over(old.upstream, same_account=old.account == accounts[name])
        self._predecessors = [*left.values()]

    # Watching

    def watch(self) -> None:
        """Watch the file in the running event loop, if the configuration says so; otherwise stop."""
        watching, loop = self._watching, asyncio.get_running_loop()
        wanted = self._lifetime.config.engine.reload
        running = watching is not None and not watching.done() and watching.get_loop() is loop
        if wanted and not running:
            origin = self.origin
            assert origin is not None
            self._watching = loop.create_task(self._follow(origin.file))
        elif running and not wanted and watching is not None:
            # A reload that the watch itself has begun ends first.
            loop.call_soon(watching.cancel)

    async def _follow(self, file: str) -> None:
        """Reload whenever the file holds something else, at first once in any case: it may have changed meanwhile."""
        known = b""
        while True:
            content = await in_thread(partial(_content, file))
            if content and content != known:
                await anyio.sleep(SETTLED_S)
                if content != await in_thread(partial(_content, file)):
                    continue
                known = content
                self._reload_file()
            await anyio.sleep(LOOK_EVERY_S)

    def _reload_file(self) -> None:
        """Apply what the file holds now. The log gets one line if something has changed, or a mistake prevented it."""
        file = _origin_name(self._lifetime.config)
        try:
            found = self.reload()
        except ConfigurationError as error:
            problem = " ".join(str(mistake) for mistake in error.mistakes)
        except EngineError as error:
            problem = str(error)
        except Exception as error:
            # Its message may hold a secret.
            problem = f"unexpected {type(error).__name__}"
        else:
            if found:
                # A warning, because Python shows none below: whoever runs a training must see that its judges changed.
                _log.warning("%s was reloaded: %s", file, one_line(str(found), _LINE_CHARS))
            return
        _log.error("%s was not reloaded, and nothing has changed: %s", file, one_line(problem, _LINE_CHARS))

    async def _stop(self) -> None:
        if self._watching is not None and self._watching.get_loop() is asyncio.get_running_loop():
            await cancel_all([self._watching], within_s=END_WITHIN_S)


def _urls(config: Config, name: str) -> object:
    return getattr(config.sources[name], "urls", None)


def _content(file: str) -> bytes:
    """Return what a file holds; nothing if it is not there. A pipe, which would never end, is not read."""
    try:
        return Path(file).read_bytes() if os.path.isfile(file) else b""
    except OSError:
        return b""


def _moves(
    before: JudgeRouter, after: JudgeRouter, upstreams: Mapping[str, Upstream]
) -> dict[tuple[str, tuple[str, ...]], tuple[str, ...]]:
    """Return where the calls of the judges so far may go: where those of the judge of the same name go now, if the
    judge so far suits these sources.
    """
    moves = {}
    for name, judge in before.leaves.items():
        now = after.judges.get(name)
        if isinstance(now, Leaf) and now.asks == judge.asks and now.sources != judge.sources:
            fitting = tuple(each for each in now.sources if _suits(judge, upstreams[each]))
            if fitting:
                moves[name, judge.sources] = fitting
    return moves


def _suits(judge: Leaf, upstream: Upstream) -> bool:
    try:
        return not judge.mistakes({upstream.name: upstream.source})
    except Exception:
        # A judge of another package may raise anything.
        return False


def _origin_name(config: Config) -> str:
    origin = origin_of(config)
    return "configuration" if origin is None else origin.file
