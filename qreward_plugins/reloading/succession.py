"""Finds for each source of a new configuration which source so far it succeeds, in quota and in what was learned.

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
class Former:
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


def formers(config: Config, upstreams: Iterable[Upstream], now: float) -> list[Former]:
    """Return what `upstreams`, which are sources of `config`, were."""
    keys, places = source_keys(config), source_addresses(config)
    found = []
    for upstream in upstreams:
        name, (_, window_s) = upstream.name, upstream.quota.per_window()
        remembered_s = REMEMBERED_WINDOWS * max(window_s, config.sources[name].limits.window_s) + upstream.timeout_s
        found.append(Former(upstream, keys[name], places[name], now + remembered_s))
    return found


def heirs(former: Sequence[Former], config: Config, names: Iterable[str]) -> dict[str, Former]:
    """Return which of `former` each source of these names in `config` succeeds, if any; each has one successor at most.

    The later of two that suit is succeeded.
    """
    if not former:
        return {}
    keys, places = source_keys(config), source_addresses(config)

    def near(old: Former, new: str) -> bool:
        return not old.addresses.isdisjoint(places[new])

    rules: tuple[Callable[[Former, str], bool], ...] = (
        lambda old, new: old.key == keys[new] and old.name == new,
        lambda old, new: old.key == keys[new],
        lambda old, new: old.name == new and near(old, new),
        # Of several keys, one more or less moves the numbers of the others.
        lambda old, new: configured_name(old.name) == configured_name(new) and near(old, new),
    )
    found: dict[str, Former] = {}
    left, wanted = list(reversed(former)), list(names)
    for rule in rules:
        for new in wanted:
            old = None if new in found else next((old for old in left if rule(old, new)), None)
            if old is not None:
                found[new] = old
                left.remove(old)
    return found


def same_account(former: Former, config: Config, name: str) -> bool:
    """Return whether the provider does not tell `former` and the source `name` of `config` apart."""
    return former.key == source_keys(config)[name]
