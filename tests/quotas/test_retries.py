"""The retry budget: what it promises, over any history."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qreward_plugins.quotas.retries import FLOOR_PER_S, PER_SUCCESS, RESERVE, RetryBudget

histories = st.lists(
    st.tuples(st.floats(0, 4, allow_nan=False), st.sampled_from(["success", "retry", "retries"])), max_size=60
)


@settings(max_examples=200, deadline=None)
@given(history=histories)
def test_no_more_retries_come_due_than_are_earned(history):
    budget, now, due, successes = RetryBudget(), 0.0, [], []
    waiting: list[int] = []
    for pause, what in [*history, (10**4, "")]:
        # What becomes due by time alone, then what a success makes due.
        due += [now + wait for number in waiting if (wait := budget.wait_s(number, now)) < pause]
        waiting = [number for number in waiting if budget.wait_s(number, now) >= pause]
        now += pause
        if what == "success":
            budget.earn(now)
            successes.append(now)
        elif what:
            waiting += [budget.withdraw(now) for _ in range(1 if what == "retry" else 40)]
        due += [now for number in waiting if budget.wait_s(number, now) == 0]
        waiting = [number for number in waiting if budget.wait_s(number, now) > 0]
    assert not waiting
    for at in due:
        earned = RESERVE + FLOOR_PER_S * at + PER_SUCCESS * sum(when <= at for when in successes)
        assert sum(other <= at for other in due) <= earned + 1e-6


def test_a_wave_of_failures_comes_back_at_the_floor_rate():
    budget = RetryBudget()
    waits = [budget.wait_s(budget.withdraw(0.0), 0.0) for _ in range(300)]
    assert waits[:100] == [0.0] * 100
    assert waits[100:] == pytest.approx([(number + 1) / 10 for number in range(200)])
