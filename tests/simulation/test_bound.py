"""The clairvoyant bound: it is what can be reached by somebody who knows everything."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from qreward_plugins.simulation import Fault, Job, makespan_bound_s

from ..kit import each_of

ONES = [Job(1.0)] * 30
BUCKET = {"requests_per_minute": 60, "window": "bucket", "burst": 5}
OUT = Fault(10.0, 20.0, "refuse")


@each_of(
    ("server", "jobs", "bound_s"),
    [
        # Three windows of ten; with places, the last request of the last window takes its second.
        ({"requests_per_minute": 10}, ONES, 120),
        ({"requests_per_minute": 10, "concurrency": 10}, ONES, 121),
        ({"concurrency": 2}, ONES, 15),
        ({}, [Job(1.0, 0.0, 50.0)], 51),
        # What arrives late finds one window of ten, and the next one.
        ({"requests_per_minute": 10}, [Job(1.0, 0.0, 50.0)] * 15, 110),
        # A place in a window is free a window after it was taken: by no order do all ten long ones end before 87.
        ({"requests_per_minute": 10, "concurrency": 1}, [Job(0.0)] * 10 + [Job(6.0)] * 10, 87),
        # Tokens: half of the work now, half of it in the next window.
        ({"tokens_per_minute": 1000}, [Job(1.0, 100.0)] * 20, 60),
        # A bucket: five at once, then one a second.
        (BUCKET, [Job(1.0)] * 100, 95),
        ({**BUCKET, "error_share": 0.5}, ONES, 55),
        ({**BUCKET, "faults": (Fault(0.0, 30.0, "throttle"),)}, ONES, 55),
        # An outage costs what is lost.
        ({"concurrency": 2, "faults": (OUT,)}, ONES * 2, 40),
        ({"concurrency": 2, "faults": (replace(OUT, kind="slow", factor=2.0),)}, ONES * 2, 35),
        # Work goes on while nothing new is let in: 9 s of work each, and then 20 s of it from 9 to 29.
        (
            {"concurrency": 2, "window_s": 10.0, "faults": (Fault(10.0, 30.0, "throttle"),)},
            [Job(9.0), Job(9.0), Job(20.0), Job(20.0)],
            29,
        ),
        # Each success costs one failure, which holds its place for 0.3 of the time.
        ({"concurrency": 2, "error_share": 0.5}, ONES, 1.3 * 15),
        ({"requests_per_minute": 60, "error_share": 0.5}, [Job(1.0)] * 100, 180),
        ({"requests_per_minute": 10, "error_share": 0.5}, [Job(1.0)] * 6, 60),
        ({}, [], 0),
        ({"faults": (Fault(0.0, math.inf, "hang"),)}, [Job(1.0)], math.inf),
        ({"requests_per_minute": 5, "faults": (Fault(30.0, math.inf, "refuse"),)}, [Job(1.0)] * 6, math.inf),
    ],
)
def test_the_bound_is_what_can_be_reached(exact, server, jobs, bound_s):
    assert makespan_bound_s([exact(**server)], jobs) == pytest.approx(bound_s, rel=0.01)


def test_what_could_be_sooner_is_not_held_back(exact):
    # Long requests of the first moment need not end in it: four short ones when their places are free, at 10.
    server = exact(requests_per_minute=24, window_s=10.0, concurrency=8)
    assert makespan_bound_s([server], [Job(9.0)] * 4 + [Job(0.5)] * 4) <= 10.5


def test_the_longest_request_bounds_by_itself(exact):
    servers = [exact("slow", seconds_per_unit=9.0), exact("fast", seconds_per_unit=2.0)]
    assert makespan_bound_s(servers, [Job(0.1), Job(5.0), Job(0.2)]) == pytest.approx(10.0)
    dies = replace(servers[1], faults=(Fault(4.0, math.inf, "refuse"),))
    assert makespan_bound_s([servers[0], dies], [Job(0.1), Job(5.0)]) == pytest.approx(45.0)
