"""One replica refuses a request: another one decides whether the request or that replica is at fault."""

from __future__ import annotations

import logging

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import (
    InvalidReply,
    PermanentError,
    SourceUnusable,
    Throttled,
    TransientError,
)
from qreward_plugins.sources.base import ServedWeights
from qreward_plugins.sources.lease import Lease, RoutingHints
from qreward_plugins.sources.replica import FIRST_BACKOFF_S, Refusal
from qreward_plugins.sources.replicas import Replicas

REFUSED = PermanentError("source 's' (a/v1) answered 400 (too long)", status=400)


def of(*urls: str) -> Replicas:
    return Replicas(urls, Routing(strategies=("least_requests",)), name="s")


def ask(
    replicas: Replicas, end: Exception | None = None, refusal: object = None, *, now: float = 0.0, group: str = ""
) -> tuple[str, object]:
    """Ask one replica, which answers or ends with `end`. Return its URL and the refusal that another is to decide."""
    lease = replicas.acquire(now, RoutingHints(group=group, refusal=refusal))  # type: ignore[arg-type]
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
        pass
    return None


def raised(error: Exception) -> None:
    raise error


def health(replicas: Replicas, now: float = 0.0) -> list[str]:
    return [replica.health(now) for replica in replicas.all]


def failures(replicas: Replicas) -> list[int]:
    return [shown.failures for shown in replicas.statistics(0.0)]


def test_a_replica_that_refuses_what_another_answers_has_failed(caplog: pytest.LogCaptureFixture) -> None:
    replicas = of("a", "b")
    url, refusal = ask(replicas, REFUSED)
    assert url == "a"
    assert isinstance(refusal, Refusal)
    assert (health(replicas), failures(replicas)) == (["up", "up"], [0, 0])
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
        refusal = Refusal(replicas.all[0], "refused", began_at=0.0)
        assert ask(replicas, None, refusal) == ("b", None)
        replicas.mark("a", "down")
        replicas.mark("a", "up")
        assert health(replicas) == ["up", "up"]
    assert len(caplog.messages) == 2


def test_what_both_refuse_is_at_fault_and_the_replicas_are_not() -> None:
    replicas = of("a", "b", "c")
    url, refusal = ask(replicas, REFUSED)
    other, final = ask(replicas, REFUSED, refusal)
    assert (url, final) == ("a", None)
    assert other != "a"
    assert health(replicas) == ["up", "up", "up"]
    assert failures(replicas) == [0, 0, 0]


@pytest.mark.parametrize("end", [Throttled("429"), InvalidReply("content filter")])
def test_an_end_that_is_neither_decides_nothing(end: Exception) -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, end, refusal) == ("b", None)
    assert failures(replicas) == [0, 0]
    assert ask(replicas, None, refusal) == ("b", None)
    assert failures(replicas) == [1, 0]


def test_a_source_that_is_closed_is_no_refusal_of_one_replica() -> None:
    assert ask(of("a", "b"), SourceUnusable("closed", certain=True))[1] is None


def test_the_only_replica_decides() -> None:
    assert ask(of("a"), REFUSED) == ("a", None)
    replicas = of("a", "b")
    replicas.mark("b", "down")
    assert ask(replicas, REFUSED) == ("a", None)
    assert health(replicas) == ["up", "down"]


def test_a_replica_that_refuses_alone_does_not_decide_while_the_others_are_drained() -> None:
    """An update of the weights drains one replica after the other."""
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, None, refusal) == ("b", None)
    replicas.mark("b", "draining")
    lease = replicas.acquire(0.0)
    with pytest.raises(TransientError, match=r"400 \(too long\), but it refuses what other replicas answer"):
        lease.read(0.0, lambda: raised(REFUSED))
    replicas.remove("b")
    lease = replicas.acquire(0.0)
    with pytest.raises(PermanentError) as final:
        lease.read(0.0, lambda: raised(REFUSED))
    assert final.value.refusal is None


def test_the_only_replica_with_the_weights_of_a_group_decides() -> None:
    replicas = of("a", "b", "c")
    for url in ("a", "b", "c"):
        replicas.serves(url, ServedWeights("new", "2") if url == "a" else ServedWeights("old", "1"))
    assert ask(replicas, REFUSED, group="g") == ("a", None)
    url, refusal = ask(replicas, REFUSED, group="h")
    assert (url, refusal is None) == ("b", False)
    assert ask(replicas, None, refusal, group="h") == ("c", None)
    assert failures(replicas) == [0, 1, 0]


def test_a_replica_that_does_not_answer_does_not_decide() -> None:
    """The third one decides; where there is none, the second one is asked again, never the first."""
    replicas = of("a", "b", "c")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, TransientError("502"), refusal)[0] == "b"
    assert ask(replicas, None, refusal) == ("c", None)
    assert failures(replicas) == [1, 1, 0]

    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    lease = replicas.acquire(0.0, RoutingHints(refusal=refusal))  # type: ignore[arg-type]
    lease.release()
    lease.cancelled(60.0)  # it hangs
    assert lease.base_url == "b"
    assert health(replicas, 60.0) == ["up", "backing_off"]
    assert ask(replicas, TransientError("502"), refusal, now=60.0) == ("b", None)
    assert ask(replicas, None, refusal, now=60.0) == ("b", None)
    assert failures(replicas) == [1, 2]
    replicas.mark("b", "down")
    assert ask(replicas, REFUSED, refusal, now=60.0) == ("a", None)


def test_a_replica_that_refused_gets_one_request_at_a_time_until_that_is_decided() -> None:
    """A broken one refuses sooner than others answer: it would get most requests before the first is decided."""
    replicas = of("a", "b")
    url, _ = ask(replicas, REFUSED)
    assert url == "a"
    assert {ask(replicas)[0] for _ in range(4)} == {"b"}
    now = FIRST_BACKOFF_S
    leases = [replicas.acquire(now) for _ in range(6)]
    assert sorted(lease.base_url for lease in leases) == ["a", *"bbbbb"]
    (trial,) = (lease for lease in leases if lease.base_url == "a")
    assert read(trial, REFUSED, now) is not None
    assert {ask(replicas, now=now + 0.9)[0] for _ in range(4)} == {"b"}
    now = 2 * FIRST_BACKOFF_S
    assert ask(replicas, now=now) == ("a", None)
    assert {ask(replicas, now=now)[0] for _ in range(4)} == {"a"}, "b has requests under way"


def test_a_replica_that_refused_rightly_goes_on_at_once() -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, REFUSED, refusal) == ("b", None)
    assert {ask(replicas)[0] for _ in range(2)} == {"a", "b"}


def test_replicas_that_all_refused_are_all_asked() -> None:
    replicas = of("a", "b")
    assert {ask(replicas, REFUSED)[0] for _ in range(2)} == {"a", "b"}
    assert {replicas.acquire(0.0).base_url for _ in range(2)} == {"a", "b"}


def test_a_replica_that_failed_decides_if_it_is_the_only_other_one() -> None:
    """Otherwise one that refuses quickly would refuse everything while the other one is avoided."""
    replicas = of("a", "b")
    for _ in range(2):
        with replicas.acquire(0.0) as lease:
            if lease.base_url == "b":
                lease.failed(0.0)
    url, refusal = ask(replicas, REFUSED)
    assert (url, ask(replicas, None, refusal)) == ("a", ("b", None))
    assert health(replicas) == ["backing_off", "up"]


def test_the_replica_that_refused_may_answer_when_nobody_else_can() -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    replicas.mark("b", "down")
    assert ask(replicas, None, refusal) == ("a", None)
    assert failures(replicas) == [0, 0]


def test_a_half_open_replica_that_refuses_is_avoided_for_as_long_again() -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED)
    ask(replicas, None, refusal)
    now = FIRST_BACKOFF_S
    leases = [replicas.acquire(now) for _ in range(2)]
    trial = next(lease for lease in leases if lease.base_url == "a")
    assert replicas.all[0].health(now) == "half_open"
    refusal = read(trial, REFUSED, now + 0.1)
    assert replicas.all[0].health(now + 0.1 + 0.9 * FIRST_BACKOFF_S) == "backing_off"
    # The other one has answered: a failure in a row more.
    ask(replicas, None, refusal, now=now + 0.5)
    assert replicas.all[0].health(now + 0.5 + 1.9 * FIRST_BACKOFF_S) == "backing_off"
    assert replicas.all[0].health(now + 0.5 + 2.0 * FIRST_BACKOFF_S) == "half_open"


def test_a_replica_that_answers_others_meanwhile_is_not_avoided() -> None:
    """It has a smaller context, and refuses only the long ones."""
    replicas = of("a", "b")
    with replicas.acquire(0.5) as other, replicas.acquire(0.5):
        url, refusal = ask(replicas, REFUSED, now=1.0)
        assert url == other.base_url == "a"
        other.answered(2.0)
    assert {ask(replicas, now=2.0)[0] for _ in range(2)} == {"a", "b"}
    ask(replicas, None, refusal, now=3.0)
    assert health(replicas, 3.0) == ["up", "up"]
    assert failures(replicas) == [1, 0]


def test_a_refusal_is_decided_once() -> None:
    replicas = of("a", "b", "c")
    _, refusal = ask(replicas, REFUSED)
    for _ in range(2):
        ask(replicas, None, refusal)
    assert failures(replicas) == [1, 0, 0]
