"""What a server says of itself. Its fingerprint names what may change a reward: judges, routes, models, and the version
of this package.
"""

from __future__ import annotations

import hashlib
from typing import Any

import orjson

from ..client.rows import ServerFacts
from ..config import Config, SourceConfig, routes_of
from ..config.several_keys import configured_name
from ..engine import RewardEngine
from ..judges import compares_siblings
from ..sources.kind import own_settings

_ASKING = {"priority"}
"""Keys of a judge that say when it is asked, not what it says."""
_CANNOT_MATTER = frozenset(
    {"url", "base_url", "api_key", "api_key_env", "verify_tls", "client", "httpx", "routing", "workers"}
    | {"max_reply_bytes", "data_parallel", "devices", "placement", "start_within_s", "restarts"}
    | {"log_folder"}
)
"""Keys of a source that say where, with which key and how fast it is asked. Any other key counts, unknown ones too,
except those of every source (`limits`, `timeouts`, `price`, `weight`).
"""


def facts_of(engine: RewardEngine) -> ServerFacts:
    """Return the facts of the configuration that an engine works by."""
    known = engine.facts()
    return ServerFacts(
        fingerprint_of(engine.config),
        tuple(known.components),
        known.defines_correct,
        engine.stream_window,
        compares_siblings(engine.config),
    )


def fingerprint_of(config: Config) -> str:
    """Return a short text that is equal for configurations with the same judges and the same questions to the sources.
    URLs, secrets, limits, prices, time limits, priorities and everything below `engine` may differ.
    """
    from qreward_plugins import __version__

    identity: dict[str, Any] = {
        "version": __version__,
        "judges": {name: judge.model_dump(mode="json", exclude=_ASKING) for name, judge in config.judges.items()},
        "routes": [(pattern, route.judge) for pattern, route in routes_of(config)],
        "sources": {
            configured_name(name): (source.kind, source.version, _what_counts(source))
            for name, source in config.sources.items()
        },
    }
    text = orjson.dumps(identity, default=repr, option=orjson.OPT_SORT_KEYS)
    return hashlib.sha256(text).hexdigest()[:32]


def _what_counts(source: SourceConfig) -> dict[str, Any]:
    return {key: value for key, value in own_settings(source, reveal=False).items() if key not in _CANNOT_MATTER}
