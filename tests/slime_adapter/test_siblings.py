"""What a process keeps of evaluations, whose groups never end."""

from __future__ import annotations

import itertools
import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from qreward_plugins import group_means
from qreward_plugins.siblings import Siblings


def test_what_is_kept_of_a_group_does_not_grow_with_its_samples():
    siblings, rng = Siblings(), random.Random(1)
    for _ in range(100):
        siblings.scored("eval", rng.uniform(-1, 1))
    tracemalloc.start()
    for _ in range(50_000):
        siblings.scored("eval", rng.uniform(-1, 1))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert grown < 20_000


def test_the_mean_does_not_depend_on_the_order_and_does_not_overflow():
    rewards = [0.1, 0.7, -0.3, 1e-17, 1e16]
    means = set()
    for order in itertools.permutations(rewards):
        siblings = Siblings()
        for reward in order:
            siblings.scored("group", reward)
        siblings.failed("group", means.add)
    assert len(means) == 1
    siblings, told = Siblings(), []
    for _ in range(8):
        siblings.scored("group", 3.4e38)
    siblings.failed("group", told.append)
    assert told == [3.4e38]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6))
def test_the_mean_is_bit_for_bit_that_of_a_whole_group(rewards):
    """A failed sample has one number, whether it is told of its siblings or a hook looks at the group."""
    siblings, told = Siblings(), []
    for reward in rewards:
        siblings.scored("group", reward)
    siblings.failed("group", told.append)
    assert told == group_means([*rewards, None], [0] * (len(rewards) + 1))[-1:]
