"""What the first samples wait for: servers and workers that have to start, and a question to every reward model.

A model takes minutes to load. Were it loaded by the first request, that attempt would be over its time limit, and the
samples beyond their deadline, before any server could answer.

A reward model that gives all texts the same numbers would train the policy on nothing, and no error would show it. So
each is asked about different texts. The questions are those of `trial`, and go through the scheduler: limits, retries
and observers hold for them, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, Mistake, ReplicasNotStarted
from ..judges import Leaf
from ..samples import Sample
from ..scheduling.batches import Batch
from ..scheduling.calls import Call, Unanswered
from ..sources import LOGITS, Reply, Source
from ..system.threads import cancel_all
from .followed_calls import answers_of
from .trial import CAUSE_OF_EQUAL, PAIRS

if TYPE_CHECKING:
    from .scoring import Scoring


_log = logging.getLogger("qreward_plugins.engine")

START_WITHIN_S = 10.0
"""Most seconds for all questions. A source that does not answer in time is not tested."""
END_WITHIN_S = 2.0


class StartProbe:
    """The questions of one engine to its reward models. It asks once, in the event loop of the first call.

    `judges` are all judges that ask sources. Sources in `given` stand in for others and are not asked.
    """

    def __init__(self, judges: Iterable[Leaf], *, given: Collection[str]) -> None:
        self._judges: dict[str, Leaf] = {}
        for judge in judges:
            if judge.asks == LOGITS:
                for name in judge.sources:
                    if name not in given:
                        self._judges.setdefault(name, judge)
        self.over = not self._judges
        """Whether all sources have passed, or could not be tested."""
        self._asking: asyncio.Task[list[Mistake]] | None = None

    async def passed(self, scoring: Scoring, due_at: float) -> None:
        """Wait until all sources have passed, until `due_at` at the latest, on the event loop's clock.

        Raises `ConfigurationError` for sources that give different texts the same numbers. Cancelling ends
        only the wait.
        """
        loop = asyncio.get_running_loop()
        asking = self._asking
        if asking is None or asking.get_loop() is not loop:
            asking = self._asking = loop.create_task(self._ask_all(scoring))
        await asyncio.wait([asking], timeout=max(0.0, due_at - loop.time()))
        if not asking.done() or asking.cancelled():
            return
        mistakes = asking.result()
        if mistakes:
            raise ConfigurationError(mistakes)
        self.over = True

    async def aclose(self) -> None:
        """Stop asking."""
        if self._asking is not None and not self._asking.done():
            await cancel_all([self._asking], within_s=END_WITHIN_S)

    async def _ask_all(self, scoring: Scoring) -> list[Mistake]:
        due_at = scoring.now() + START_WITHIN_S
        batch = scoring.batches.new()
        asked = (_ask(scoring, name, judge, batch, due_at) for name, judge in self._judges.items())
        return [mistake for mistake in await asyncio.gather(*asked) if mistake is not None]


async def _ask(scoring: Scoring, source: str, judge: Leaf, batch: Batch, due_at: float) -> Mistake | None:
    """Compare pairs until two texts get different numbers."""
    numbers: Mapping[str, float] = {}
    for pair in PAIRS:
        calls = [_call(source, judge, pair.sample(text, like=Sample([], ""))) for text in (pair.good, pair.bad)]
        good, bad = await answers_of(scoring.dispatcher, batch, calls, due_at)
        if isinstance(good, Unanswered) or isinstance(bad, Unanswered):
            why = good if isinstance(good, Unanswered) else bad
            _log.info("source %s was not tested at the start: %s", source, getattr(why, "detail", ""))
            return None
        if good.value != bad.value:
            return None
        numbers = good.value
    shown = ", ".join(f"{number:.3g}" for number in list(numbers.values())[:5])
    problem = f"it gives right answers and nonsense the same numbers ({shown}): {CAUSE_OF_EQUAL}."
    return Mistake(f"sources.{source}", problem, "Compare with: qreward check.")


def _call(source: str, judge: Leaf, sample: Sample) -> Call[Mapping[str, float]]:
    return Call((source,), lambda attempt: judge.request(sample, attempt=attempt), _numbers, name=judge.name)


def _numbers(_: object, reply: Reply) -> Mapping[str, float]:
    """Return the numbers of a reply; for steps those of the last one."""
    value: Any = reply.value
    numbers = value if isinstance(value, Mapping) else value[-1][1]
    return {str(label): float(number) for label, number in numbers.items()}


class SourceStarts:
    """The starts of one engine's sources, of those that have `start` (see `Source`)."""

    def __init__(self, sources: Iterable[Any]) -> None:
        self.over: bool
        """Whether all sources are started. `_wait_for` sets it: each sample asks."""
        self._wait_for(_with_start(sources))

    def change(self, sources: Iterable[Any]) -> None:
        """Go on with the sources of another configuration. Those that are not started yet are started by `done`, too.
        If one of these does not start, a line in the log says so, because the others go on working.
        """
        found = _with_start(sources)
        kept = [source for source in self._sources if source in found]
        self._wait_for(kept, [source for source in found if source not in kept and not source.started])

    def close(self) -> None:
        """Let `done` return: the engine closes, and what follows fails the samples."""
        self._wait_for([])

    def _wait_for(self, sources: list[Any], added: Sequence[Any] = ()) -> None:
        self._sources, self._added = sources, added
        self.over = not (sources or added)

    async def done(self) -> None:
        """Start all sources at the same time, and wait until they are ready.

        Raises what `start` of a source raises, `ReplicasNotStarted` or `ConfigurationError`. Cancelling ends only the
        wait.
        """
        while not self.over:
            starts = {asyncio.ensure_future(source.start()): source for source in (*self._sources, *self._added)}
            try:
                ended, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for start in starts:
                    start.cancel()
                await asyncio.gather(*starts, return_exceptions=True)
            for start in ended:
                self._ended(starts[start], start)

    def _ended(self, source: Any, start: asyncio.Task[None]) -> None:
        """Take note of a start. A source that was removed or closed meanwhile is in neither list."""
        try:
            start.result()
        except (ReplicasNotStarted, ConfigurationError) as error:
            if source in self._sources:
                raise
            if source in self._added:
                _log.error("%s", error)
        sources = [other for other in self._sources if other is not source]
        self._wait_for(sources, [other for other in self._added if other is not source])


def _with_start(sources: Iterable[Source]) -> list[Source]:
    return [source for source in sources if not source.started]
