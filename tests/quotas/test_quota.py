"""One quota, asked and used as the scheduler does, and that of a source whose limits many processes share."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins.config import Limits
from qreward_plugins.quotas.pace import JITTER_S
from qreward_plugins.quotas.quota import Quota
from qreward_plugins.quotas.shared import SharedQuota
from qreward_plugins.quotas.tokens import Demand, Texture, TokenEstimates
from qreward_plugins.quotas.window_limit import MARGIN_S
from qreward_plugins.samples.spent import Usage

from ..kit import each_of


def quota(**limits: object) -> Quota:
    return Quota(Limits.model_validate(limits), source="a")


@pytest.mark.parametrize("window", ["sliding", "auto"])
def test_retuning_paces_at_the_new_rate(window):
    subject = quota(requests_per_minute=60, window="bucket")
    subject.reserve(0, 0, 0.0).release(0.0)
    subject.retune(Limits(requests_per_minute=6, window="bucket"), 0.0)
    assert subject.wait_s(0, 0.0) == pytest.approx(10.0 + MARGIN_S)
    subject.retune(Limits(requests_per_minute=600, window=window), 0.0)
    assert subject.wait_s(0, 0.0) == 0


def test_a_bucket_is_spent_by_what_is_not_written_yet():
    subject = quota(requests_per_minute=60, window="bucket", burst=2)
    for _ in range(2):
        subject.reserve(0, 0, 0.0)
    assert subject.wait_s(0, 0.0) > 0.5


def test_less_than_one_request_a_window_is_one_in_a_longer_window():
    subject = quota(requests_per_minute=6, window_s=1)
    subject.reserve(0, 0, 0.0).release(0.0)
    assert subject.wait_s(0, 0.0) == pytest.approx(10 + MARGIN_S)


def throttled(subject: Quota, *times: float, age_s: float = 0.0) -> list[bool]:
    return [bool(subject.throttled(at, sent_at=at - age_s, retry_after_s=None)) for at in times]


def test_auto_changes_to_pacing_only_when_throttled_clearly_below_the_limit():
    subject = quota(requests_per_minute=60, concurrency=20)
    for _ in range(60):
        subject.reserve(0, 0, 0.0).release(0.0)
    assert throttled(subject, *[1.0, 1.1, 1.2, 1.3]) == [False] * 4
    assert not subject.use(1.0).paced
    assert throttled(subject, 200.0, 200.1, 200.2) == [False, False, True]
    subject.reserve(0, 0, 200.2).release(200.2)
    assert subject.wait_s(0, 200.2) == pytest.approx(1.0 + JITTER_S)
    assert subject.capacity(210.7 + 10 * JITTER_S, 0, 200.2) == 10


def test_three_throttles_within_a_window_are_evidence_and_pacing_is_on_trial():
    subject = quota(requests_per_minute=600, concurrency=20)
    assert throttled(subject, 0.0, 61.0, 100.0, 120.0) == [False, False, False, True]
    assert [subject.use(at).paced for at in (239.0, 240.0)] == [True, False]
    throttled(subject, 241.0, 242.0, 243.0)
    assert [subject.use(at).paced for at in (482.0, 483.0)] == [True, False], "twice as long"
    throttled(subject, 9000.0, 9001.0, 9002.0)
    assert [subject.use(at).paced for at in (9121.0, 9122.0)] == [True, False], "the trial before was too long ago"


def test_the_429s_of_one_burst_or_of_an_outage_are_one_proof_of_a_bucket():
    burst, outage = (quota(requests_per_minute=600, concurrency=20) for _ in range(2))
    assert not any(throttled(burst, 0.1, 0.11, 0.12, 0.13, 0.14, age_s=0.2))
    for at in (1.0, 2.0, 3.0, 4.0):
        outage.reserve(0, 0, at).release(at, rejected=True)  # no other is in flight, and none was answered
        assert throttled(outage, at) == [False]


def test_a_bucket_is_found_again_after_reloads_that_paced_for_good_and_then_never():
    subject = quota(requests_per_minute=60, window="bucket")
    for number, window in enumerate(("sliding", "auto")):
        subject.retune(Limits(requests_per_minute=60, window=window), float(number))
    assert throttled(subject, 2.0, 3.0, 4.0) == [False, False, True]


@pytest.mark.parametrize(
    ("limits", "spent", "in_flight", "times"),
    [
        ({}, 0, 0, [100.0 * number for number in range(20)]),  # now and then over a long run
        ({"tokens_per_minute": 1000}, 950, 0, [1.0, 1.1, 1.2, 1.3]),  # the tokens explain it
        ({"concurrency": 10}, 0, 8, [1.0, 1.1, 1.2, 1.3]),  # what is in flight explains it
        ({"concurrency": None}, 0, 31, [1.0, 1.1, 1.2, 1.3]),
        ({"window": "sliding"}, 0, 0, [1.0, 1.1, 1.2, 1.3]),
    ],
)
def test_what_is_no_evidence_for_pacing(limits, spent, in_flight, times):
    subject = quota(**{"requests_per_minute": 600, "concurrency": 20, **limits})
    subject.reserve(spent, 0, 0.0).release(0.0)
    for _ in range(in_flight):
        subject.reserve(0, 0, 0.0).sent(0.0)
    throttled(subject, *times)
    assert not subject.use(times[-1]).paced


def test_what_was_rejected_stays_spent_under_a_declared_limit_only():
    declared, learned = quota(requests_per_minute=60, tokens_per_minute=6000), quota()
    for subject in (declared, learned):
        reservation = subject.reserve(100, 400, 0.0)
        reservation.sent(0.0)
        reservation.release(0.1, rejected=True)
    assert (declared.requests.spent(1.0), declared.tokens.spent(1.0)) == (1, 100)
    assert (learned.requests.spent(1.0), learned.tokens.spent(1.0)) == (0, 0)
    learned.retune(Limits(requests_per_minute=60), 2.0)  # now it counts
    assert (learned.requests.spent(2.0), learned.tokens.spent(2.0)) == (1, 0)


def announce(subject, now, limit, *, remaining=10.0, times=3, unit="requests"):
    """So many replies that announce a limit; the words about them."""
    said = {f"{unit}_per_window": float(limit), f"{unit}_remaining": float(remaining)}
    return "; ".join(filter(None, [subject.announced(said, now) for _ in range(times)])) or None


def test_what_a_server_announces_does_not_change_a_declared_limit_and_a_lower_one_is_told_once():
    subject = quota(requests_per_minute=600)
    assert announce(subject, 0.0, 6000) is None
    assert announce(subject, 1.0, 300, times=2) is None  # two replies are no witnesses enough
    assert announce(subject, 2.0, 300) == "the server announces a limit of 300 requests, below the declared 600"
    assert announce(subject, 3.0, 300) is None
    assert subject.burst == 600


def test_the_lowest_of_several_announced_limits_applies():
    subject = quota()
    announce(subject, 0.0, 60)
    announce(subject, 1.0, 100)
    assert subject.burst == 60
    announce(subject, 2.0, 100, times=6)
    assert subject.burst == 100


def test_one_reply_does_not_make_the_window_of_a_limit_longer():
    subject = quota()
    said = {"requests_per_window": 60.0, "requests_remaining": 10.0}
    for _ in range(3):
        subject.announced(said, 0.0)
    for window_s in (60.0, 60.0, 3600.0):
        subject.announced({**said, "requests_reset_s": 3000.0}, 1.0)
        assert subject.per_window() == (60, window_s)


@given(
    said=st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                f"{unit}_{fact}": st.one_of(st.floats(-10, 1e12), st.sampled_from([0.0, 1.0, 86_400.0]))
                for unit in ("requests", "tokens")
                for fact in ("per_window", "remaining", "reset_s")
            },
        ),
        max_size=2,
    ),
    declared=st.sampled_from([{}, {"requests_per_minute": 60}, {"tokens_per_minute": 6000}]),
    before=st.integers(0, 12),
)
def test_what_two_replies_announce_stops_no_source(said, declared, before):
    """P11, for headers: everything may go that could go without them."""
    subject, untouched = quota(**declared), quota(**declared)
    for each in (subject, untouched):
        for _ in range(before):
            reservation = each.reserve(10, 10, 0.0)
            reservation.sent(0.0)
            reservation.release(1.0, prompt_tokens=10, completion_tokens=5)
    for announced in said:
        subject.announced(announced, 2.0)
    assert subject.wait_s(100, 2.0) <= untouched.wait_s(100, 2.0)
    assert subject.capacity(60.0, 100, 2.0) >= untouched.capacity(60.0, 100, 2.0)


def test_an_announced_limit_of_one_a_day_is_probed_within_a_minute_and_refuted():
    subject = quota()
    absurd = {"requests_per_window": 1.0, "requests_remaining": 0.0, "requests_reset_s": 86_400.0}
    now, sent_at = 0.0, []
    while now < 600 and len(sent_at) < 50:
        wait = subject.wait_s(0, now)
        assert wait <= 60
        now += wait
        reservation = subject.reserve(0, 0, now)
        reservation.sent(now)
        sent_at.append(now)
        now += 1.0
        reservation.release(now)
        subject.answered(now, sent_at=now - 1.0)
        subject.announced(absurd, now)
    assert len(sent_at) == 50
    assert sent_at[-1] < 400


def test_announced_tokens_are_learned_and_no_request_becomes_impossible():
    subject = quota()
    assert subject.announced({"tokens_per_window": 1000.0}, 0.0) is None
    subject.announced({"tokens_per_window": 1000.0}, 0.0)
    words = subject.announced({"tokens_per_window": 1000.0}, 0.0)
    assert words == "announced limit: 1000 tokens in 60 s"
    assert subject.most_tokens >= 5000
    assert subject.wait_s(5000, 0.0) == 0
    subject.reserve(400, 500, 0.0).release(0.0)
    assert subject.wait_s(101, 0.0) > 0
    assert subject.capacity(30.0, 100, 0.0) == 1
    assert subject.use(0.0).learned_tokens_per_minute == 1000


def test_what_ends_after_its_loop_was_closed_is_not_heard():
    subject = quota(requests_per_minute=60)
    late = subject.reserve(0, 0, 0.0)
    subject.forget_in_flight(1.0)
    subject.reserve(0, 0, 2.0)
    late.sent(3.0)
    late.release(4.0)
    assert subject.in_flight == 1
    assert subject.requests.spent(4.0) == 2
    assert subject.requests.spent(61.5 + MARGIN_S) == 1
    bucket = quota(requests_per_minute=60, window="bucket")
    bucket.reserve(0, 0, 0.0)
    bucket.forget_in_flight(1.0)
    assert bucket.wait_s(0, 1.0) > 0.9, "it may have been written"


def test_retuning_to_a_longer_window_remembers_what_the_shorter_one_forgot():
    subject = quota(requests_per_minute=600, window_s=1)
    for second in range(30):
        subject.reserve(0, 0, float(second)).release(float(second))
    subject.retune(Limits(requests_per_minute=30), 30.0)
    assert subject.wait_s(0, 30.0) == pytest.approx(30 + MARGIN_S)
    assert subject.per_window() == (30, 60.0)


def test_requests_without_an_answer_cut_a_learned_concurrency_and_no_declared_one():
    learned, declared = quota(), quota(concurrency=32)
    for subject in (learned, declared):
        held = [subject.reserve(0, 0, 0.0) for _ in range(32)]
        held[0].release(120.0)
        subject.timed_out(120.0, sent_at=0.0)
        held[1].release(120.0)
        subject.timed_out(120.0, sent_at=0.0)  # of the same burst: it teaches nothing new
    assert declared.concurrency == 32
    assert learned.concurrency == int(0.7 * 32)


@pytest.mark.parametrize(
    ("in_flight", "told", "size"),
    [
        (31, {"others": 2}, 32),  # these samples may be rejected for what they are
        (31, {"others": 3}, 22),
        (0, {"in_pause": True, "retry_after_s": 30.0}, 32),
        (31, {"in_pause": True}, 22),
    ],
)
def test_which_429s_cut_a_learned_concurrency(in_flight, told, size):
    subject = quota()
    for _ in range(in_flight):
        subject.reserve(0, 0, 0.0).sent(0.0)
    subject.throttled(1.0, sent_at=0.5, **{"retry_after_s": None, **told})
    assert (subject.concurrency, subject.use(1.0).learned_requests_per_minute) == (size, None)


def test_an_attempt_that_joins_a_request_takes_tokens_only():
    subject = quota(requests_per_minute=2, concurrency=1, tokens_per_minute=1000)
    request = subject.reserve(0, 0, 0.0)
    assert subject.wait_s(10, 0.0) == math.inf
    assert subject.wait_s(10, 0.0, shares_request=True) == 0
    members = [subject.reserve(300, 0, 0.0, shares_request=True) for _ in range(3)]
    assert subject.wait_s(101, 0.0, shares_request=True) > 0  # tokens are summed
    assert subject.in_flight == 1
    for held in (request, *members):
        held.sent(1.0)
    assert subject.requests.spent(1.0) == 1
    assert subject.tokens.spent(1.0) == 900
    for held in members:
        held.release(2.0, prompt_tokens=100, completion_tokens=0)
    assert subject.in_flight == 1  # the request goes on until its own reservation is released
    request.release(2.0)
    assert subject.in_flight == 0
    assert subject.tokens.spent(2.0) == 300
    assert subject.wait_s(0, 2.0) == 0


# A source whose limits many processes share: the ledgers keep to a share that changes


def shared(**limits):
    return SharedQuota(Limits.model_validate(limits), source="s")


def send(quota, count, now, tokens=0.0):
    for _ in range(count):
        assert quota.wait_s(tokens, now) == 0.0
        quota.reserve(tokens, 0.0, now).sent(now)


@each_of(
    ("limits", "share"),
    [
        ({"requests_per_minute": 10}, {}),
        ({"tokens_per_minute": 10}, {}),
        ({"concurrency": 10}, {}),
        ({"requests_per_minute": 10, "window": "bucket"}, {}),
        # A fraction of a request is none.
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 0.9, "concurrency": 9.0}),
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 9.0, "concurrency": 0.9}),
        ({"requests_per_minute": 60, "concurrency": 9}, {"requests": 9.0}),
    ],
)
def test_nothing_may_be_sent_without_a_share_of_each_limit_that_is_valid(limits, share):
    quota = shared(**limits)
    assert quota.wait_s(1.0, 0.0) == math.inf
    quota.resize(dict.fromkeys(quota.limits(), 9.0), workers=4, now=0.0)
    quota.valid_until = 10.0
    assert quota.wait_s(1.0, 9.99) == 0.0
    assert quota.wait_s(1.0, 10.0) == math.inf
    quota.resize(share, workers=4, now=0.0)
    assert quota.wait_s(1.0, 0.0) == math.inf


def test_it_says_what_was_spent_and_when_that_leaves_the_window():
    quota = shared(requests_per_minute=60, tokens_per_minute=1000, concurrency=5)
    quota.resize({"requests": 9.0, "tokens": 900.0, "concurrency": 5.0}, workers=4, now=0.0)
    send(quota, 1, 0.0, tokens=100.0)
    waiting = quota.reserve(30.0, 20.0, 5.0)
    window_s = 60.0 + MARGIN_S
    assert quota.spent("requests", 10.0) == ((pytest.approx(window_s - 10.0), 1.0), (math.inf, 1.0))
    assert quota.spent("tokens", 10.0) == ((pytest.approx(window_s - 10.0), 100.0), (math.inf, 50.0))
    assert quota.spent("concurrency", 10.0) == ((math.inf, 2.0),)
    waiting.sent(20.0)
    assert quota.spent("tokens", 20.0)[-1] == (math.inf, 20.0)
    waiting.release(30.0, prompt_tokens=30.0, completion_tokens=5.0)
    assert sum(amount for _, amount in quota.spent("tokens", 30.0)) == 135.0
    assert quota.spent("concurrency", 30.0) == ((math.inf, 1.0),)


def test_forecasts_take_an_equal_part_where_the_share_is_less():
    quota = shared(requests_per_minute=60, tokens_per_minute=600)
    quota.resize({"requests": 3.0, "tokens": 500.0}, workers=4, now=0.0)
    assert quota.per_window()[0] == 15.0
    assert quota.burst == 15.0
    assert quota.tokens_per_window() == 500.0
    assert 600.0 <= quota.most_tokens < 601.0, "a request fits if it fits the whole limit"
    slots = SharedQuota(Limits(concurrency=10), source="s", slots=2)
    slots.resize({"concurrency": 9.0}, workers=1, now=0.0)
    assert slots.concurrency == 2


def test_a_limit_that_is_lowered_lowers_the_share_and_one_that_is_raised_does_not():
    quota = shared(requests_per_minute=60, tokens_per_minute=600)
    quota.resize({"requests": 30.0, "tokens": 600.0}, workers=2, now=0.0)
    send(quota, 5, 0.0)
    quota.retune(Limits(requests_per_minute=10, tokens_per_minute=6000, concurrency=3), 1.0)
    assert quota.share == {"requests": 10.0, "tokens": 600.0, "concurrency": 0.0}
    assert quota.workers == 2
    assert sum(amount for _, amount in quota.spent("requests", 1.0)) == 5.0


def test_a_bucket_that_is_retuned_while_it_has_no_share_is_not_filled_by_that():
    quota = shared(requests_per_minute=60, window="bucket", burst=10)
    quota.resize({"burst": 10.0}, workers=2, now=0.0)
    for _ in range(10):
        quota.reserve(0.0, 0.0, 0.0).sent(0.0)
    quota.resize({}, workers=2, now=0.0)
    quota.retune(Limits(requests_per_minute=6000, window="bucket", burst=10), 0.0)
    quota.resize({"burst": 1.0}, workers=2, now=0.5)
    assert quota.refilled_in_s(0.5) >= 0.4, "a part of one gets ten a second"


def test_an_estimate_of_tokens_does_not_fall_and_rise_with_single_high_answers():
    """Each rise raises the reservations of all requests in flight."""
    estimates, demand = TokenEstimates(), Demand(Texture.of(["word " * 200]), 8, 100)
    usages = [Usage(prompt_tokens=300 if number % 70 == 0 else 297, completion_tokens=10) for number in range(700)]
    assert sum(estimates.learn(demand, 1000, usage) for usage in usages) <= 1
