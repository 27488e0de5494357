"""Counts attempts, calls and samples as OpenTelemetry metrics, for engines and for accelerated functions.

    qreward.attempts            counter    source, judge, result (answered, failed, throttled, ...)
    qreward.attempt.duration    histogram  seconds; source, judge, result
    qreward.calls               counter    judge, reason ("" if answered)
    qreward.call.wait           histogram  seconds from a call to its first attempt; judge
    qreward.in_flight           up-down    attempts under way; source
    qreward.samples             counter    outcome: "scored", or cause and reason of the failure

Of an accelerated function, `judge` and `source` are its name. No label holds a key, an argument or a text of others, so
that their number stays small.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigurationError, Mistake
from ..samples import Scored
from .events import AttemptEnded, AttemptStarted, CallEnded, Event, SampleEnded

if TYPE_CHECKING:
    from opentelemetry.metrics import MeterProvider


class OpenTelemetry:
    """An observer that writes to a meter of OpenTelemetry. `meter_provider`: None uses the global one.

    In a configuration: `observers: qreward_plugins.observers.opentelemetry:OpenTelemetry`. Needs the extra
    `opentelemetry`; raises `ConfigurationError` without it.
    """

    def __init__(self, meter_provider: MeterProvider | None = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError:
            problem = "OpenTelemetry is not installed."
            remedy = 'Install it with: pip install "qreward-plugins[opentelemetry]".'
            raise ConfigurationError([Mistake("observers", problem, remedy)], origin="observers") from None
        meter = metrics.get_meter("qreward_plugins", meter_provider=meter_provider)
        self._attempts = meter.create_counter("qreward.attempts", "{attempt}", "Attempts that ended")
        self._duration = meter.create_histogram("qreward.attempt.duration", "s", "Duration of an attempt")
        self._calls = meter.create_counter("qreward.calls", "{call}", "Calls that ended")
        self._wait = meter.create_histogram("qreward.call.wait", "s", "Time from a call to its first attempt")
        self._in_flight = meter.create_up_down_counter("qreward.in_flight", "{attempt}", "Attempts under way")
        self._samples = meter.create_counter("qreward.samples", "{sample}", "Samples that have an outcome")

    def __call__(self, event: Event, /) -> None:
        if isinstance(event, AttemptStarted):
            self._in_flight.add(1, {"source": event.source})
        elif isinstance(event, AttemptEnded):
            result = "timed_out" if event.timed_out else event.result
            labels = {"source": event.source, "judge": event.judge, "result": result}
            self._in_flight.add(-1, {"source": event.source})
            self._duration.record(event.seconds, labels)
            self._attempts.add(1, labels)
        elif isinstance(event, CallEnded):
            self._calls.add(1, {"judge": event.judge, "reason": event.reason})
            self._wait.record(event.waited_s, {"judge": event.judge})
        elif isinstance(event, SampleEnded):
            outcome = event.outcome
            self._samples.add(1, {"outcome": "scored" if isinstance(outcome, Scored) else outcome.label})
