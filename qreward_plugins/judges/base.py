"""What a judge is to the rest of the core: a coroutine that turns a sample into a verdict by asking.

A judge asks as often as it needs to, in whatever order, and awaits other judges as it awaits its own questions. It
knows no source, no deadline, no retry and no journal: whoever gives it `ask` has bound these to it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import anyio

from ..config import Config
from ..config.judge_models import JudgeConfig
from ..errors import QRewardError
from ..samples import Failed, Sample, Verdict
from ..scheduling.calls import Answer, Call, T
from ..sources.base import Reply, Request


class JudgeFailed(QRewardError):
    """A judge has no verdict on a sample; `failed` says why."""

    def __init__(self, failed: Failed) -> None:
        self.failed = failed
        super().__init__(failed.describe())

    def __reduce__(self) -> tuple[object, ...]:
        return JudgeFailed, (self.failed,)


class Ask(Protocol):
    """Asks one of the sources of a call, by the deadline of the sample that is being judged."""

    async def __call__(self, call: Call[T]) -> Answer[T]:
        """The answer. Raises `CallFailed` if there is none by the deadline or after all tries. Cancelling it cancels
        the attempts under way, and gives back what they hold.
        """
        ...


@dataclass(frozen=True)
class Opening:
    """What a judge is opened with, beside its name and its own part of the configuration."""

    config: Config
    """The whole configuration."""
    sources: tuple[str, ...]
    """The names of the sources that may answer it; empty if its kind asks none."""
    key: bytes
    """The secret that the identifiers of fences around untrusted text are drawn with: at least 16 bytes that the policy
    cannot know."""
    judge: Callable[[str], Judge]
    """Opens another judge of the configuration, by its name."""


class Judge(ABC):
    """Turns a sample into a verdict: the base class of every kind of judge.

    A kind defines `judge`, usually a nested class `Config` with the keys of its configuration, and `asks` if it asks
    sources. The first line of its docstring describes it in `qreward kinds`. `name` is its name in the configuration.
    """

    REQUIRED: ClassVar[tuple[str, ...]] = ()

    Config: ClassVar[type[JudgeConfig]] = JudgeConfig
    """The model of its configuration. Judges that it awaits are named by fields of the type `JudgeName`."""

    asks: ClassVar[str] = ""
    """What it asks sources for: `TEXT`, `VALUE`, or another word that a kind of source has in its `answers`. "": it
    asks none itself."""

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> Judge:
        """Make the judge `name` of a configuration. Default: `cls(name, config, opening)`.

        Raises `ConfigurationError` for what only shows between the parts of the configuration.
        """
        make: Any = cls
        judge: Judge = make(name, config, opening)
        return judge

    @classmethod
    def summary(cls, config: Any) -> str:
        """What a configuration of this kind comes to, in words for `qreward check`; "" (default): nothing to add."""
        return ""

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        """A valid reply to a request of this judge, for `qreward plan`, whose score stands at `share` of its range.

        A kind that asks sources defines it, or it cannot be planned.
        """
        raise NotImplementedError

    @abstractmethod
    async def judge(self, sample: Sample, ask: Ask) -> Verdict:
        """The verdict on `sample`. What it spent is added up by `ask`, not here.

        Raises `JudgeFailed` if there is none. Calls that it leaves unanswered when it ends are dropped. A judge that is
        cancelled must end at once.
        """

    @property
    def parts(self) -> Sequence[Judge]:
        """The judges that it awaits, if any."""
        return ()

    @property
    def calls(self) -> int:
        """How many calls a sample takes at most, without retries."""
        return sum(part.calls for part in self.parts) or 1

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that every verdict of this judge carries, as far as they are known beforehand."""
        return ()

    @property
    def reward_range(self) -> tuple[float, float] | None:
        """The lowest and the highest score of its verdicts; None (default) if that is not known."""
        return None

    @property
    def defines_correct(self) -> bool:
        """Whether all of its verdicts say whether a response is correct."""
        return False


async def together(judges: Sequence[Judge], sample: Sample, ask: Ask) -> dict[str, Verdict | Failed]:
    """What several judges say of a sample at the same time, by their names and in their order.

    The first failure cancels the judges that have not ended; they are left out. Cancelling the call cancels all.
    """
    said: dict[str, Verdict | Failed] = {}

    async def one(judge: Judge) -> None:
        try:
            said[judge.name] = await judge.judge(sample, ask)
        except JudgeFailed as error:
            said[judge.name] = error.failed
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for judge in judges:
            group.start_soon(one, judge)
    return {judge.name: said[judge.name] for judge in judges if judge.name in said}


__all__ = ["Ask", "Judge", "JudgeFailed", "Opening", "together"]
