"""Failures and what comes after them, in any order and from any thread: a verdict is never lost to a stand-in."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st

from slime_adapter import late
from slime_adapter.samples import record_of

FACTS = {"failed": 1.0, "cause": "infra/test"}
SCORED = {"failed": 0.0, "cause": ""}
STAND_IN, VERDICT, ON_TIME = 0.5, 0.9, 0.7


def sample_with(mask, removed):
    return SimpleNamespace(
        reward=None, metadata={}, remove_sample=removed, loss_mask=mask, response_length=len(mask) if mask else 3
    )


def test_a_stand_in_never_overwrites_the_verdict_that_comes_in_at_the_same_time():
    """The stand-in is decided upon, then the verdict is written by another thread, then the stand-in is."""
    sample = sample_with(None, False)
    args = SimpleNamespace(advantage_estimator="grpo")
    late.fail(args, sample, FACTS)
    late.expect([sample])
    other = threading.Thread(target=late.write_late, args=(sample, VERDICT, SCORED))
    seen = []

    class Metadata(dict):
        def get(self, *arguments):
            if not seen and threading.current_thread() is not other:
                seen.append(True)
                other.start()
                other.join(0.2)  # it gets through only where the two do not exclude each other
            return super().get(*arguments)

    sample.metadata = Metadata(sample.metadata)
    late.stand_in(sample, STAND_IN)
    other.join()
    assert seen
    assert (sample.reward, record_of(sample)["excluded"]) == (VERDICT, False)


EVENTS = st.lists(
    st.sampled_from(["fail", "score", "stand_in", "expect", "late", "settle", "grow", "assign"]), max_size=12
)


@settings(deadline=None)
@given(
    events=EVENTS,
    mask=st.none() | st.lists(st.sampled_from([0, 1]), min_size=1, max_size=4),
    removed=st.booleans(),
    estimator=st.sampled_from(["grpo", "reinforce_plus_plus"]),
)
def test_whatever_comes_in_whatever_order_a_scored_sample_trains_as_if_it_had_never_failed(
    events, mask, removed, estimator
):
    args = SimpleNamespace(advantage_estimator=estimator)
    sample = sample_with(mask, removed)
    expected = mask
    handed, verdict, settled = None, None, False
    for event in [*events, "settle"]:
        if event == "fail":
            late.fail(args, sample, FACTS)
            verdict, handed, settled = None, None, False
        elif event == "score":
            late.score(sample, SCORED)
            sample.reward = verdict = ON_TIME
            handed = None
        elif event == "stand_in":
            before = sample.reward
            late.stand_in(sample, STAND_IN)
            if verdict is not None or settled:
                assert sample.reward == before
        elif event == "expect" and record_of(sample).get("excluded"):
            late.expect([sample])
            settled = False
            handed = sample.reward
        elif event == "late":
            if late.write_late(sample, VERDICT, SCORED):
                assert not settled
                verdict = VERDICT
        elif event == "assign" and verdict == VERDICT and not settled:
            sample.reward = handed  # by slime, which was handed it before the verdict came
        elif event == "settle":
            late.settle([sample])
            settled = True
        elif event == "grow":
            if sample.loss_mask is None:
                sample.loss_mask = [1] * sample.response_length
            sample.loss_mask = [*sample.loss_mask, 1]
            expected = [*([1] * sample.response_length if expected is None else expected), 1]
            sample.response_length += 1
    if verdict is not None:
        assert sample.reward == verdict
        assert (sample.remove_sample, sample.loss_mask) == (removed, expected)
        assert not record_of(sample)["excluded"]
    elif record_of(sample):
        assert record_of(sample)["excluded"]
        assert sample.remove_sample or sum(sample.loss_mask[: len(sample.loss_mask)]) >= 1
