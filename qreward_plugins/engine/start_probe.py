"""Asks every reward model about different texts before the first samples.

A model that gives all texts the same numbers would train the policy on nothing, and no error would show it.

The questions are those of `trial`, and go through the scheduler: limits, retries and observers hold for them, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, Mistake
from ..judges import Leaf
from ..samples import Sample
from ..scheduling.batches import Batch
from ..scheduling.calls import Call, Unanswered
from ..sources import LOGITS, Reply
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
        # Never sealed: it is no batch of samples, and has no report.
        batch = scoring.batches.new(())
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
