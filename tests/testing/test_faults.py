"""When faults happen, and how long answers take: choices only, no server."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from qreward_plugins.testing import FaultKind, Faults, Latency, Outage
from qreward_plugins.testing.faults import FaultPlan, fault_kind


def chosen(faults: Faults, count: int, *, seed: int = 0, at_s: float = 0.0) -> list[str | None]:
    plan = FaultPlan(faults, random.Random(seed))
    return [None if (kind := plan.choose(at_s)) is None else kind.value for _ in range(count)]


def test_no_faults_by_default() -> None:
    assert chosen(Faults(), 100) == [None] * 100


def test_rates_are_met_and_come_from_the_seed() -> None:
    faults = Faults(rates={"error_500": 0.2, FaultKind.RESET: 0.1, "hang": 0.0})
    counts = Counter(chosen(faults, 20_000, seed=1))
    assert counts["error_500"] / 20_000 == pytest.approx(0.2, abs=0.01)
    assert counts["reset"] / 20_000 == pytest.approx(0.1, abs=0.01)
    assert counts["hang"] == 0
    assert chosen(faults, 500, seed=1) == chosen(faults, 500, seed=1)
    assert chosen(faults, 500, seed=1) != chosen(faults, 500, seed=2)


def test_rates_that_add_up_to_one_leave_no_good_answer() -> None:
    assert None not in chosen(Faults(rates={"error_500": 0.5, "reset": 0.5}), 1_000)


def test_the_script_goes_first_and_then_the_rates() -> None:
    faults = Faults(script=["reset", None, "hang"], rates={"error_500": 1.0})
    assert chosen(faults, 5) == ["reset", None, "hang", "error_500", "error_500"]


def test_a_callable_script_covers_every_request() -> None:
    faults = Faults(script=lambda k: "error_503" if k % 3 == 0 else None)
    assert chosen(faults, 7) == ["error_503", None, None, "error_503", None, None, "error_503"]


def test_an_outage_goes_before_everything_and_is_half_open() -> None:
    faults = Faults(script=["reset"] * 4, outages=[Outage(10.0, 20.0), Outage(15.0, 30.0, "hang")])
    plan = FaultPlan(faults, random.Random(0))
    assert [str(plan.choose(at)) for at in (9.9, 10.0, 19.9, 20.0, 30.0)] == [
        "reset",
        "error_503",
        "error_503",
        "hang",
        "None",
    ]


def test_an_outage_does_not_shift_what_later_requests_meet() -> None:
    rates = {"error_500": 0.3}
    plan = FaultPlan(Faults(rates=rates, outages=[Outage(0.0, 1.0)]), random.Random(7))
    with_outage = [plan.choose(0.5 if index < 50 else 2.0) for index in range(200)]
    without = chosen(Faults(rates=rates), 200, seed=7)
    assert [None if kind is None else kind.value for kind in with_outage[50:]] == without[50:]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"rates": {"eror_500": 0.1}}, "did you mean error_500"),
        ({"rates": {"error_500": 1.1}}, "between 0 and 1"),
        ({"rates": {"error_500": float("nan")}}, "between 0 and 1"),
        ({"rates": {"error_500": 0.7, "reset": 0.7}}, "add up to 1.400"),
        ({"script": ["resett"]}, "did you mean reset"),
        ({"script": "reset"}, "write \\['reset'\\]"),
        ({"script": lambda k: None, "rates": {"reset": 0.1}}, "omit the rates"),
        ({"huge_bytes": -1}, "huge_bytes"),
        ({"drip_interval_s": float("nan")}, "drip_interval_s"),
    ],
)
def test_mistakes_in_the_faults_are_said(settings: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Faults(**settings)


def test_mistakes_in_an_outage_are_said() -> None:
    with pytest.raises(ValueError, match="start_s < end_s"):
        Outage(5.0, 5.0)
    with pytest.raises(ValueError, match="unknown fault"):
        Outage(0.0, 5.0, "nap")


def test_every_kind_has_a_name_a_stage_and_a_sentence() -> None:
    assert len({kind.says for kind in FaultKind}) == len(FaultKind)
    for kind in FaultKind:
        assert kind.value == kind.name.lower() == str(kind)
        assert fault_kind(kind.value) is kind is fault_kind(kind)
        assert kind.stage in ("status", "connection", "reply", "verdict", "stream", "list")
        assert kind.has_answer == (kind.stage in ("reply", "verdict", "stream", "list"))


def test_latency_is_lognormal_with_stragglers() -> None:
    latency = Latency(median_s=2.0, sigma=0.5, stragglers=0.05, straggler_factor=10.0)
    rng = random.Random(3)
    drawn = sorted(latency.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(2.0 * math.exp(0.5 * 0.066), rel=0.03)
    assert sum(value > 12.0 for value in drawn) / 20_000 == pytest.approx(0.05 * 0.846, abs=0.006)


def test_latency_without_spread_is_constant_and_keeps_the_seed_in_step() -> None:
    first, second = random.Random(5), random.Random(5)
    assert [Latency(median_s=0.25).draw(first) for _ in range(10)] == [0.25] * 10
    for _ in range(10):
        Latency(median_s=1.0, sigma=1.0, stragglers=0.5).draw(second)
    assert first.getstate() == second.getstate()


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"median_s": -1.0}, "median_s"),
        ({"sigma": float("inf")}, "sigma"),
        ({"stragglers": 1.5}, "share"),
        ({"straggler_factor": float("nan")}, "straggler_factor"),
    ],
)
def test_mistakes_in_the_latency_are_said(settings: dict, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Latency(**settings)
