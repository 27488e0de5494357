"""The limits of an accelerated function: what its options declare, and how many calls this process makes at once."""

from __future__ import annotations

from ..config import Limits, load_config
from ..errors import ConfigurationError, Mistake
from ..sources.function import processors
from .options import MOST_THREADS, Kind, Options

THREADS = 32
"""Most threads of a sync function, by default."""
MOST_LEARNED = 1024
"""Most calls at once of an adaptive function without `concurrency`."""
ANY_NUMBER = 1_000_000
"""Calls at once of a function without a limit: more than any process can hold."""


class FunctionLimits:
    """The limits of a function of one kind. `options.source` may name a source whose limits it takes.

    Raises `ConfigurationError` if the configuration has no such source.
    """

    def __init__(self, kind: Kind, options: Options) -> None:
        self._kind = kind
        self._source_limits = _limits_of_source(options)

    def declared(self, options: Options) -> Limits:
        """The limits that the user declared."""
        limits = options.limits if self._source_limits is None else self._source_limits
        return limits if options.concurrency is None else limits.model_copy(update={"concurrency": options.concurrency})

    def here(self, options: Options) -> Limits:
        """The declared limits, with the threads or processes of this process as concurrency."""
        limits, places = self.declared(options), self.places(options)
        if limits.concurrency is not None:
            places = min(places, limits.concurrency)
        return limits if places == ANY_NUMBER else limits.model_copy(update={"concurrency": places})

    def places(self, options: Options) -> int:
        """Most calls at once: as the options say, or as many as there are threads or processes."""
        if options.concurrency is not None:
            most = MOST_THREADS if self._kind in ("sync", "generator") and options.mode != "process" else ANY_NUMBER
            return min(options.concurrency, most)
        if options.mode == "process":
            return processors()
        return THREADS if self._kind in ("sync", "generator") else ANY_NUMBER

    def window(self, options: Options) -> int:
        """Calls of a stream that are under way at once: enough to keep the function busy."""
        places = self.places(options)
        return max(2, min(4 * places, 1024)) if places < ANY_NUMBER else 256

    def refilled_s(self, options: Options) -> float:
        """Seconds after which a limit allows a whole burst again."""
        limits = self.declared(options)
        if limits.requests_per_minute is None:
            return 0.0
        if limits.window == "bucket":
            return 60.0 * limits.burst / limits.requests_per_minute
        return 2 * max(limits.window_s, 60.0 / limits.requests_per_minute)


def _limits_of_source(options: Options) -> Limits | None:
    """The limits that the configuration declares for `source`. Raises `ConfigurationError`."""
    if options.source is None or options.config is None:
        return None
    config = load_config(options.config)
    if options.source not in config.sources:
        problem = f"{options.source!r} is not a source of the configuration."
        raise ConfigurationError(
            [Mistake("source", problem, f"It has {', '.join(config.sources)}.")], origin="accelerate"
        )
    return config.sources[options.source].limits
