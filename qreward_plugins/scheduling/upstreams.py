"""The upstreams of an engine by name, which a reload of the configuration changes while calls are under way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

from ..config.models import Config
from ..config.names import configured_name
from ..config.source_models import Budget, Limits
from ..errors import ConfigurationError, Mistake
from ..observers import Observers
from ..quotas.ledger import FOR_GOOD_S
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..sources import Source, open_source
from .budgets import HOUR_S, UNITS, DollarBudget
from .calls import Call
from .pauses import Pauses
from .upstream import Upstream

Moves: TypeAlias = Mapping[tuple[str, tuple[str, ...]], tuple[str, ...]]
"""By the name of who calls and the sources that it names: the sources that may answer now."""


class Upstreams(dict[str, Upstream]):
    """The upstreams that take calls, by name.

    A removed upstream is not among them, but `upstreams[name]` still finds it: jobs that it failed refer to it by name.
    """

    def __init__(self, upstreams: Mapping[str, Upstream]) -> None:
        super().__init__(upstreams)
        self.draining: list[Upstream] = []
        """Removed upstreams with attempts under way."""
        self._removed: dict[str, Upstream] = {}
        self._moves: dict[tuple[str, tuple[str, ...]], tuple[str, ...]] = {}
        self._changed = False

    def __missing__(self, name: str) -> Upstream:
        return self._removed[name]

    def change(self, upstreams: Mapping[str, Upstream], moves: Moves) -> frozenset[str]:
        """Go on with `upstreams`. Those that are not among them drain. Return the names that mean nothing, or another
        upstream, from now on.
        """
        leaving = [upstream for name, upstream in self.items() if upstreams.get(name) is not upstream]
        self.draining += leaving
        self._removed.update((upstream.name, upstream) for upstream in leaving)
        self.clear()
        self.update(upstreams)
        self._moves = {origin: moves.get((origin[0], target), target) for origin, target in self._moves.items()}
        self._moves.update(moves)
        self._changed = True
        return frozenset(upstream.name for upstream in leaving)

    def take_drained(self) -> list[Upstream]:
        """Return the removed upstreams whose last attempt has ended, once each."""
        drained = [upstream for upstream in self.draining if not upstream.live]
        if drained:
            self.draining = [upstream for upstream in self.draining if upstream.live]
        return drained

    def settle(self, call: Call[Any]) -> None:
        """Let `call` name the sources that may answer it now. There may be none left."""
        if self._changed:
            sources = self._moves.get((call.name, call.sources), call.sources)
            call.sources = tuple([name for name in sources if name in self])


def with_draining(upstreams: Mapping[str, Upstream]) -> Collection[Upstream]:
    """Return all upstreams that may have attempts under way."""
    if isinstance(upstreams, Upstreams) and upstreams.draining:
        return [*upstreams.values(), *upstreams.draining]
    return upstreams.values()


def listen(
    upstreams: Iterable[Upstream],
    loop: asyncio.AbstractEventLoop,
    observers: Observers,
    *,
    on_change: Callable[[], None],
) -> None:
    """Listen to the sources whose replicas come, go and change. `on_change` is called in the event loop after each
    change, because a source may take calls again, or stop taking them.
    """

    def handle(source: Source) -> None:
        for change in source.changes():
            observers.emit(change)
        on_change()

    def changed(source: Source) -> None:  # any thread may call this
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(handle, source)

    for upstream in upstreams:
        upstream.source.listen(partial(changed, upstream.source))


def open_upstreams(
    config: Config, opened: Mapping[str, Source], *, processes: int, shared: bool = False
) -> dict[str, Upstream]:
    """Return the upstreams of `config` by name. Sources in `opened` are used as they are, the others are opened here.

    `processes` share the limits equally. With `shared`, a keeper sets this process's share instead.

    Raises `ConfigurationError` with every source that cannot be opened, and every limit that cannot be shared.
    """
    upstreams: dict[str, Upstream] = {}
    mistakes: list[Mistake] = []
    for name, node in config.sources.items():
        try:
            source = _checked(name, opened.get(name) or open_source(name, node))
            mistakes += batch_mistakes(source)
            quota = (
                SharedQuota(node.limits, source=name, slots=source.slots)
                if shared
                else Quota(node.limits, source=name, processes=processes, slots=source.slots)
            )
        except ConfigurationError as error:
            mistakes.extend(error.mistakes)
            continue
        upstreams[name] = Upstream(source, quota, timeout_s=node.timeouts.total_s, price=node.price, weight=node.weight)
    if mistakes:
        raise ConfigurationError(mistakes)
    return upstreams


def _checked(name: str, given: object) -> Source:
    if isinstance(given, Source):
        return given
    remedy = "Inherit `qreward_plugins.sources.Source`, and define `name`, `model` and `send`."
    raise ConfigurationError([Mistake(f"sources.{name}", f"{type(given).__name__} is no `Source`.", remedy)])


def batch_mistakes(source: Source) -> list[Mistake]:
    """Return the mistake of a source that is configured to carry several calls, and cannot."""
    if source.batch is None or type(source).send_batch is not Source.send_batch:
        return []
    problem = f"{type(source).__name__} has no `send_batch`, so a request cannot carry several calls."
    return [Mistake(f"sources.{source.name}.batch", problem, "Define it, or leave batch out.")]


def open_budgets(config: Config, *, processes: int, shared: bool) -> dict[tuple[str, ...], DollarBudget]:
    """Return the budgets of `config` by the names of the sources that they bound. `processes` share each equally; with
    `shared`, a keeper sets this process's share instead.
    """

    def opened(whose: str, budget: Budget) -> DollarBudget:
        window_s = HOUR_S if budget.per == "hour" else FOR_GOOD_S
        limits = Limits(tokens_per_minute=budget.usd * UNITS * 60.0 / window_s, window_s=window_s)
        quota = SharedQuota(limits, source=whose) if shared else Quota(limits, source=whose, processes=processes)
        return DollarBudget(whose, budget, quota, Pauses())

    names: dict[str, tuple[str, ...]] = {}
    for name in config.sources:
        whole = configured_name(name)
        names[whole] = (*names.get(whole, ()), name)
    nodes = {keys: config.sources[keys[0]].budget for keys in names.values()}
    found = {keys: opened(f"source {name}", node) for name, keys in names.items() if (node := nodes[keys]) is not None}
    if config.engine.budget is not None:
        found[()] = opened("the run", config.engine.budget)
    return found


def assign(budgets: Mapping[tuple[str, ...], DollarBudget], upstreams: Mapping[str, Upstream]) -> None:
    """Let each upstream spend from its source's budget and that of the run."""
    for name, upstream in upstreams.items():
        upstream.budgets = tuple(budget for names, budget in budgets.items() if name in names or not names)
