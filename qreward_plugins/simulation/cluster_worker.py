"""A worker of a simulated cluster: a queue for each source, the real quotas and member, and a simulated client.

It sends what its quotas allow, oldest first. At the moment of writing it checks again whether its shares are valid,
because the process may have been stopped in between.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING

from ..quotas.reservation import Reservation
from ..quotas.shared import SharedQuota
from ..sharing.member import Demand, Member
from ..sharing.membership import (
    ANSWERED_WITHIN_S,
    FIRST_BACKOFF_S,
    LONGEST_BACKOFF_S,
    REPORT_EVERY_S,
    SILENT_AFTER_S,
)
from ..sharing.messages import Answer, Report
from .cluster_nodes import Node
from .cluster_plan import SharedSource, Work, Worker

if TYPE_CHECKING:
    from .cluster import Cluster


class SimulatedRequest:
    """One request of a worker."""

    def __init__(self, source: SharedSource, prompt_tokens: float, completion_tokens: float, came_at: float) -> None:
        self.source = source
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.came_at = came_at
        self.reservation: Reservation | None = None
        self.tries = 0
        """The number of its attempts; answers to earlier ones are ignored."""


class SimulatedWorker(Node):
    """A worker process."""

    def __init__(self, cluster: Cluster, name: str, worker: Worker, sources: tuple[SharedSource, ...]) -> None:
        super().__init__(cluster, worker.clock)
        self.name = name
        self.handle: int | None = None
        """The handle of its keeper."""
        self.quotas = {source.key: SharedQuota(source.declared(), source=source.key) for source in sources}
        self.member = Member(name, self.quotas)
        self.unfinished = 0
        self.waited_s = 0.0
        """The longest wait of a request, in true seconds."""
        self.reports = 0
        self._leaves = worker.leaves
        self._left = False
        self._sources = {source.key: source for source in sources}
        self._queues: dict[str, deque[SimulatedRequest]] = {key: deque() for key in self.quotas}
        self._in_flight: dict[SimulatedRequest, None] = {}
        self._look_at: dict[str, float] = {}
        self._report: Report | None = None
        self._sent_at = -math.inf
        self._looked_up_at = -math.inf
        self._known_at = -math.inf
        self._answered_at = math.inf
        self._backoff_s = FIRST_BACKOFF_S
        self._next_at = math.inf
        cluster.at(worker.joins_s, self.happen, self._begin)

    # Work

    def expect(self, work: Work) -> None:
        """Schedule future work."""
        self.unfinished += work.count
        if work.every_s:
            for number in range(work.count):
                self.cluster.at(work.at_s + number * work.every_s, self.happen, self._come, work, 1)
        else:
            self.cluster.at(work.at_s, self.happen, self._come, work, work.count)

    def _come(self, work: Work, count: int) -> None:
        queue = self._queues[work.source]
        for _ in range(count):
            source = self._sources[work.source]
            queue.append(SimulatedRequest(source, work.prompt_tokens, work.completion_tokens, self.cluster.now))
        self._pump(work.source)

    def _pump(self, key: str) -> None:
        """Send all requests that the quotas allow."""
        queue, quota, now, rng = self._queues[key], self.quotas[key], self.now(), self.cluster.rng
        wait_s = math.inf
        while queue:
            request = queue[0]
            wait_s = quota.wait_s(request.prompt_tokens + request.completion_tokens, now)
            if wait_s > 0:
                break
            queue.popleft()
            self.waited_s = max(self.waited_s, self.cluster.now - request.came_at)
            request.reservation = quota.reserve(request.prompt_tokens, request.completion_tokens, now)
            request.tries += 1
            self._in_flight[request] = None
            self.at(now + rng.uniform(*request.source.connect_s), self._write, request, request.tries)
        if queue and wait_s < math.inf:
            look_at = now + max(wait_s, 1e-4)
            if not now < self._look_at.get(key, -math.inf) <= look_at:
                self._look_at[key] = look_at
                self.at(look_at, self._pump, key)
        self._look()

    def _write(self, request: SimulatedRequest, tries: int) -> None:
        if request.tries != tries or request not in self._in_flight:
            return
        assert request.reservation is not None
        now = self.now()
        if now >= self.member.valid_until:
            self._call_back(request)
            return
        request.reservation.sent(now)
        cluster = self.cluster
        cluster.at(cluster.now + cluster.rng.uniform(*request.source.way_s), self._arrive, request, tries)

    def _arrive(self, request: SimulatedRequest, tries: int) -> None:
        cluster, server = self.cluster, self.cluster.servers[request.source.key]
        server.come((request, tries), self.name, request.prompt_tokens, cluster.now)
        if request.tries != tries or request not in self._in_flight or not self.alive:
            server.end((request, tries))
            return
        ends_at = cluster.now + cluster.rng.uniform(*request.source.service_s)
        completion = float(math.floor(cluster.rng.choice((0.0, 0.5, 1.0, 1.0)) * request.completion_tokens))
        counts_at = server.counts_completion_at(cluster.now, ends_at)
        cluster.at(counts_at, self._count, request, tries, completion)
        cluster.at(ends_at, self._end_there, request, tries, completion)

    def _count(self, request: SimulatedRequest, tries: int, completion: float) -> None:
        server = self.cluster.servers[request.source.key]
        if server.works_on((request, tries)):
            server.spend(completion, self.cluster.now)

    def _end_there(self, request: SimulatedRequest, tries: int, completion: float) -> None:
        cluster, server = self.cluster, self.cluster.servers[request.source.key]
        if server.works_on((request, tries)):
            server.end((request, tries))
            back_s = cluster.rng.uniform(*request.source.way_s)
            cluster.at(cluster.now + back_s, self.happen, self._finish, request, tries, completion)

    def _finish(self, request: SimulatedRequest, tries: int, completion: float) -> None:
        if request.tries != tries or request not in self._in_flight:
            return
        assert request.reservation is not None
        del self._in_flight[request]
        if self.cluster.rng.random() < 0.8:
            request.reservation.release(self.now(), prompt_tokens=request.prompt_tokens, completion_tokens=completion)
        else:
            request.reservation.release(self.now())
        self.quotas[request.source.key].answered(self.now(), sent_at=request.reservation.sent_at)
        self.unfinished -= 1
        self._pump(request.source.key)
        if self._leaves and not self.unfinished:
            self._leave()

    def _call_back(self, request: SimulatedRequest) -> None:
        """Cancel an attempt, and queue its request again."""
        assert request.reservation is not None
        self.cluster.servers[request.source.key].end((request, request.tries))
        request.tries += 1
        del self._in_flight[request]
        request.reservation.release(self.now())
        self._queues[request.source.key].appendleft(request)

    # The client

    def _begin(self) -> None:
        self._answered_at = self.now()
        self._exchange()

    def _exchange(self) -> None:
        if self._left:
            return
        now = self._sent_at = self.now()
        self._next_at = math.inf
        self.reports += 1
        self._report = self.member.report(now, {key: self._demand(key) for key in self.quotas}, {})
        self.at(now + ANSWERED_WITHIN_S, self._give_up, self._report.number)
        if self.handle is None:
            self._looked_up_at = now
            self.cluster.look_up(self)
        else:
            self.cluster.report(self, self.handle, self._report)

    def found(self, handle: int) -> None:
        """Use this keeper."""
        if self.handle is None and self._report is not None:
            self.handle, self._known_at = handle, self._looked_up_at
            self.cluster.report(self, handle, self._report)

    def answered(self, answer: Answer) -> None:
        """Receive an answer."""
        now = self.now()
        if not self.member.accept(answer, now) or self._left:
            return
        self._report = None
        self._answered_at = now
        self._backoff_s = FIRST_BACKOFF_S
        self.at(self.member.valid_until, self._end)
        self._exchange_at(max(now, self._sent_at + REPORT_EVERY_S))
        for key in self.quotas:
            self._pump(key)

    def lost(self, handle: int) -> None:
        """The keeper of this handle has died, or has closed its connections."""
        if handle == self.handle and not self._left:
            self.handle = None
            self.member.keeper_died(self.now(), seen_at=self._known_at)
            self.at(self.member.valid_until, self._end)
            self._do_without()

    def _give_up(self, number: int) -> None:
        if self._report is not None and self._report.number == number:
            self._do_without()

    def _do_without(self) -> None:
        now = self.now()
        self._report = None
        if now - self._answered_at >= SILENT_AFTER_S and self.handle is not None:
            self.cluster.end_keeper(self.handle)
            self._answered_at = now
        self._exchange_at(now + self._backoff_s)
        self._backoff_s = min(2 * self._backoff_s, LONGEST_BACKOFF_S)

    def _exchange_at(self, when: float) -> None:
        self._next_at = when
        self.at(when, self._exchange_if_due, when)

    def _exchange_if_due(self, when: float) -> None:
        if self._next_at == when:
            self._exchange()

    def _look(self) -> None:
        """Report to the keeper if a request waits."""
        if self._report is None or self._next_at < math.inf:
            return
        now = self.now()
        if any(self.member.report_due(key, self._demand(key), now) for key in self.quotas):
            self._exchange_at(max(now, self._sent_at + REPORT_EVERY_S))

    def _demand(self, key: str) -> Demand:
        queue = self._queues[key]
        if not queue:
            return Demand()
        tokens = [request.prompt_tokens + request.completion_tokens for request in queue]
        return Demand(len(queue), math.fsum(tokens), tokens[0])

    def _end(self) -> None:
        """Cancel attempts whose share has ended."""
        if not self.member.expire(self.now()):
            return
        for request in list(self._in_flight):
            assert request.reservation is not None
            unsent = request.reservation.sent_at == -math.inf
            if unsent or {"tokens", "concurrency"} & set(self.quotas[request.source.key].limits()):
                self._call_back(request)

    def _leave(self) -> None:
        self._left = True
        last_report = self.member.last_report(self.now())
        if self.handle is not None:
            self.cluster.report(self, self.handle, last_report)

    # Faults

    def kill(self) -> None:
        """End the process, as SIGKILL does, and its connections with it."""
        self.alive = False
        self._disconnect()

    def stop(self) -> None:
        super().stop()
        # A stopped process cannot cancel its requests in flight; the server ends or answers them.
        offset_free_s = self.member.valid_until - self.now()
        if offset_free_s < math.inf:
            self.cluster.at(self.cluster.now + offset_free_s, self._abandon)

    def _abandon(self) -> None:
        if self.stopped and self.alive:
            self._disconnect()
            self.happen(self._reconnect)

    def _disconnect(self) -> None:
        for request in self._in_flight:
            self.cluster.servers[request.source.key].end((request, request.tries))

    def _reconnect(self) -> None:
        for request in list(self._in_flight):
            server = self.cluster.servers[request.source.key]
            if (
                request.reservation is not None
                and request.reservation.sent_at > -math.inf
                and not server.works_on((request, request.tries))
            ):
                self._call_back(request)
