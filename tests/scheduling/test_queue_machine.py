"""The queue beside a plain list: whatever was queued, taken out and queued again, it gives the same jobs."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from qreward_plugins.samples import Sample
from qreward_plugins.scheduling import Batch, Job, ReadyQueue
from qreward_plugins.scheduling.batches import Member
from qreward_plugins.sources.base import Request

SOURCES = "abc"
eligible_sets = st.frozensets(st.sampled_from(SOURCES), min_size=1)
sizes = st.sampled_from([1, 2, 3, 5, 8, 200])
MESSAGES = ({"role": "user", "content": "?"},)


def order(job):
    return job.rank, -job.precedence, job.sequence


class QueueBesideAList(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.queue = ReadyQueue()
        self.batches = [Batch(0, 0.0), Batch(1, 0.0), Batch(2, 0.0, priority=5)]
        self.numbers = itertools.count()
        self.queued: dict[Job, frozenset[str]] = {}
        self.known: list[Job] = []

    def add(self, batch, size, eligible):
        request = Request(Sample(MESSAGES, "x" * size))
        number = next(self.numbers)
        # Every third one has a priority of its own, which counts instead of the batch's.
        member = Member(self.batches[batch], priority=None if number % 3 else number % 7 - 3)
        job = Job(request.sample, None, member, member.batch, 0.0, 9.0, request, number)
        job.precedence = float(size)
        self.known.append(job)
        self.queue.push(job, eligible)
        self.queued[job] = eligible

    @rule(batch=st.integers(0, 2), size=sizes, eligible=eligible_sets)
    def push(self, batch, size, eligible):
        self.add(batch, size, eligible)

    @rule(batch=st.integers(0, 2), many=st.integers(60, 90), size=sizes, eligible=eligible_sets)
    def push_many(self, batch, many, size, eligible):
        for number in range(many):
            self.add(batch, size + number % 7, eligible)

    @precondition(lambda self: self.known)
    @rule(data=st.data(), eligible=eligible_sets)
    def push_again(self, data, eligible):
        job = data.draw(st.sampled_from(self.known))
        self.queue.push(job, eligible)
        self.queued[job] = eligible

    @precondition(lambda self: self.known)
    @rule(data=st.data(), place=st.floats(0, 300), eligible=eligible_sets)
    def come_back_tried(self, data, place, eligible):
        job = data.draw(st.sampled_from(self.known))
        self.queue.discard(job)
        job.attempts, job.precedence = job.attempts + 1, place
        self.queue.push(job, eligible)
        self.queued[job] = eligible

    @precondition(lambda self: self.known)
    @rule(data=st.data())
    def discard(self, data):
        job = data.draw(st.sampled_from(self.known))
        self.queue.discard(job)
        self.queued.pop(job, None)

    @rule(source=st.sampled_from(SOURCES), many=st.integers(1, 100))
    def serve(self, source, many):
        for _ in range(many):
            job = self.queue.first(source)
            assert job is min(self.of(source), key=order, default=None)
            if job is None:
                return
            self.queue.discard(job)
            del self.queued[job]

    @rule(source=st.sampled_from(SOURCES), place=st.one_of(sizes.map(float), st.floats(0, 300)))
    def largest_within(self, source, place):
        within = [job for job in self.of(source) if job.precedence <= place]
        assert self.queue.largest_within(source, place) is min(within, key=order, default=None)

    @rule(source=st.sampled_from(SOURCES))
    def smallest(self, source):
        candidates = self.of(source)
        first_rank = min((job.rank for job in candidates), default=None)
        of_first_rank = [job for job in candidates if job.rank == first_rank]
        assert self.queue.smallest(source) is max(of_first_rank, key=order, default=None)

    @rule(source=st.sampled_from(SOURCES))
    def all_of_a_source(self, source):
        jobs = list(self.queue.jobs(source))
        assert sorted(jobs, key=order) == sorted(self.of(source), key=order)
        assert [job.rank for job in jobs] == sorted(job.rank for job in jobs)

    def of(self, source):
        return [job for job, eligible in self.queued.items() if source in eligible]

    @invariant()
    def it_counts_right(self):
        assert len(self.queue) == len(self.queued)
        assert self.queue.total_size == sum(job.size for job in self.queued)
        counted = sum((count for _, count in self.queue.eligible_sets()), 0)
        assert counted == len(self.queued)
        assert all(bool(job.entry) is (job in self.queued) for job in self.known)


TestQueueBesideAList = QueueBesideAList.TestCase
TestQueueBesideAList.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
