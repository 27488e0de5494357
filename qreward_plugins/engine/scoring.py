"""Scores the samples of one event loop: connects routes and judges with dispatcher, journal and observers."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import anyio

from ..errors import InvalidReply, JournalError
from ..journal.history import PastAttempt
from ..journal.journal import Journal
from ..journal.keys import question_keys
from ..judges.leaf import Leaf
from ..judges.router import JudgeRouter
from ..observers import BugLog, Event, Observers, SampleSubmitted
from ..observers.events import short
from ..samples import Cause, Failed, Outcome, Sample, Verdict
from ..samples.check import Rejected, named
from ..scheduling.batches import Batch, Batches, Cutoff
from ..scheduling.calls import Answer, Call, T, Unanswered
from ..scheduling.dispatcher import Dispatcher
from ..secrets import one_line
from ..sources import Source
from ..sources.base import Request, ServedWeights
from ..system.threads import cancel_all, cancel_futures
from .judging import Judging
from .outcomes import Calling, Pending
from .siblings import Siblings

_log = logging.getLogger("qreward_plugins.engine")

CLOSE_WITHIN_S = 5.0
"""Longest time, in seconds, for which closing waits for judges that were cancelled."""


class Scoring:
    """Takes the samples of one event loop to their outcomes, and emits events to `observers`.

    `sources` are the judges' sources, by name. `reuse`: use recorded answers of `journal` instead of asking again.
    """

    def __init__(
        self,
        router: JudgeRouter,
        *,
        sources: Mapping[str, Source],
        journal: Journal | None,
        reuse: bool,
        observers: Observers,
    ) -> None:
        self._router = router
        self.bugs = BugLog(router.config)
        self.sources = sources
        """The sources by name. A reload replaces the mapping and never changes it."""
        self.journal = journal
        self._reuse = reuse
        self._observers = observers
        self.statistics = observers.statistics
        self._judging: dict[Judging, None] = {}
        self._under_way: dict[asyncio.Future[Outcome], None] = {}
        """The samples without an outcome, if a source needs to know when there are none."""
        self._arriving: dict[asyncio.Future[None], None] = {}
        self._phased = _phased(sources)
        self.dispatcher: Dispatcher
        """Set after construction, because dispatcher and scoring call each other."""

    def change(self, router: JudgeRouter, *, sources: Mapping[str, Source], reuse: bool) -> None:
        """Go on with other judges and sources. Samples under way keep their judges."""
        self._router, self.sources, self._reuse = router, sources, reuse
        self.bugs = BugLog(router.config)
        self._phased = _phased(sources)

    @property
    def batches(self) -> Batches:
        """The batches of the dispatcher."""
        return self.dispatcher.batches

    def now(self) -> float:
        """The event loop's clock, in seconds."""
        return self.dispatcher.now()

    def submit(
        self,
        sample: Sample | Rejected,
        batch: Batch | None,
        due_at: float,
        *,
        priority: int | None = None,
        groups: dict[str, Siblings] | None = None,
    ) -> asyncio.Future[Outcome]:
        """Submit a sample. The future has its outcome by `due_at`, on the event loop's clock. `batch`: the one that it
        belongs to; None: it is submitted alone. `priority`: that of its calls; default: as configured. `groups`: where
        the samples of a batch meet, by group; None: it has no siblings.

        Cancelling the future cancels its calls.
        """
        known = named(sample)
        self.statistics.sample_submitted()
        self.emit(SampleSubmitted, known)
        future: asyncio.Future[Outcome] = self.dispatcher.loop.create_future()
        if self._phased:
            self._under_way[future] = None
            future.add_done_callback(self._under_way.pop)
        routed = None if isinstance(sample, Rejected) else self._router.routed(sample.data_source, sample.split)
        if priority is None and routed is not None:
            priority = routed.priority
        member = self.batches.join(
            self.batches.of_singles(priority or 0) if batch is None else batch,
            known.group_id,
            priority=priority,
            latency_sensitive=routed is not None and routed.latency_sensitive,
        )
        if isinstance(sample, Rejected):
            Pending(self, sample.sample, member, future).end(Failed(Cause.INFRA, "input", sample.problem))
            return future
        if routed is None:
            Pending(self, sample, member, future).end(_no_route(sample))
            return future
        judge = routed.judge
        if isinstance(judge, Leaf) and self.journal is None:
            Calling(self, sample, member, future, judge).start(due_at)
        else:
            siblings = None
            if routed.compares:
                if groups is None or sample.group_id is None:
                    _warn_of_singles(judge.name, "came alone" if groups is None else "has no group_id")
                else:
                    siblings = groups.setdefault(sample.group_id, Siblings())
            judging = Judging(self, sample, member, future, judge, due_at, siblings)
            if siblings is not None:
                siblings.add(judging)
            self._judging[judging] = None
            judging.task.add_done_callback(lambda _: self._judging.pop(judging, None))
        return future

    async def submit_all(
        self, samples: Sequence[Sample | Rejected], due_at: float, *, priority: int | None, cutoff: Cutoff | None
    ) -> list[asyncio.Future[Outcome]]:
        """Submit samples as one batch; future i belongs to sample i. If one cannot be submitted, all are cancelled."""
        batch = self.batches.new([named(sample).group_id for sample in samples], priority=priority or 0, cutoff=cutoff)
        outcomes: list[asyncio.Future[Outcome]] = []
        groups: dict[str, Siblings] = {}
        try:
            outcomes += (self.submit(sample, batch, due_at, priority=priority, groups=groups) for sample in samples)
        except BaseException:
            await cancel_futures(outcomes)
            raise
        finally:
            self.batches.seal(batch)
        return outcomes

    async def settled(self) -> None:
        """Wait until the samples under way have their outcomes; those that come meanwhile are not waited for. Only
        samples of an engine with a source of `colocated: true` are known.
        """
        if self._arriving:
            await asyncio.wait(tuple(self._arriving))
        if self._under_way:
            await asyncio.wait(tuple(self._under_way))

    @contextlib.contextmanager
    def arriving(self) -> Iterator[None]:
        """Within it, samples wait until the sources can be asked. They are under way (`settled`), and are submitted in
        the step of the event loop that leaves it.
        """
        arrived: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._arriving[arrived] = None
        try:
            yield
        finally:
            del self._arriving[arrived]
            arrived.set_result(None)

    def cut_off(self, batch: Batch) -> None:
        """Fail the samples of a batch that are still judged when it is cut off."""
        for judging in [judging for judging in self._judging if judging.member.batch is batch]:
            judging.give_up("cutoff", "the batch stopped waiting, its quorum was in")

    async def aclose(self) -> None:
        """Fail every sample that has no outcome (`infra/closed`), and close the dispatcher. May be called again.

        A judge that swallows its cancellation is abandoned after a few seconds, with a warning.
        """
        judging = {each.task: each for each in self._judging}
        self.dispatcher.close()
        for each in judging.values():
            each.give_up("closed", "the engine was closed before the sample was scored", steps=0)
        await self.dispatcher.aclose()
        for task in await cancel_all(judging, within_s=CLOSE_WITHIN_S):
            name = judging[task].judge.name
            _log.warning("judge %s did not end within %g s of being cancelled, and is abandoned", name, CLOSE_WITHIN_S)

    def emit(self, event: Callable[..., Event], sample: Sample, *more: Any, always: bool = False) -> None:
        """Emit an event of a sample, `always` or if the user has an observer. `more` are its further fields."""
        if always or self._observers.watched:
            self._observers.emit(event(self.dispatcher.now(), short(sample.id), short(sample.data_source), *more))

    # The journal

    async def recall(self, call: Call[T], sample: Sample, keys: Mapping[str, str], due_at: float) -> Answer[T] | None:
        """The recorded answer to `call` of a sample; None if there is none, or if the judge no longer accepts it.

        A slow disk gets half of the remaining time, so that there is time to ask.
        """
        if self.journal is None or not self._reuse or not keys or call.recall is None:
            return None
        recorded: Verdict | None = None
        with anyio.move_on_after(max(0.0, due_at - self.now()) / 2):
            recorded = await self.journal.get(*dict.fromkeys(keys.values()))
        if recorded is None:
            return None
        try:
            value = call.recall(recorded)
        except (InvalidReply, ValueError, LookupError, TypeError, AttributeError):
            # Another range may map its number beyond float32, or somebody edited the row.
            return None
        weights = ServedWeights(recorded.weight_version) if recorded.weight_version else None
        return Answer(value, recorded.source, recorded.model, recorded=True, weights=weights)

    def keys(self, call: Call[Any]) -> Mapping[str, str]:
        """The keys of the call's answers in the journal, by source."""
        if self.journal is None:
            return {}
        self.dispatcher.settle(call)
        if call.identity:
            call.request = _FirstOnce(call.request)
        return question_keys(call, self.sources)

    def key_of(
        self,
        call: Call[T],
        result: Answer[T] | Unanswered,
        keys: Mapping[str, str],
        sources: Mapping[str, Source],
    ) -> str | None:
        """The key under which `result` is recorded; None if it must not be used again. `keys` are those of `call` while
        these were the sources. After a reload, its source may be another one than then.
        """
        source: Any = result.answered_by if isinstance(result, Answer) else None
        if isinstance(result, Answer) and _weights_matter(result):
            source = _AsOf(source, result.weights)
        elif sources is self.sources or source is sources.get(result.source):
            return keys.get(result.source)
        if source is None:
            return keys.get(result.source) if isinstance(result, Answer) else None
        return question_keys(replace(call, sources=(result.source,)), {result.source: source}).get(result.source)

    async def record(
        self, key: str | None, sample: Sample, outcome: Outcome, history: Sequence[PastAttempt], due_at: float
    ) -> None:
        """Record the outcome of a call. The entry is queued at once; this waits for a slow disk until `due_at`."""
        if self.journal is not None:
            with anyio.move_on_after(max(0.0, due_at - self.now())):
                await self.journal.put(key, sample, outcome, history)

    def note(self, sample: Sample, outcome: Outcome) -> None:
        """Record an outcome without waiting, because its sample's time is up."""
        if self.journal is not None:
            with contextlib.suppress(JournalError):
                self.journal.note(None, sample, outcome)


class _FirstOnce:
    """Makes the requests of a call. The first one is made for its keys in the journal, and then sent: writing a prompt
    takes as long as hashing it.
    """

    __slots__ = ("_first", "_made", "_make")

    def __init__(self, make: Callable[[int], Request]) -> None:
        self._make = make
        self._made = False
        self._first: Request | None = None

    def __call__(self, attempt: int) -> Request:
        first, self._first = self._first, None
        if first is not None and attempt == 0:
            return first
        request = self._make(attempt)
        if not self._made:
            self._made, self._first = True, request
        return request


@functools.lru_cache(maxsize=32)
def _warn_of_singles(judge: str, why: str) -> None:
    """Warn, once for each judge."""
    _log.warning(
        "judge %s compares the samples of a group, but a sample %s, so it is scored by itself; give the samples of a "
        "group one group_id, and hand them in together: by `score_all`, in one request to a reward server, or in rows "
        "of a file that follow each other",
        judge,
        why,
    )


class _AsOf:
    """A source as it was when it had these weights, for the journal's key."""

    def __init__(self, source: Any, weights: ServedWeights | None) -> None:
        self._source = source
        self._weights = weights

    def question(self, request: Request) -> object:
        return self._source.question_of(request, self._weights)


def _weights_matter(answer: Answer[Any]) -> bool:
    """Whether the key of an answer has to follow from the weights that gave it: an update may have come between the
    question and the answer.
    """
    if answer.weights is None:
        return False
    return bool(answer.weights.identity or answer.answered_by.weights.identity)


def _phased(sources: Mapping[str, Source]) -> bool:
    """Whether a source sleeps between reward phases."""
    return any(source.colocated for source in sources.values())


def _no_route(sample: Sample) -> Failed:
    name = one_line(repr(sample.data_source), 200)
    detail = f'no route matches the data source {name}; add it to `routes`, or a last route "*"'
    return Failed(Cause.INFRA, "no_route", detail)
