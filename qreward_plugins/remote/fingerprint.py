"""Names what may change the rewards of a configuration: judges, routes, models, and the version of this package."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from ..config import Config, routes_of

_ASKING = {"priority"}
"""Keys of a judge that say when it is asked, not what it says."""


def fingerprint_of(config: Config) -> str:
    """Return a short text that is equal for configurations with the same judges. URLs, keys, limits, prices, priorities
    and everything else below `engine` may differ.
    """
    from qreward_plugins import __version__

    identity: dict[str, Any] = {
        "version": __version__,
        "judges": {name: judge.model_dump(mode="json", exclude=_ASKING) for name, judge in config.judges.items()},
        "routes": [(pattern, route.judge) for pattern, route in routes_of(config)],
        "sources": {
            name: (source.kind, getattr(source, "model", None), getattr(source, "version", None))
            for name, source in config.sources.items()
        },
    }
    text = orjson.dumps(identity, default=repr, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()[:32]
