"""Defines `Judge`: a coroutine that turns a sample into a verdict by asking sources.

A judge makes any number of calls in any order, and awaits other judges in the same way. It does not see sources,
deadlines, retries or the journal: the caller has bound these to `ask`.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from ..config.models import Config, JudgeConfig
from ..errors import InputError, Mistake, QRewardError
from ..samples.sample import Failed, Sample, Verdict
from ..scheduling.calls import Answer, Call, T
from ..sources.base import Reply, Request, Source


class JudgeFailed(QRewardError):
    """A judge has no verdict on a sample; `failed` says why."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed
        super().__init__(failed.describe())


class Ask(Protocol):
    """Makes a call to one of its sources, within the deadline of the sample."""

    async def __call__(self, call: Call[T]) -> Answer[T]:
        """Return the answer.

        Raises `CallFailed` if there is none by the deadline or after all tries. Cancelling cancels the attempts under
        way and frees their permits.
        """
        ...

    async def with_siblings(self, judge: GroupJudge) -> Verdict:
        """Return the verdict of `judge` on the sample, which it compares with its siblings: those of the same batch and
        group that come to this judge, too. Raises `JudgeFailed`.
        """
        ...

    def skip(self, judge: Judge) -> None:
        """Say that the sample does not come to `judge`, so that its siblings need not wait for it there."""
        ...


@dataclass(frozen=True)
class Opening:
    """The arguments for opening a judge, besides its name and its own part of the configuration."""

    config: Config
    """The whole configuration."""
    sources: tuple[str, ...]
    """The names of the sources that may answer it; empty if its kind asks no sources."""
    key: bytes
    """The secret key for the nonces of fences around untrusted text: at least 16 bytes that the policy cannot know."""
    judge: Callable[[str], Judge]
    """Opens another judge of the configuration, by its name."""


class Judge(ABC):
    """Turns a sample into a verdict: the base class of every kind of judge.

    A kind defines `judge`, usually a nested class `Config` with the keys of its configuration, and `asks` if it asks
    sources. `qreward check --kinds` shows the first sentence of its docstring. `name` is its name in the configuration.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ()

    Config: ClassVar[type[JudgeConfig]] = JudgeConfig
    """The model of its configuration. A field of type `JudgeName` names a judge that it awaits."""

    asks: ClassVar[str] = ""
    """The type of answer that it asks sources for: `TEXT`, `VALUE`, or another word in the `answers` of a kind of
    source. "": it asks no sources itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> Judge:
        """Make the judge `name` of a configuration. Default: `cls(name, config, opening)`.

        Raises `ConfigurationError` for mistakes that involve several parts of the configuration.
        """
        make: Any = cls
        judge: Judge = make(name, config, opening)
        return judge

    @classmethod
    def takes_out(cls, config: Any) -> bool:
        """Whether it takes samples out of the training although nothing failed (`policy/screened`). Default: false."""
        return False

    reads_turns: ClassVar[bool] = False
    """Whether it scores the turns of a response (`Sample.turns`)."""

    @classmethod
    def tells_steps(cls, config: Any) -> bool:
        """Whether its verdicts say what each step of a response adds to the score (`Verdict.dense`). Default: no."""
        return False

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        """Return a valid reply to a request of this judge, for `qreward plan`.

        `share` (0 to 1) is the place of its score in the score range. A kind that asks sources, and is no `Leaf`, must
        define this method to be planned.
        """
        raise InputError(f"{cls.__name__} defines no `rehearsed`, so `qreward plan` cannot simulate its replies")

    @classmethod
    def measurement(cls, config: Any) -> tuple[JudgeConfig, str] | None:
        """Say how `qreward calibrate` measures the scores of a judge with this configuration: with which configuration
        its rewards are the scores, and the file that it names for them. Default: None, it names none.
        """
        return None

    @abstractmethod
    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        """Return the verdict on `sample`. `ask` adds up what it spends.

        Raises `JudgeFailed` if there is no verdict. Calls that are still open when it ends are cancelled. A cancelled
        judge must end at once.
        """

    def mistakes(self, sources: Mapping[str, Source]) -> Sequence[Mistake]:
        """Find mistakes that show only with its opened sources, by name. Default: there are none."""
        return ()

    @property
    def parts(self) -> Sequence[Judge]:
        """The judges that it awaits, if any."""
        return ()

    def seen(self, sample: Sample) -> Sequence[Sample]:
        """Return what the judges that it awaits see of a sample. Default: all see the sample."""
        return (sample,)

    @property
    def calls(self) -> int:
        """The most calls that a sample takes, without retries."""
        return sum(part.calls for part in self.parts) or 1

    @property
    def comparing(self) -> frozenset[str]:
        """The names of the judges that compare the samples of a group, of it and those that it awaits."""
        return frozenset().union(*(part.comparing for part in self.parts))

    @property
    def masks(self) -> bool:
        """Whether it, or a judge that it awaits, takes samples out of the training although nothing failed."""
        return any(part.masks for part in self.parts)

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that every verdict of this judge has, as far as they are known in advance."""
        return ()

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and the highest score of its verdicts; None (default) if unknown."""
        return None

    @property
    def defines_correct(self) -> bool:
        """Whether every verdict of it sets `correct`."""
        return False


class GroupJudge(Judge):
    """A judge that compares the samples of a group: the base class of such kinds, which define `judge_group`."""

    @property
    def comparing(self) -> frozenset[str]:
        return frozenset({self.name}) | super().comparing

    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        return await ask.with_siblings(self)

    @abstractmethod
    async def judge_group(self, samples: Sequence[Sample], ask: Ask) -> Sequence[Verdict | Failed]:
        """Return what comes of each sample, in their order. There may be one alone. `ask` belongs to one of them.

        Called once for a group, and again if the sample that `ask` belongs to was cancelled. Raises `JudgeFailed` if
        all fail.
        """


def reaches(reward: float, bar: float) -> bool:
    """Whether a reward is `bar` or more, up to rounding: 0.1 + 0.7 is a little less than 0.8."""
    return reward >= bar or math.isclose(reward, bar, rel_tol=1e-9, abs_tol=1e-12)


async def together(
    running: Mapping[str, Awaitable[Verdict]], *, dispensable: Collection[str] = ()
) -> dict[str, Verdict | Failed]:
    """Await several verdicts at the same time; return them and the failures by name, in their order.

    The first failure that is not `dispensable` cancels what still runs; this is missing from the result. Cancelling
    cancels all.
    """
    verdicts: dict[str, Verdict | Failed] = {}
    stopped = False

    async def one(name: str, verdict: Awaitable[Verdict]) -> None:
        try:
            verdicts[name] = await verdict
        except JudgeFailed as error:
            verdicts[name] = error.failed
            if name not in dispensable:
                # At once: in the next step of the event loop, another judge would be sending its request.
                stop(task for task in tasks if task is not asyncio.current_task())
        except asyncio.CancelledError:
            if stopped:
                raise
            # Otherwise the others would go on, and their verdicts would be used without this one.
            raise RuntimeError(f"judge {name} was cancelled by something else than its caller") from None

    def stop(running: Iterable[asyncio.Task[None]]) -> None:
        nonlocal stopped
        stopped = True
        for task in running:
            task.cancel()

    # A task group of anyio would add a quarter to the time and memory of a sum.
    tasks: list[asyncio.Task[None]] = [asyncio.ensure_future(one(name, verdict)) for name, verdict in running.items()]
    left = set(tasks)
    cancelled: asyncio.CancelledError | None = None
    while left:
        try:
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            # A time limit of anyio knows its own cancellation by the exception. It cancels again in each step of the
            # event loop, so `wait` would never see them end.
            cancelled = error
            left = {task for task in left if not task.done()}
        stop(left)
    for verdict in running.values():
        if asyncio.iscoroutine(verdict):
            verdict.close()  # one that was stopped before its first step; nothing happens to the others
    bugs = [bug for bug in map(_bug, tasks) if bug is not None]
    if cancelled is not None or bugs:
        try:
            raise cancelled or bugs[0]
        finally:
            # Breaks the reference cycle of error, traceback and frame, which would keep the sample in memory.
            del bugs, tasks, cancelled
    return {name: verdicts[name] for name in running if name in verdicts}


def _bug(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
