"""Matches each source of a new configuration with its predecessor, from which it takes over the quota and what was
learned.

What was spent of a limit stays spent, because the provider goes on counting. So a quota goes on for the same account
under any name, and for the same name at the same address, whatever its key is now. A source that was removed a while
ago is remembered for as long as what it spent counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..config import Config, configured_name
from ..scheduling import Upstream
from ..sharing import source_addresses, source_keys

REMEMBERED_WINDOWS = 2.0
"""Windows for which a removed source is remembered, in addition to its time limit."""


@dataclass(frozen=True, eq=False)
class Predecessor:
    """A source that was removed, or that another one replaces. `forgotten_at` is a time of the event loop's clock."""

    upstream: Upstream
    key: str
    """Identifies its account."""
    addresses: frozenset[str]
    forgotten_at: float

    @property
    def name(self) -> str:
        return self.upstream.name

    def remembered(self, now: float) -> bool:
        """Whether what it spent may still count."""
        return bool(self.upstream.live) or now < self.forgotten_at


def predecessors_in(config: Config, upstreams: Iterable[Upstream], now: float) -> list[Predecessor]:
    """Return the predecessors for `upstreams`, which are sources of `config`."""
    keys, places = source_keys(config), source_addresses(config)
    found = []
    for upstream in upstreams:
        name, (_, window_s) = upstream.name, upstream.quota.per_window()
        remembered_s = REMEMBERED_WINDOWS * max(window_s, config.sources[name].limits.window_s) + upstream.timeout_s
        found.append(Predecessor(upstream, keys[name], places[name], now + remembered_s))
    return found


def matched(predecessors: Sequence[Predecessor], config: Config, names: Iterable[str]) -> dict[str, Predecessor]:
    """Return the predecessor of each source in `names` of `config`, for those that have one. No two sources have the
    same. If several predecessors suit, the latest one is taken.
    """
    if not predecessors:
        return {}
    keys, places = source_keys(config), source_addresses(config)

    def near(old: Predecessor, new: str) -> bool:
        return not old.addresses.isdisjoint(places[new])

    rules: tuple[Callable[[Predecessor, str], bool], ...] = (
        lambda old, new: old.key == keys[new] and old.name == new,
        lambda old, new: old.key == keys[new],
        lambda old, new: old.name == new and near(old, new),
        # Of several keys, one more or less moves the numbers of the others.
        lambda old, new: configured_name(old.name) == configured_name(new) and near(old, new),
    )
    found: dict[str, Predecessor] = {}
    left, wanted = list(reversed(predecessors)), list(names)
    for rule in rules:
        for new in wanted:
            old = None if new in found else next((old for old in left if rule(old, new)), None)
            if old is not None:
                found[new] = old
                left.remove(old)
    return found


def same_account(predecessor: Predecessor, config: Config, name: str) -> bool:
    """Return whether `predecessor` and the source `name` of `config` are one account for the provider."""
    return predecessor.key == source_keys(config)[name]
