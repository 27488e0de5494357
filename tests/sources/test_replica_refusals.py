"""One replica refuses a request: another one decides whether the request or that replica is at fault."""

from __future__ import annotations

import asyncio
import logging

import pytest

from qreward_plugins.config.source_models import Routing
from qreward_plugins.errors import InvalidReply, PermanentError, SourceUnusable, Throttled, TransientError
from qreward_plugins.sources.lease import Lease, RoutingHints
from qreward_plugins.sources.replica import FIRST_BACKOFF_S, FIRST_CALLS, IN_A_ROW, START_S, Mark, Replica
from qreward_plugins.sources.replicas import Replicas
from qreward_plugins.sources.tried_replicas import MOST_REFUSALS, TriedReplicas

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
        refusal = TriedReplicas()
        refusal.refused_by(replicas.all[0], "refused", began_at=0.0)
        assert ask(replicas, None, refusal) == ("b", None)
        replicas.mark("a", "down")
        replicas.mark("a", "up")
        assert health(replicas) == ["up", "up"]
    assert len(caplog.messages) == 2


def test_what_all_refuse_is_at_fault_and_the_replicas_are_not() -> None:
    replicas = of("a", "b", "c")
    asked, refusal = [], None
    for _ in range(3):
        url, refusal = ask(replicas, REFUSED, refusal)
        asked.append(url)
    assert (sorted(asked), refusal) == (["a", "b", "c"], None)
    assert health(replicas) == ["up", "up", "up"]
    assert failures(replicas) == [0, 0, 0]


def test_what_two_refuse_that_answer_others_is_at_fault() -> None:
    replicas = of("a", "b", "c", "d")
    assert {ask(replicas)[0] for _ in range(4)} == {"a", "b", "c", "d"}
    _, refusal = ask(replicas, REFUSED, now=1.0)
    assert refusal is not None
    _, refusal = ask(replicas, REFUSED, refusal, now=1.0)
    assert refusal is None


def test_what_many_refuse_is_at_fault() -> None:
    replicas = of(*(str(number) for number in range(MOST_REFUSALS + 2)))
    refusal = None
    for _ in range(MOST_REFUSALS):
        _, refusal = ask(replicas, REFUSED, refusal)
    assert refusal is None


def test_two_that_refuse_everything_do_not_decide() -> None:
    """They answered before, and were started again with another checkpoint, which nobody noticed."""
    replicas = of("a", "b", "c")
    assert {ask(replicas)[0] for _ in range(3)} == {"a", "b", "c"}
    a, b, _ = replicas.all
    for broken in (a, b):
        for _ in range(IN_A_ROW):
            broken.refused(1.0, began_at=1.0)
    refusal = TriedReplicas()
    for broken in (a, b):
        refusal.refused_by(broken, "refused", began_at=1.0)
    assert not refusal.is_at_fault(replicas.all, more_later=False)
    assert ask(replicas, None, refusal, now=1.0) == ("c", None)
    assert failures(replicas) == [1, 1, 0]


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


def test_a_replica_that_answers_others_decides_while_the_others_are_down() -> None:
    replicas = of("a", "b")
    assert ask(replicas) == ("a", None)
    replicas.mark("b", "down")
    assert ask(replicas, REFUSED, now=1.0) == ("a", None)
    assert health(replicas, 1.0) == ["up", "down"]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("mark", ["draining", "down"])
def test_a_replica_that_answers_nobody_does_not_decide_while_the_others_are_away(known: bool, mark: Mark) -> None:
    """An update of the weights drains one replica after the other. `known`: a warning has named it."""
    replicas = of("a", "b")
    if known:
        _, refusal = ask(replicas, REFUSED)
        assert ask(replicas, None, refusal) == ("b", None)
    replicas.mark("b", mark)
    url, refusal = ask(replicas, REFUSED)
    assert (url, refusal is None) == ("a", False)
    with pytest.raises(TransientError, match=r"answered 400 \(too long\); other replicas are not up"):
        ask(replicas, None, refusal)
    replicas.mark("b", "up")
    assert ask(replicas, None, refusal) == ("b", None)


def test_a_replica_that_answers_nobody_does_not_decide_while_the_others_have_no_server() -> None:
    """A pool that restarts a server, or loads other weights by that, knows no URL of it meanwhile."""
    replicas = of("a")
    replicas.absent = 1
    assert replicas.several
    _, refusal = ask(replicas, REFUSED)
    with pytest.raises(TransientError, match=r"too long.*other replicas are not up"):
        ask(replicas, None, refusal)
    replicas.add("b")
    replicas.absent = 0
    assert ask(replicas, None, refusal) == ("b", None)
    # Of one that is not started again, nothing is to be expected.
    replicas = of("a")
    replicas.absent = 1
    _, refusal = ask(replicas, REFUSED)
    replicas.absent = 0
    assert ask(replicas, REFUSED, refusal) == ("a", None)


def test_a_replica_that_answers_others_meanwhile_decides_where_the_others_stay_away() -> None:
    replicas = of("a", "b")
    replicas.mark("b", "down")
    _, refusal = ask(replicas, REFUSED, now=1.0)
    assert refusal is not None
    assert ask(replicas, now=2.0) == ("a", None)
    assert ask(replicas, REFUSED, refusal, now=3.0) == ("a", None)
    _, refusal = ask(of("a", "b"), REFUSED)
    replicas.remove("b")
    assert ask(replicas, REFUSED, refusal) == ("a", None)


def test_a_replica_that_does_not_answer_does_not_decide() -> None:
    """The third one decides; where there is none, the second one is asked again, never the first."""
    replicas = of("a", "b", "c")
    _, refusal = ask(replicas, REFUSED)
    assert ask(replicas, TransientError("502"), refusal)[0] == "b"
    assert ask(replicas, None, refusal) == ("c", None)
    assert failures(replicas) == [1, 1, 0]

    replicas = of("a", "b")
    replicas.answered(1.0)
    _, refusal = ask(replicas, REFUSED)
    lease = replicas.acquire(0.0, RoutingHints(tried=refusal))  # type: ignore[arg-type]
    lease.release()
    lease.cancelled(60.0)  # it hangs
    assert lease.base_url == "b"
    assert health(replicas, 60.0) == ["up", "backing_off"]
    assert ask(replicas, TransientError("502"), refusal, now=60.0) == ("b", None)
    assert ask(replicas, None, refusal, now=60.0) == ("b", None)
    assert failures(replicas) == [1, 2]


def test_a_replica_that_refused_and_answers_others_decides_if_no_other_one_answers() -> None:
    replicas = of("a", "b")
    _, refusal = ask(replicas, REFUSED, now=1.0)
    assert ask(replicas, TransientError("502"), refusal, now=1.0) == ("b", None)
    replicas.all[0].answered(2.0)
    assert ask(replicas, REFUSED, refusal, now=3.0) == ("a", None)


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
    replicas.remove("b")
    assert ask(replicas, None, refusal) == ("a", None)
    assert failures(replicas) == [0]


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


def test_invalid_replies_in_a_row_make_a_replica_suspect_until_one_is_valid(caplog: pytest.LogCaptureFixture) -> None:
    """Its checkpoint or its chat template is broken, so that it answers everybody with nonsense."""
    replicas = of("a", "b")
    leases = [replicas.acquire(0.0) for _ in range(2 * IN_A_ROW)]
    broken = [lease for lease in leases if lease.base_url == "a"]
    for lease in leases:
        lease.release()
    for lease in broken:
        assert replicas.all[0].takes_calls(0.0)
        lease.answered(0.0)
        asked = lease.judged(False, 0.0)
        assert isinstance(asked, TriedReplicas)
        assert ask(replicas, None, asked) == ("b", None)
    assert {ask(replicas)[0] for _ in range(9)} == {"b"}
    now = FIRST_BACKOFF_S
    trials = [lease for lease in (replicas.acquire(now) for _ in range(9)) if lease.base_url == "a"]
    assert len(trials) == 1
    trials[0].answered(now)
    assert replicas.all[0].is_trusted is False
    trials[0].judged(True, now)
    assert replicas.all[0].is_trusted is True
    assert failures(replicas) == [0, 0]
    (said,) = caplog.messages
    assert said.startswith("the last replies of the replica a were invalid, and the replica b gives a valid one")


def test_a_replica_that_has_just_come_up_gets_a_few_calls_until_one_has_ended() -> None:
    replica = Replica("a")
    for number in range(FIRST_CALLS):
        assert replica.takes_calls(5.0)
        replica.began(number, 1, None, 0, 5.0)
    assert not replica.takes_calls(5.0)
    assert replica.starts_in_s(5.1) == pytest.approx(START_S - 0.1)
    assert replica.takes_calls(5.0 + START_S)
    replica.ended(0, 1)
    replica.began("another", 1, None, 0, 5.1)
    replica.answered(5.1)
    assert replica.takes_calls(5.1)
    replica.reset()
    assert replica.takes_calls(5.2)
    replica.began("first", 1, None, 0, 5.2)
    assert not replica.takes_calls(5.2)


@pytest.mark.anyio
async def test_calls_wait_while_all_replicas_have_just_come_up() -> None:
    loop = asyncio.get_running_loop()
    replicas = of("a", "b")
    began_at = loop.time()
    leases = [await replicas.admit(RoutingHints()) for _ in range(2 * FIRST_CALLS)]
    waiting = [asyncio.ensure_future(replicas.admit(RoutingHints())) for _ in range(4)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    more = await asyncio.gather(*waiting[1:])
    assert loop.time() - began_at >= START_S - 0.02
    for lease in (*leases, *more):
        lease.release()
    assert [replica.in_flight for replica in replicas.all] == [0, 0]
    assert await replicas.admit(RoutingHints())


def test_one_that_refused_several_may_yet_answer_the_calls_that_it_has() -> None:
    replica = Replica("a/v1")
    for at in range(IN_A_ROW):
        replica.refused(float(at), began_at=float(at))
    assert replica.refuses_all
    replica.began("another call", 1, None, 1, 9.0)
    assert not replica.refuses_all
    replica.ended("another call", 1)
    assert replica.refuses_all


def test_what_one_refuses_alone_never_decides() -> None:
    replica = Replica("a/v1")
    replica.answered(5.0)
    assert replica.answers_others(1.0)
    replica.refuses_alone = True
    assert not replica.answers_others(1.0)


def test_refusals_of_calls_that_began_before_an_answer_are_not_in_a_row() -> None:
    replica = Replica("a/v1")
    replica.answered(1.0)
    for _ in range(IN_A_ROW):
        replica.refused(2.0, began_at=0.0)
    assert not replica.refuses_all
    assert replica.takes_calls(2.0)


def test_invalid_replies_keep_one_suspect_whose_refusal_was_right() -> None:
    replica = Replica("a/v1")
    for _ in range(IN_A_ROW):
        replica.judged(False, 0.0)
    replica.refused(0.0, began_at=-1.0)
    replica.refusal_confirmed()
    assert not replica.takes_calls(FIRST_BACKOFF_S / 2)


def test_a_refused_call_goes_to_a_trusted_replica_before_one_that_is_tried_out() -> None:
    replicas = of("a/v1", "b/v1", "c/v1")
    _, refusal = ask(replicas, REFUSED)
    on_trial, trusted = replicas.all[1:]
    on_trial.failed(0.0, began_at=0.0)
    now = 10 * FIRST_BACKOFF_S
    assert on_trial.takes_calls(now)
    # By its load alone, the other one would be chosen.
    trusted.began("another call", 1, None, 1, now)
    assert replicas.acquire(now, RoutingHints(tried=refusal)).base_url == "c/v1"  # type: ignore[arg-type]
