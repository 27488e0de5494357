"""Makes `+reward_manager=qreward` and `+qreward=NAME` known to Hydra, with no `hydra.searchpath` in sight.

Hydra imports every module of the namespace package `hydra_plugins` (https://hydra.cc/docs/advanced/search_path), so
this one stays outside our own packages and imports nothing of them.
"""

from __future__ import annotations

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin


class QRewardSearchPathPlugin(SearchPathPlugin):
    """Appends the adapter's config groups to the search path, behind the user's own."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append(provider="qreward", path="pkg://verl_adapter.conf")
