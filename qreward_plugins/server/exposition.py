"""The metrics of an engine and its server in the text format of Prometheus, which OpenTelemetry collectors read, too.

prometheus_client writes the format. Counters come from the engine's statistics at the time of the request, so that
nothing is counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..observers import EngineStatistics

_COUNTED = {
    "requests": "Attempts that were sent.",
    "answered": "Replies, valid or not.",
    "invalid": "Replies that were no valid verdict.",
    "throttled": "Attempts that were throttled (429).",
    "transient": "Attempts that failed and may succeed when tried again.",
    "permanent": "Attempts that were refused.",
    "cancelled": "Attempts that were cancelled.",
    "hedges": "Hedges that were started.",
    "prompt_tokens": "Prompt tokens of all replies.",
    "completion_tokens": "Completion tokens of all replies.",
    "cached_tokens": "Prompt tokens that were read from the server's cache.",
    "thinking_tokens": "Completion tokens that were thoughts.",
    "cost_usd": "US dollars of all replies.",
}


_MOST_REPLICAS = 128
"""Most replicas of a source that have series of their own, in the order of the configuration."""
_HEALTH = ("up", "half_open", "backing_off", "draining", "down")


def exposition(statistics: EngineStatistics, under_way: int, requests: Counter[tuple[str, int]]) -> bytes:
    """Return the metrics as text. `requests` counts HTTP requests by path and status."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(statistics, under_way, requests))
    return generate_latest(registry)


class _Collector:
    def __init__(self, statistics: EngineStatistics, under_way: int, requests: Counter[tuple[str, int]]) -> None:
        self._statistics, self._under_way, self._requests = statistics, under_way, requests

    def collect(self) -> Iterator[Metric]:
        now = self._statistics
        yield GaugeMetricFamily("qreward_samples_under_way", "Samples without an outcome.", self._under_way)
        yield GaugeMetricFamily("qreward_calls_waiting", "Calls without an attempt under way.", now.waiting)
        yield CounterMetricFamily("qreward_samples_submitted", "Samples submitted.", now.submitted)
        yield CounterMetricFamily("qreward_samples_scored", "Samples with a reward.", now.scored)
        yield CounterMetricFamily("qreward_samples_cached", "Rewards that come from the journal.", now.cached)
        failed = CounterMetricFamily("qreward_samples_failed", "Samples without a reward.", labels=["cause", "reason"])
        for label, count in now.failed.items():
            failed.add_metric(label.split("/", 1), count)
        yield failed
        for name, help_text in _COUNTED.items():
            family = CounterMetricFamily(f"qreward_source_{name}", help_text, labels=["source"])
            for source, numbers in now.sources.items():
                family.add_metric([source], getattr(numbers, name))
            yield family
        in_flight = GaugeMetricFamily("qreward_source_in_flight", "Attempts under way.", labels=["source"])
        state = GaugeMetricFamily("qreward_source_state", "1 for the present state.", labels=["source", "state"])
        for source, numbers in now.sources.items():
            in_flight.add_metric([source], numbers.in_flight)
            state.add_metric([source, numbers.state], 1.0)
        yield in_flight
        yield state
        yield from _replicas(now)
        served = CounterMetricFamily("qreward_http_requests", "HTTP requests.", labels=["path", "status"])
        for (path, status), count in self._requests.items():
            served.add_metric([path, str(status)], count)
        yield served


def _replicas(now: EngineStatistics) -> Iterator[Metric]:
    labels = ["source", "replica"]
    requests = CounterMetricFamily("qreward_replica_requests", "Requests that were sent.", labels=labels)
    failures = CounterMetricFamily(
        "qreward_replica_failures", "Requests that it did not answer, or alone refused.", labels=labels
    )
    in_flight = GaugeMetricFamily("qreward_replica_in_flight", "Requests under way.", labels=labels)
    pending = GaugeMetricFamily("qreward_replica_pending_tokens", "Tokens under way (estimated).", labels=labels)
    hits = GaugeMetricFamily("qreward_replica_prefix_hit_rate", "Share of cached prompt tokens.", labels=labels)
    cache = GaugeMetricFamily("qreward_replica_cache_use", "Share of the KV cache in use.", labels=labels)
    health = GaugeMetricFamily("qreward_replica_health", "1 for the present health.", labels=[*labels, "health"])
    for source, numbers in now.sources.items():
        for one in numbers.replicas[:_MOST_REPLICAS]:
            at = [source, one.base_url]
            requests.add_metric(at, one.requests)
            failures.add_metric(at, one.failures)
            in_flight.add_metric(at, one.in_flight)
            pending.add_metric(at, one.pending_tokens)
            if one.prefix_hit_rate == one.prefix_hit_rate:
                hits.add_metric(at, one.prefix_hit_rate)
            if one.cache_use is not None:
                cache.add_metric(at, one.cache_use)
            for name in _HEALTH:
                health.add_metric([*at, name], float(name == one.health))
    for family in (requests, failures, in_flight, pending, hits, cache, health):
        if family.samples:
            yield family
