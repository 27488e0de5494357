"""Opens the sources of a configuration with their limits, and the budgets that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..config.models import Config
from ..config.names import configured_name
from ..config.source_models import Budget, Limits
from ..errors import ConfigurationError, Mistake
from ..observers import BugLog
from ..quotas.budgets import HOUR_S, UNITS, DollarBudget
from ..quotas.quota import Quota
from ..quotas.shared import SharedQuota
from ..quotas.window_limit import FOR_GOOD_S
from ..scheduling.upstream import Upstream
from ..sources import Source, open_source

Budgets: TypeAlias = Mapping[tuple[str, ...], DollarBudget]
"""Budgets by the names of the sources that they bound; () for that of the run."""


def open_upstreams(
    config: Config, opened: Mapping[str, Source], budgets: Budgets, *, processes: int, shared: bool
) -> dict[str, Upstream]:
    """Return the upstreams of `config` by name. Sources in `opened` are used as they are, the others are opened here.
    Each spends from its source's budget and that of the run.

    `processes` share the limits equally. With `shared`, a keeper sets this process's share instead.

    Raises `ConfigurationError` with every source that cannot be opened, and every limit that cannot be shared.
    """
    upstreams: dict[str, Upstream] = {}
    mistakes: list[Mistake] = []
    bugs = BugLog(config)
    for name, node in config.sources.items():
        try:
            source = _checked(name, opened.get(name) or open_source(name, node))
            mistakes += _batch_mistakes(source)
            quota = (
                SharedQuota(node.limits, source=name, slots=source.slots)
                if shared
                else Quota(node.limits, source=name, processes=processes, slots=source.slots)
            )
        except ConfigurationError as error:
            mistakes.extend(error.mistakes)
            continue
        upstream = Upstream(source, quota, bugs, timeout_s=node.timeouts.total_s, price=node.price, weight=node.weight)
        upstream.budgets = tuple(budget for names, budget in budgets.items() if name in names or not names)
        upstreams[name] = upstream
    if mistakes:
        raise ConfigurationError(mistakes)
    return upstreams


def _checked(name: str, given: object) -> Source:
    if isinstance(given, Source):
        return given
    remedy = "Inherit `qreward_plugins.sources.Source`, and define `name`, `model` and `send`."
    raise ConfigurationError([Mistake(f"sources.{name}", f"{type(given).__name__} is no `Source`.", remedy)])


def _batch_mistakes(source: Source) -> list[Mistake]:
    """Return the mistake of a source that is configured to carry several calls, and cannot."""
    if source.batch is None or type(source).send_batch is not Source.send_batch:
        return []
    problem = f"{type(source).__name__} has no `send_batch`, so a request cannot carry several calls."
    return [Mistake(f"sources.{source.name}.batch", problem, "Define it, or leave batch out.")]


def open_budgets(config: Config, *, processes: int, shared: bool) -> Budgets:
    """Return the budgets of `config`. `processes` share each equally; with `shared`, a keeper sets this process's share
    instead.
    """

    def opened(whose: str, budget: Budget) -> DollarBudget:
        window_s = HOUR_S if budget.per == "hour" else FOR_GOOD_S
        limits = Limits(tokens_per_minute=budget.usd * UNITS * 60.0 / window_s, window_s=window_s)
        quota = SharedQuota(limits, source=whose) if shared else Quota(limits, source=whose, processes=processes)
        return DollarBudget(whose, budget, quota)

    names: dict[str, tuple[str, ...]] = {}
    for name in config.sources:
        whole = configured_name(name)
        names[whole] = (*names.get(whole, ()), name)
    nodes = {keys: config.sources[keys[0]].budget for keys in names.values()}
    found = {keys: opened(f"source {name}", node) for name, keys in names.items() if (node := nodes[keys]) is not None}
    if config.engine.budget is not None:
        found[()] = opened("the run", config.engine.budget)
    return found
