"""Defines `Whole`, the base of judges of judges: how the verdicts of parts become one, what each step or turn adds to a
score, how a failed part is told, and which parts are refused.

The components of a whole are the score of each part that was asked, by its name, and the components of the part below
it: `reward/quality/proof`. A part that was not asked has none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias

import anyio

from ..config.nodes import judges_named
from ..errors import ConfigurationError, Mistake
from ..samples import Cause, Failed, Sample, Verdict
from .base import Ask, Judge, JudgeFailed, Opening, reaches, together

Reduction: TypeAlias = Literal["last", "min", "mean", "sum", "prod"]
"""How the scores of steps or turns become one."""


class Whole(Judge):
    """A judge that awaits other judges: the base class of such kinds.

    `parts` are the judges that its configuration names, in the order of its keys. `own` are the names of the components
    that a kind has beside those of its parts. Raises `ConfigurationError` with all mistakes that `part_mistakes` finds.
    """

    own: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> Judge:
        return cls(name, config, [opening.judge(part) for part in judges_named(config)])

    def __init__(self, name: str, config: Any, parts: Sequence[Judge]) -> None:
        super().__init__(name)
        self._config = config
        self._parts = tuple(parts)
        if mistakes := [*self._name_mistakes(), *self.part_mistakes()]:
            raise ConfigurationError(mistakes)

    def part_mistakes(self) -> Iterable[Mistake]:
        """Find parts that this kind cannot work with. Default: there are none."""
        return ()

    def _name_mistakes(self) -> Iterator[Mistake]:
        """Find components with the same name."""
        for name, count in Counter(self.component_names()).items():
            if count > 1:
                problem = f"two components of it have the name {name!r}."
                yield Mistake(f"judges.{self.name}", problem, "Rename a part.")

    @property
    def parts(self) -> Sequence[Judge]:
        return self._parts

    @property
    def reward_range(self) -> tuple[float, float] | None:
        return range_of(part.reward_range for part in self._parts)

    def component_names(self) -> tuple[str, ...]:
        """Return its own components, the name of each part, and its components as `<part>/<component>`, as far as they
        are known in advance.
        """
        names = [*self.own]
        for part in dict.fromkeys(self._parts):
            names += [part.name, *(f"{part.name}/{each}" for each in part.component_names())]
        return tuple(names)

    async def ask_part(self, part: Judge, sample: Sample, ask: Ask) -> Verdict:
        """Return the verdict of a part. Raises `JudgeFailed` in the name of the whole."""
        try:
            return await part.judge(sample, ask)
        except JudgeFailed as error:
            raise part_failed(self.name, part.name, error.failed) from None

    async def ask_parts(
        self,
        sample: Sample,
        ask: Ask,
        *,
        dispensable: Collection[str] = (),
        within_s: Mapping[str, float | None] | None = None,
    ) -> tuple[dict[str, Verdict], dict[str, Failed]]:
        """Ask all parts at once; see `verdicts_of`. `within_s`: the longest waits for dispensable parts, by name."""
        running: dict[str, Awaitable[Verdict]] = {}
        for part in self._parts:
            limit_s = (within_s or {}).get(part.name)
            running[part.name] = part.judge(sample, ask) if limit_s is None else in_time(part, sample, ask, limit_s)
        return await verdicts_of(self.name, running, dispensable=dispensable)

    @staticmethod
    def skip(parts: Iterable[Judge], ask: Ask) -> None:
        """Say that the sample does not come to these parts."""
        for part in parts:
            if part.comparing:
                ask.skip(part)


async def verdicts_of(
    whole: str, running: Mapping[str, Awaitable[Verdict]], *, dispensable: Collection[str] = ()
) -> tuple[dict[str, Verdict], dict[str, Failed]]:
    """Await the verdicts of parts at the same time; return them and the failures, by name. Raises `JudgeFailed` in the
    name of the whole for a part that is not dispensable, and cancels the others.
    """
    said = await together(running, dispensable=dispensable)
    failures = {name: each for name, each in said.items() if isinstance(each, Failed)}
    for name, failed in failures.items():
        if name not in dispensable:
            raise part_failed(whole, name, failed)
    return {name: each for name, each in said.items() if isinstance(each, Verdict)}, failures


async def in_time(part: Judge, sample: Sample, ask: Ask, within_s: float) -> Verdict:
    """Return the verdict of a part. One that the whole can do without raises `JudgeFailed` (`infra/deadline`) after
    `within_s` seconds.
    """
    with anyio.move_on_after(within_s):
        return await part.judge(sample, ask)
    detail = f"no reward within {within_s:g} s (within_s)"
    raise JudgeFailed(Failed(Cause.INFRA, "deadline", detail, judge=part.name))


def part_failed(whole: str, part: str, failed: Failed) -> JudgeFailed:
    """The failure of a whole because of a part, whose name begins the detail."""
    return JudgeFailed(replace(failed, detail=f"{part}: {failed.detail or failed.reason}", judge=whole))


def range_of(ranges: Iterable[tuple[float, float] | None]) -> tuple[float, float] | None:
    """The range of rewards that come from one of several ranges; None if one of them is unknown."""
    every = list(ranges)
    known = [each for each in every if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if len(known) == len(every) else None


def bar_mistakes(place: str, part: Judge, bar: float | None, does: str, *, below: bool = False) -> list[Mistake]:
    """Find a bar that the rewards of a part always or never reach. `place` is its key, and `does` what the part does
    with rewards from the bar on, or with those up to it (`below`).
    """
    if bar is None or part.reward_range is None:
        return []
    low, high = part.reward_range
    never, always = not reaches(high, bar), reaches(low, bar)
    if below:
        never, always = not reaches(bar, low), reaches(bar, high)
    problem = f"it {'never' if never else 'always'} {does}: the rewards of {part.name} are from {low:g} to {high:g}."
    return [Mistake(place, problem, "Set a number in between.")] if never or always else []


def correct_at_mistakes(whole: Judge, *bars: float | None) -> list[Mistake]:
    """Find a `correct_at` outside of the range of a judge's rewards, if that is known."""
    low, high = whole.reward_range or (-math.inf, math.inf)
    outside = [bar for bar in bars if bar is not None and not (reaches(bar, low) and reaches(high, bar))]
    problem = "{:g} is outside of the range of its rewards, {:g} to {:g}."
    remedy = "It is compared with the reward of this judge."
    return [Mistake(f"judges.{whole.name}.correct_at", problem.format(bar, low, high), remedy) for bar in outside]


def mask_mistakes(place: str, whole: str, part: Judge) -> list[Mistake]:
    """Find a part that takes samples out of the training, where the whole goes on without a part that fails."""
    problem = f"judge {part.name} takes samples out, but {whole} goes on without it, so they would be trained."
    return [Mistake(place, problem, f"Put the screen around {whole}.")] if part.masks else []


def combined(
    whole: str,
    verdicts: Mapping[str, Verdict],
    score: float,
    *,
    correct: bool | None = None,
    own: Mapping[str, float] | None = None,
    weights: Mapping[str, float] | None = None,
) -> Verdict:
    """Return the verdict of a whole with this score, from those of the parts that were asked, by name.

    `own` are its own components. `weights` are the factors of the parts that the score adds up; that of a part which
    decides alone is 1. If the reward of such a part is a floor, the basis of the whole is a floor, too, and what the
    steps of a response add to them, they add to the whole. The cause of such a floor is that of the first part. None:
    the score comes from all parts in another way.
    """
    components: dict[str, float] = dict(own or {})
    for name, verdict in verdicts.items():
        components[name] = verdict.score
        components |= {f"{name}/{component}": value for component, value in verdict.components.items()}
    rationales = {name: verdict.rationale for name, verdict in verdicts.items() if verdict.rationale}
    deciding = [name for name in verdicts if weights is None or name in weights]
    failures = {name: failed for name in deciding if (failed := verdicts[name].failure)}
    failure = next(iter(failures.values()), None)
    if failure is not None:
        detail = "; ".join(f"{name}: {failed.detail or failed.reason}" for name, failed in failures.items())
        failure = replace(failure, detail=detail, judge=whole)
    return Verdict(
        score,
        components=components,
        rationale="\n".join(f"{name}: {rationale}" for name, rationale in rationales.items()),
        correct=correct,
        judge=whole,
        source=_beside(verdict.source for verdict in verdicts.values()),
        model=_beside(verdict.model for verdict in verdicts.values()),
        weight_version=_beside(verdict.weight_version for verdict in verdicts.values()),
        basis="judged" if failure is None else "floor",
        failure=failure,
        cached=all(verdict.cached for verdict in verdicts.values()),
        cut=any(verdict.cut for verdict in verdicts.values()),
        returned=_only_one(verdict.returned for verdict in verdicts.values()),
        dense=tuple(
            # Turns that end at the same character stay in their order.
            sorted(
                (
                    (end, weight * added)
                    for name, weight in (weights or {}).items()
                    for end, added in verdicts[name].dense
                ),
                key=itemgetter(0),
            )
        ),
    )


def split(scores: Sequence[float], reduction: Reduction, discount: float = 1.0) -> tuple[float, Sequence[float]]:
    """Return the score of a response from those of its steps, and what each step adds to it: nothing is told for
    `prod`, which is no sum.

    With `mean` and `sum`, the n-th step counts `discount` to the power of n, from 0. `last`: each step adds by how much
    it is better than the one before (potential-based shaping; Ng, Harada and Russell, ICML 1999). `min`: the worst step
    adds all (min-form credit assignment; PURE, arXiv 2504.15275).
    """
    if reduction == "prod":
        return math.prod(scores), ()
    if reduction == "last":
        return scores[-1], [scores[0], *(after - before for before, after in pairwise(scores))]
    if reduction == "min":
        worst = scores.index(min(scores))
        return scores[worst], [score if place == worst else 0.0 for place, score in enumerate(scores)]
    weights = [discount**place for place in range(len(scores))]
    total = math.fsum(weights) if reduction == "mean" else 1.0
    parts = [score * weight / total for score, weight in zip(scores, weights, strict=True)]
    return math.fsum(parts), parts


def _beside(names: Iterable[str]) -> str:
    # Sorted, so that metrics do not count "a+b" and "b+a" as two names.
    return "+".join(sorted({name for several in names for name in several.split("+") if name}))


def _only_one(mappings: Iterable[Mapping[str, Any] | None]) -> Mapping[str, Any] | None:
    """Return the mapping of the function among the parts, without its score; None unless exactly one part has one."""
    found = [mapping for mapping in mappings if mapping is not None]
    return {key: value for key, value in found[0].items() if key != "score"} if len(found) == 1 else None
