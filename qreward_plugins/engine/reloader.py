"""Applies another configuration to an engine that runs.

Everything that can fail is done first: the new sources, judges and limits are made and checked beside those that run.
What follows cannot fail, and happens in one step of the event loop. So a reload changes everything or nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import anyio
import orjson

from ..config import Config, load_config
from ..config.origin import Origin, origin_of, with_origin
from ..config.several_keys import without_keys
from ..errors import ConfigurationError, EngineError, Mistake
from ..judges import JudgeRouter
from ..judges.leaf import Leaf
from ..scheduling import Upstream
from ..secrets import one_line
from ..sharing.messages import Revision
from ..sources.opening import same_keys
from ..system.cancellation import abandon, cancel_all
from .binding import LoopBinding
from .difference import Difference, difference, opened_anew, starts_servers
from .relay import Relay, digest_of
from .succession import Predecessor, matched, predecessors_in, same_account
from .watcher import Watch, missing_package, watch_file
from .wiring import Wiring

_log = logging.getLogger("qreward_plugins.engine")

CLOSE_WITHIN_S = 10.0
"""Most seconds for closing a source that was removed, after its last attempt."""
END_WITHIN_S = 2.0
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


class Reloader:
    """Reloads the configuration of one engine: on demand, and when its file changes. `watch` watches the file."""

    def __init__(self, wiring: Wiring, binding: LoopBinding, *, watch: Watch = watch_file) -> None:
        self._wiring = wiring
        self._binding = binding
        self._watch = watch
        self._watching: asyncio.Task[None] | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._draining: list[Upstream] = []
        """Removed sources that are not closed yet."""
        self._removed_names: set[str] = set()
        """Names of all sources that were ever removed."""
        self._predecessors: list[Predecessor] = []
        """Removed sources that have no successor yet."""
        binding.on_started, binding.on_drained = self.watch, self._drained
        if wiring.config.engine.reload:
            self._check_file(wiring.config)
        self._relay = Relay(wiring.config, shares=wiring.membership is not None)
        if wiring.membership is not None:
            wiring.membership.reloads = self

    @property
    def origin(self) -> Origin | None:
        """The file of the configuration; None if the engine was not made from one."""
        return origin_of(self._wiring.config)

    def reload(self, config: str | os.PathLike[str] | Mapping[str, Any] | Config | None = None) -> Difference:
        """Apply `config`, or what the file holds now. See `RewardEngine.reload`."""
        return self._reload(self._read(config))

    def _reload(self, config: Config, *, taken: Revision | None = None) -> Difference:
        prepared = self._prepare(config)
        self._apply(prepared)
        self._relay.changed(prepared.config, asyncio.get_running_loop().time(), taken=taken)
        return prepared.difference

    # Sharing

    def revision(self) -> Revision | None:
        """Return the state of the file that the engine goes by; None if reloads are not shared."""
        return self._relay.revision()

    def answered(self, newest: Revision | None) -> None:
        """Apply what another process has changed in the file, with the overrides of this one."""
        taken, origin = self._relay.answered(newest), self.origin
        if taken is None or taken.text is None or origin is None:
            return
        text = taken.text
        if digest_of(origin.file, text) == taken.digest:
            self._try(lambda: self._reload(origin.read_as(orjson.loads(text)), taken=taken), " from another process")

    # Checking

    def _read(self, config: Any) -> Config:
        origin = self.origin
        if config is not None:
            return with_origin(load_config(config), origin and origin.without_tree())
        if origin is None:
            problem = "the engine was not made from a file."
            raise ConfigurationError([Mistake("", problem, "Give reload() the new configuration.")])
        return origin.read()

    def _prepare(self, config: Config) -> _Prepared:
        """Check `config` as a whole. Nothing is changed. Raises `ConfigurationError`."""
        wiring = self._wiring
        if wiring.server is not None:
            problem = "the server does the scoring, so there is nothing to reload here."
            raise ConfigurationError([Mistake("engine.server", problem, "Reload the configuration of the server.")])
        before, after = wiring.config, without_keys(config, wiring.given)
        found = difference(before, after)
        mistakes = [
            Mistake(change.path, "this change needs a restart.", "Undo it, or restart the run.")
            for change in found.refused
        ]
        if mistakes:
            raise ConfigurationError(mistakes, origin=_origin_name(config))
        if after.engine.reload:
            self._check_file(after)
        mistakes = same_keys(after.sources, os.environ)
        if mistakes:
            raise ConfigurationError(mistakes, origin=_origin_name(config))
        changed = {
            name: node
            for name, node in after.sources.items()
            if before.sources.get(name) != node and not (name in before.sources and starts_servers(node))
        }
        fresh = wiring.opened(after.model_copy(update={"sources": changed})) if changed else {}
        upstreams: dict[str, Upstream] = {}
        unused: list[Upstream] = []
        for name, node in after.sources.items():
            known = before.sources.get(name)
            if known is None or (name not in wiring.given and opened_anew(known, node)):
                upstreams[name] = fresh[name]
            else:
                upstreams[name] = wiring.upstreams[name]
                if name in fresh and name not in wiring.given:
                    unused.append(fresh[name])
        router = wiring.routed(after, upstreams)
        return _Prepared(after, found, upstreams, router, unused)

    def _check_file(self, config: Config) -> None:
        """Raise `ConfigurationError` if the file cannot be watched, or if a server does the scoring."""
        if self._wiring.server is not None:
            problem = "`engine.server` does the scoring, with a configuration of its own."
            raise ConfigurationError([Mistake("engine.reload", problem, "Set it there, and leave it out here.")])
        if self._watch is watch_file and find_spec("watchfiles") is None:
            raise missing_package()
        if origin_of(config) is None:
            problem = "the configuration has no file that could be watched."
            remedy = "Load it from a YAML file, or call engine.reload() yourself."
            raise ConfigurationError([Mistake("engine.reload", problem, remedy)])

    # Applying

    def _apply(self, prepared: _Prepared) -> None:
        """Change everything in this step of the event loop."""
        loop = asyncio.get_running_loop()
        wiring, scoring = self._wiring, self._binding.bound_to(loop)
        before, now = wiring.config, loop.time()
        leaving = {name: each for name, each in wiring.upstreams.items() if prepared.upstreams.get(name) is not each}
        entering = {name: each for name, each in prepared.upstreams.items() if wiring.upstreams.get(name) is not each}
        self._predecessors = [each for each in self._predecessors if each.remembered(now)]
        self._predecessors += predecessors_in(before, leaving.values(), now)
        for name, predecessor in matched(self._predecessors, prepared.config, entering).items():
            entering[name].take_over(
                predecessor.upstream, same_account=same_account(predecessor, prepared.config, name)
            )
            self._predecessors.remove(predecessor)
        for name, upstream in prepared.upstreams.items():
            node = prepared.config.sources[name]
            upstream.retune(timeout_s=node.timeouts.total_s, price=node.price, weight=node.weight)
            if name in entering or node.limits != before.sources[name].limits:
                # This cannot fail: the same was done with a new quota.
                upstream.quota.retune(node.limits, now)
        moves = _moves(wiring.router, prepared.router, prepared.upstreams)
        wiring.config, wiring.router = prepared.config, prepared.router
        engine = prepared.config.engine
        wiring.reuse = bool(engine.journal and engine.journal.reuse)
        self._draining += leaving.values()
        self._removed_names |= leaving.keys()
        if scoring is None:
            wiring.upstreams.change(prepared.upstreams, moves)
        else:
            sources = {name: upstream.source for name, upstream in prepared.upstreams.items()}
            scoring.change(prepared.router, sources=sources, reuse=wiring.reuse)
            scoring.dispatcher.change(
                prepared.upstreams, moves, max_attempts=engine.max_attempts, settings=engine.scheduling
            )
        wiring.source_starts.change(upstream.source for upstream in prepared.upstreams.values())
        if wiring.membership is not None:
            wiring.membership.change(wiring.by_key())
        if scoring is None:
            for upstream in leaving.values():
                wiring.upstreams.draining.remove(upstream)
                self._drained(upstream)
        for upstream in prepared.unused:
            self._close_later(upstream)
        self.watch()

    def _drained(self, upstream: Upstream) -> None:
        self._draining.remove(upstream)
        if self._wiring.membership is not None:
            self._wiring.membership.drained(upstream)
        if upstream.name not in self._wiring.given:
            # What the caller has opened may come back, and closes with the engine.
            self._close_later(upstream)

    def _close_later(self, upstream: Upstream) -> None:
        task = asyncio.get_running_loop().create_task(_closed(upstream))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    # Watching

    def watch(self) -> None:
        """Watch the file in the running event loop, if the configuration says so; otherwise stop."""
        watching, loop = self._watching, asyncio.get_running_loop()
        wanted = self._wiring.config.engine.reload
        running = watching is not None and not watching.done() and watching.get_loop() is loop
        if wanted and not running:
            origin = self.origin
            assert origin is not None
            self._watching = loop.create_task(self._follow(origin.file))
            self._watching.add_done_callback(_log_failure)
        elif running and not wanted and watching is not None:
            # A reload that the watch itself has begun ends first.
            loop.call_soon(watching.cancel)

    async def _follow(self, file: str) -> None:
        async with aclosing(self._watch(file)) as changes:
            async for _ in changes:
                await asyncio.sleep(self._late_s())
                self._try(self._follow_up)

    def _late_s(self) -> float:
        """Return for how many seconds the file is left alone: another process has sent its newest state."""
        try:
            tree = None if self.origin is None else self.origin.read_tree()
        except Exception:
            # The reload that follows reports it.
            return 0.0
        return self._relay.late_s(tree, asyncio.get_running_loop().time())

    def _follow_up(self) -> Difference | None:
        config = self._read(None)
        return None if self._relay.is_same(config) else self._reload(config) or None

    def _try(self, reload: Callable[[], Difference | None], whence: str = "") -> None:
        """Call `reload`. The log gets one line if something was reloaded, or if a mistake prevented it."""
        origin = self.origin
        file = origin.file if origin is not None else "the configuration"
        problem = ""
        try:
            found = reload()
        except ConfigurationError as error:
            problem = " ".join(str(mistake) for mistake in error.mistakes)
        except EngineError as error:
            problem = str(error)
        except Exception as error:
            # Its message may hold a secret.
            problem = f"unexpected {type(error).__name__}"
        else:
            if found is not None:
                # A warning, because Python shows none below: whoever runs a training must see that its judges changed.
                _log.warning("%s was reloaded%s: %s", file, whence, one_line(str(found), _LINE_CHARS))
            return
        problem = one_line(problem, _LINE_CHARS)
        _log.error("%s was not reloaded%s, and nothing has changed: %s", file, whence, problem)

    # Closing

    def stops(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What has to end before the scheduler closes."""
        return {"the watch of the configuration": self._stop}

    def left_open(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """What has to close with the sources."""
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            f"source {upstream.name} (removed, {number})": upstream.source.aclose
            for number, upstream in enumerate(self._draining)
            if upstream.name not in self._wiring.given
        }
        given = {
            f"source {name}": source.aclose
            for name, source in self._wiring.given.items()
            if name in self._removed_names and name not in self._wiring.upstreams
        }
        return {**parts, **given, "the sources that were removed": self._end_closing}

    async def _stop(self) -> None:
        if self._watching is not None and self._watching.get_loop() is asyncio.get_running_loop():
            for task in await cancel_all([self._watching], within_s=END_WITHIN_S):
                abandon(task)

    async def _end_closing(self) -> None:
        if self._closing:
            await asyncio.wait(list(self._closing))


async def _closed(upstream: Upstream) -> None:
    try:
        with anyio.fail_after(CLOSE_WITHIN_S):
            if upstream.request_batches is not None:
                await upstream.request_batches.aclose()
            await upstream.source.aclose()
    except Exception:
        _log.warning("source %s, which was removed, could not be closed", upstream.name, exc_info=True)


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


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.error("the configuration is not watched any more", exc_info=task.exception())
