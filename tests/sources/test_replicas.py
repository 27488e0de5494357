from __future__ import annotations

from contextlib import ExitStack

import pytest

from qreward_plugins.sources.replicas import COOL_OFF_S, Replicas


def used(replicas: Replicas, now: float = 0.0) -> str:
    with replicas.borrow(now) as replica:
        return replica.base_url


def test_ties_go_round() -> None:
    replicas = Replicas(["a", "b", "c"])
    assert [used(replicas) for _ in range(6)] == ["a", "b", "c", "a", "b", "c"]


def test_the_fewest_in_flight_is_next() -> None:
    replicas = Replicas(["a", "b"])
    with ExitStack() as stack:
        first = stack.enter_context(replicas.borrow(0.0))
        assert [used(replicas) for _ in range(3)] == ["b", "b", "b"]
        assert first.base_url == "a"
    assert first.in_flight == 0


def test_a_replica_that_failed_is_avoided_for_a_while() -> None:
    replicas = Replicas(["a", "b"])
    with replicas.borrow(0.0) as replica:
        replica.failed(0.0)
    assert {used(replicas, 1.0) for _ in range(4)} == {"b"}
    assert {used(replicas, COOL_OFF_S) for _ in range(2)} == {"a", "b"}


def test_when_all_failed_all_are_used() -> None:
    replicas = Replicas(["a", "b"])
    for _ in range(2):
        with replicas.borrow(0.0) as replica:
            replica.failed(0.0)
    assert {used(replicas, 1.0) for _ in range(2)} == {"a", "b"}


def test_a_replica_that_answers_again_is_used_again() -> None:
    replicas = Replicas(["a", "b"])
    with replicas.borrow(0.0) as replica:
        replica.failed(0.0)
        replica.answered()
    assert {used(replicas, 1.0) for _ in range(2)} == {"a", "b"}


def test_a_failure_in_an_earlier_event_loop_does_not_count() -> None:
    replicas = Replicas(["a", "b"])
    with replicas.borrow(1000.0) as replica:
        replica.failed(1000.0)
    assert {used(replicas, 1.0) for _ in range(2)} == {"a", "b"}


def test_in_flight_is_counted_down_after_an_error() -> None:
    replicas = Replicas(["a"])
    with pytest.raises(ValueError, match="x"), replicas.borrow(0.0) as replica:
        raise ValueError("x")
    assert replica.in_flight == 0
