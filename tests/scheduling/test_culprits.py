"""Culprits: how many samples must be to blame for failed requests, at least."""

from __future__ import annotations

import itertools
import random

import pytest

from qreward_plugins.scheduling.culprits import Culprits


def noted(*requests):
    culprits = Culprits()
    for request in requests:
        culprits.add(frozenset(request))
    return culprits


@pytest.mark.parametrize(
    ("requests", "least"),
    [
        ([], 0),
        ([{1}, {1}, {2}], 2),
        ([{1, 2, 3, 4, 5}], 1),
        ([{1, 2, 3, 4, 5}, {1, 2}, {1}], 1),
        ([{1, 2, 3, 4, 5}, {1, 5}, {2}], 2),
        ([{2}, {1, 2, 3}, {4, 2}], 1),
        ([{1, 2}, {3, 4}, {5, 6}], 3),
    ],
)
def test_requests_with_a_common_sample_prove_one_culprit(requests, least):
    for order in itertools.permutations(requests):
        assert len(noted(*order)) == least


def test_the_count_never_exceeds_the_number_of_culprits():
    rng = random.Random(4)
    for _ in range(300):
        guilty = set(rng.sample(range(12), rng.randint(1, 3)))
        requests = [set(rng.sample(range(12), rng.randint(1, 6))) for _ in range(15)]
        failed = [request for request in requests if request & guilty]
        assert len(noted(*failed)) <= len(guilty)


def test_an_answer_clears_them():
    culprits = noted({1}, {2, 3})
    assert [number in culprits for number in (1, 3, 4)] == [True, True, False]
    assert [culprits.all_failed_alone(samples) for samples in ({1}, {1, 2})] == [True, False]
    culprits.clear()
    assert len(culprits) == 0
    assert not any(number in culprits for number in (1, 2, 3))


def test_memory_does_not_grow_with_failed_requests():
    culprits = noted(*({number, number + 1, 0} for number in range(1, 3000, 2)))
    assert len(culprits) == 1
    assert len(culprits._shared) < 100
