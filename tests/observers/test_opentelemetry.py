"""The observer for OpenTelemetry, against the exporter of its SDK that keeps everything in memory."""

from __future__ import annotations

import asyncio
import sys

import pytest

from qreward_plugins import ConfigurationError, accelerate
from qreward_plugins.observers.opentelemetry import OpenTelemetry
from qreward_plugins.simulation import run


def test_attempts_and_calls_are_counted():
    pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider(metric_readers=[reader])
    behaviours = [ConnectionError("secret"), 0.0, 100.0, 2.0]

    async def grade(x):
        behaviour = behaviours.pop(0)
        if isinstance(behaviour, Exception):
            raise behaviour
        await asyncio.sleep(behaviour)
        return x

    graded = accelerate(grade, name="grade", retries=1, hedge=1.0, observers=[OpenTelemetry(provider)])

    async def main():
        assert [await graded(1), await graded(2)] == [1, 2]
        await asyncio.sleep(1)

    run(main())
    found = {}
    for metric in reader.get_metrics_data().resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            labels = tuple(str(value) for _, value in sorted(point.attributes.items()))
            found[(metric.name, *labels)] = getattr(point, "value", None) or getattr(point, "sum", 0)
    assert found["qreward.attempts", "grade", "failed", "grade"] == 1
    assert found["qreward.attempts", "grade", "answered", "grade"] == 2
    assert found["qreward.attempts", "grade", "cancelled", "grade"] == 1
    assert found["qreward.calls", "grade", ""] == 2
    assert found["qreward.in_flight", "grade"] == 0
    assert found["qreward.attempt.duration", "grade", "cancelled", "grade"] == pytest.approx(3.0)
    assert "secret" not in str(found)
    provider.shutdown()


def test_without_the_package_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigurationError, match=r'pip install "qreward-plugins\[opentelemetry\]"'):
        OpenTelemetry()
