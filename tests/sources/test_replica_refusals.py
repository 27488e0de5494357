"""One replica refuses a request: a second one decides whether the request or the first replica is at fault."""

from __future__ import annotations

import logging

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import InvalidReply, PermanentError, Throttled, TransientError
from qreward_plugins.sources.replica import FIRST_BACKOFF_S, INVALID_IN_A_ROW
from qreward_plugins.sources.replicas import Lease, Replicas, RoutingHints, TriedReplicas

REFUSED = PermanentError("source 's' (a/v1) answered 400 (too long)", status=400)


def of(*urls: str) -> Replicas:
    return Replicas(urls, Routing(strategies=("least_requests",)), name="s")


def ask(
    replicas: Replicas, end: Exception | None = None, refusal: object = None, *, now: float = 0.0
) -> tuple[str, object]:
    """Ask one replica, which answers or ends with `end`. Return its URL and the refusal that another is to decide."""
    lease = replicas.acquire(now, RoutingHints(tried=refusal))  # type: ignore[arg-type]
    return lease.base_url, read(lease, end, now)


def read(lease: Lease, end: Exception | None, now: float) -> object:
    def reply() -> None:
        if end is not None:
            raise end

    lease.release()
    try:
        lease.read(now, reply)
    except PermanentError as error:
        return error.refusal
    except (TransientError, Throttled, InvalidReply):
        return None
    return lease.judged(True, now)


def health(replicas: Replicas, now: float = 0.0) -> list[str]:
    return [replica.health(now) for replica in replicas.all]


def failures(replicas: Replicas) -> list[int]:
    return [shown.failures for shown in replicas.statistics(0.0)]


def test_a_replica_that_refuses_what_another_answers_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    replicas = of("a", "b")
    url, refusal = ask(replicas, REFUSED)
    assert url == "a"
    assert isinstance(refusal, TriedReplicas)
    assert (health(replicas), failures(replicas)) == (["backing_off", "up"], [0, 0])
    with caplog.at_level(logging.WARNING, "qreward_plugins.sources"):
        assert ask(replicas, None, refusal) == ("b", None)
        assert (health(replicas), failures(replicas)) == (["backing_off", "up"], [1, 0])
        assert {ask(replicas)[0] for _ in range(4)} == {"b"}
        for now in (10.0, 100.0):
            url, refusal = ask(replicas, REFUSED, now=now)
            assert url == "a"
            assert ask(replicas, None, refusal, now=now) == ("b", None)
    (said,) = caplog.messages
    assert said.startswith("source 's' (a/v1) answered 400 (too long), and the replica b answers the same request")


def test_a_replica_that_was_restarted_is_warned_of_again(caplog: pytest.LogCaptureFixture) -> None:
    replicas = of("a", "b")
    for _ in range(2):
        url, refusal = ask(replicas, REFUSED)
        assert (url, ask(replicas, None, refusal)) == ("a", ("b", None))
        replicas.mark("a", "down")
        replicas.mark("a", "up")
        assert health(replicas) == ["up", "up"]
    assert len(caplog.messages) == 2


def test_what_two_refuse_is_at_fault_and_the_replicas_are_not() -> None:
    replicas = of("a", "b", "c")
    first, refusal = ask(replicas, REFUSED)
    second, refusal = ask(replicas, REFUSED, refusal)
    assert (first, second, refusal) == ("a", "b", None)
    assert (health(replicas), failures(replicas)) == (["up"] * 3, [0] * 3)


@pytest.mark.parametrize("end", [Throttled("429"), InvalidReply("content filter")])
def test_an_end_that_is_neither_decides_nothing(end: Exception) -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, end, refusal) == ("b", None)
    assert failures(replicas) == [0, 0]


def test_where_no_other_one_answers_the_refusal_decides() -> None:
    assert ask(of("a"), REFUSED) == ("a", None)
    replicas = of("a", "b")
    replicas.mark("b", "down")
    assert ask(replicas, REFUSED) == ("a", None)
    assert health(replicas) == ["up", "down"]


def test_a_replica_that_answers_others_meanwhile_is_not_avoided() -> None:
    """It has a smaller context, and refuses only the long ones."""
    replicas = of("a", "b")
    with replicas.acquire(0.5) as other, replicas.acquire(0.5):
        url, refusal = ask(replicas, REFUSED, now=1.0)
        assert url == other.base_url == "a"
        other.answered(2.0)
    assert {ask(replicas, now=2.0)[0] for _ in range(2)} == {"a", "b"}
    ask(replicas, None, refusal, now=3.0)
    assert (health(replicas, 3.0), failures(replicas)) == (["up", "up"], [1, 0])


def test_a_replica_whose_replies_are_invalid_is_avoided_until_one_is_valid() -> None:
    """Its checkpoint or its chat template is broken, so that it answers everybody with nonsense."""
    replicas = of("a", "b")
    leases = [replicas.acquire(0.0) for _ in range(2 * INVALID_IN_A_ROW)]
    broken = [lease for lease in leases if lease.base_url == "a"]
    for lease in leases:
        lease.release()
    for lease in broken:
        lease.answered(0.0)
        asked = lease.judged(False, 0.0)
        assert isinstance(asked, TriedReplicas)
        assert ask(replicas, None, asked) == ("b", None)
    assert {ask(replicas)[0] for _ in range(9)} == {"b"}
    now = FIRST_BACKOFF_S
    [trial] = [lease for lease in (replicas.acquire(now) for _ in range(9)) if lease.base_url == "a"]
    trial.answered(now)
    assert health(replicas, now) == ["half_open", "up"]
    trial.judged(True, now)
    assert health(replicas, now) == ["up", "up"]
