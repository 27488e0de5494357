"""The metrics of an engine and its server in the text format of Prometheus, which OpenTelemetry collectors read, too.

prometheus_client writes the format. Counters come from the engine's statistics at the time of the request, so that
nothing is counted twice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

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

_Rows = Iterable[tuple[Sequence[str], float]]


def exposition(statistics: EngineStatistics, under_way: int, requests: Counter[tuple[str, int]]) -> bytes:
    """Return the metrics as text. `requests` counts HTTP requests by path and status."""
    return generate_latest(_Collector(statistics, under_way, requests))


class _Collector(Collector):
    def __init__(self, statistics: EngineStatistics, under_way: int, requests: Counter[tuple[str, int]]) -> None:
        self._statistics, self._under_way, self._requests = statistics, under_way, requests

    def collect(self) -> Iterator[Metric]:
        now = self._statistics
        yield GaugeMetricFamily("qreward_samples_under_way", "Samples without an outcome.", self._under_way)
        yield GaugeMetricFamily("qreward_calls_waiting", "Calls without an attempt under way.", now.waiting)
        yield CounterMetricFamily("qreward_samples_submitted", "Samples submitted.", now.submitted)
        yield CounterMetricFamily("qreward_samples_scored", "Samples with a reward.", now.scored)
        yield CounterMetricFamily("qreward_calls_merged", "Calls that an equal one has answered.", now.merged)
        yield CounterMetricFamily("qreward_samples_cached", "Rewards that come from the journal.", now.cached)
        failed = [(label.split("/", 1), count) for label, count in now.failed.items()]
        yield _counter("samples_failed", "Samples without a reward.", "cause reason", failed)
        sources = now.sources.items()
        for name, text in _COUNTED.items():
            yield _counter(f"source_{name}", text, "source", [([key], getattr(one, name)) for key, one in sources])
        in_flight = [([key], one.in_flight) for key, one in sources]
        yield _gauge("source_in_flight", "Attempts under way.", "source", in_flight)
        left = [([key], one.budget_left_usd) for key, one in sources if one.budget_left_usd is not None]
        yield _gauge("source_budget_left_usd", "US dollars that may still be spent.", "source", left)
        states = [([key, one.state], 1.0) for key, one in sources]
        yield _gauge("source_state", "1 for the present state.", "source state", states)
        replicas = [([key, each.base_url], each) for key, one in sources for each in one.replicas[:_MOST_REPLICAS]]
        for name, text, make in _OF_REPLICAS if replicas else ():
            yield make(f"replica_{name}", text, "source replica", [(key, getattr(one, name)) for key, one in replicas])
        health = [([*key, name], float(name == one.health)) for key, one in replicas for name in _HEALTH]
        if health:
            yield _gauge("replica_health", "1 for the present health.", "source replica health", health)
        served = [([path, str(status)], count) for (path, status), count in self._requests.items()]
        yield _counter("http_requests", "HTTP requests.", "path status", served)


def _counter(name: str, text: str, labels: str, rows: _Rows) -> Metric:
    return _filled(CounterMetricFamily(f"qreward_{name}", text, labels=labels.split()), rows)


def _gauge(name: str, text: str, labels: str, rows: _Rows) -> Metric:
    return _filled(GaugeMetricFamily(f"qreward_{name}", text, labels=labels.split()), rows)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, rows: _Rows) -> Metric:
    for values, number in rows:
        family.add_metric(values, number)
    return family


_OF_REPLICAS = (
    ("requests", "Requests that were sent.", _counter),
    ("failures", "Requests that it did not answer, or alone refused.", _counter),
    ("in_flight", "Requests under way.", _gauge),
)
