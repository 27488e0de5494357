"""The queue: what is served first, for whom, and that what left it is neither counted nor kept."""

from __future__ import annotations

import functools
import gc
import inspect
import weakref

import pytest

from qreward_plugins.scheduling import Batch, ReadyQueue
from qreward_plugins.simulation import run


def in_loop(test):
    """Run a test in a virtual-time loop: jobs need futures."""

    async def main(stage):
        test(stage, ReadyQueue())

    @functools.wraps(test)
    def runs(stage):
        run(main(stage))

    # Otherwise pytest would ask for a fixture `queue`.
    runs.__signature__ = inspect.signature(main)
    return runs


@pytest.fixture(autouse=True)
def sources(stage):
    for name in "ab":
        stage.add(name)


def served(queue, source):
    """The sizes in the order in which `source` would be served."""
    sizes = []
    while (job := queue.first(source)) is not None:
        sizes.append(job.size)
        queue.discard(job)
    return sizes


@in_loop
def test_the_larger_goes_first_and_of_equals_the_earlier(stage, queue):
    jobs = [stage.queued(queue, size) for size in (3, 9, 9, 1)]
    assert queue.first("a") is jobs[1]
    queue.discard(jobs[1])
    assert queue.first("a") is jobs[2]
    assert served(queue, "a") == [9, 3, 1]


@in_loop
def test_place_decides_and_not_size(stage, queue):
    job = stage.job(1)
    job.precedence = 100.0
    queue.push(job, frozenset("a"))
    stage.queued(queue, 50)
    assert queue.first("a") is job


@in_loop
def test_priority_then_batch_then_tried_before_then_place(stage, queue):
    first, second, urgent = Batch(0, 0.0), Batch(1, 0.0), Batch(2, 0.0, priority=1)
    for batch, size in ((second, 90), (first, 10), (urgent, 1)):
        stage.queued(queue, size, batch=batch)
    retried = stage.job(2, batch=first)
    retried.attempts = 1
    queue.push(retried, frozenset("ab"))
    assert served(queue, "a") == [1, 2, 10, 90]


@in_loop
def test_of_equals_the_earlier_goes_first_wherever_else_they_may_go(stage, queue):
    for sources in (["ab", "a"], ["a", "ab"]):
        jobs = [stage.queued(queue, 5, sources=each) for each in sources]
        assert queue.first("a") is jobs[0]
        assert queue.largest_within("a", 5) is jobs[0]
        assert queue.smallest("a") is jobs[1]
        assert served(queue, "a") == [5, 5]


@in_loop
def test_each_source_sees_what_it_may_serve(stage, queue):
    stage.queued(queue, 5, sources="a")
    stage.queued(queue, 4, sources="b")
    stage.queued(queue, 3, sources="ab")
    assert [job.size for job in queue.jobs("b")] == [4, 3]
    assert dict(queue.eligible_sets()) == {frozenset("a"): 1, frozenset("b"): 1, frozenset("ab"): 1}
    assert served(queue, "a") == [5, 3]
    assert served(queue, "b") == [4]
    assert queue.first("nobody") is None


@in_loop
def test_the_largest_within_a_place_and_the_smallest(stage, queue):
    for size in (8, 2, 6, 4):
        stage.queued(queue, size, sources="a" if size in (6, 2) else "ab")
    assert queue.largest_within("a", 6).size == 6
    assert queue.largest_within("a", 5.5).size == 4
    assert queue.largest_within("b", 7).size == 4
    assert queue.largest_within("b", 3) is None
    assert (queue.smallest("a").size, queue.smallest("b").size) == (2, 4)
    queue.discard(queue.largest_within("a", 6))
    queue.discard(queue.smallest("a"))
    assert queue.largest_within("a", 7).size == 4
    assert queue.smallest("a").size == 4


@in_loop
def test_choices_stay_within_what_ranks_first(stage, queue):
    urgent, other = Batch(1, 0.0, priority=1), Batch(0, 0.0)
    stage.queued(queue, 50, batch=urgent, sources="a")
    stage.queued(queue, 20, batch=urgent, sources="ab")
    stage.queued(queue, 1, batch=other)
    assert queue.smallest("a").size == 20
    assert queue.largest_within("a", 30).size == 20
    # Nobody of the first rank fits: the next rank is asked.
    assert queue.largest_within("a", 10).size == 1
    assert [job.size for job in queue.jobs("a")] == [50, 20, 1]


@in_loop
def test_what_is_queued_again_counts_once(stage, queue):
    job = stage.queued(queue, 7)
    queue.push(job, frozenset("b"))
    assert (len(queue), queue.total_size) == (1, 7)
    assert queue.first("a") is None
    assert queue.first("b") is job
    queue.discard(job)
    queue.discard(job)
    assert (len(queue), queue.total_size, job.entry) == (0, 0, 0)
    assert list(queue.eligible_sets()) == []


@in_loop
def test_a_job_that_left_is_not_kept_alive(stage, queue):
    stays = stage.queued(queue, 1000)
    jobs = [stage.queued(queue, 10 + number) for number in range(200)]
    left = [weakref.ref(job.caller) for job in jobs]
    for job in jobs:
        queue.discard(job)
    assert queue.first("a") is queue.smallest("a") is stays
    del jobs, job
    gc.collect()
    # As many as still wait may be kept for a while, so that leaving costs little.
    assert sum(caller() is not None for caller in left) <= len(queue)


@in_loop
def test_a_stream_that_never_ends_keeps_no_jobs_that_left(stage, queue):
    queue.by_deadline = frozenset({("a", 0)})
    left = []
    stage.queued(queue)
    for _ in range(1000):
        left.append(weakref.ref(stage.queued(queue).caller))
        queue.discard(queue.first("a"))
    gc.collect()
    assert len(queue) == 1
    assert sum(caller() is not None for caller in left) < 200
