"""The judge that takes a value as the verdict: what a reward function returned, or what a scoring service answered.

Nobody is asked anything in words, so nothing is fenced here; the numbers are checked like those of any judge, and that
is all the gate there is, as a service's are not to be trusted. A truth value is not a score: frameworks add and average
scores, and what gives now `True`, now 0.5, is a mistake that trains. Beside the score, truth values are labels (`acc`),
and count as 1.0 and 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.judge_models import AskingConfig, Interval
from ..errors import InvalidReply
from ..samples import RawScore, Sample, Verdict, fits_float32
from ..sources import kind_of
from ..sources.base import Reply, Request
from ..sources.kind import VALUE
from .base import Opening
from .leaf import Leaf, checked
from .settings import fingerprint

MOST_COMPONENTS = 100
"""Components of a verdict, where they are not named; more is no set of scores, and every one becomes a metric."""
_LONGEST_NAME_CHARS = 100


class FunctionJudge(Leaf):
    """The value of a function or a scoring service, taken as the verdict.

    It is a finite number, or a mapping that has one under `score`. Numbers are Python's, numpy's, and tensors without
    dimensions. Of a mapping, the keys named in the configuration become components, and each must hold a finite number
    or a truth value; with none named every key that does becomes one, and the rest (texts, lists, NaN, names of more
    than 100 characters) is dropped. `correct_at` decides correctness where it is configured, else the key `acc` where
    it is a truth value, 0 or 1. With `keeps_returned` the verdict carries the mapping as it was, too; services' whole
    replies are not worth the memory. Raises `ConfigurationError` for numbers that contradict each other.
    """

    class Config(AskingConfig):
        """The value of a reward function or a scoring service (sources of kind `function` and `http`), taken as the
        verdict: a number, or a mapping with the key `score`."""

        reward_range: Interval | None = None
        """The range that scores must lie in. Default: any finite number."""

        components: tuple[str, ...] = ()
        """Keys of the mapping that go into the metrics. Naming them keeps the metrics of every sample alike,
        failed ones included. Default: every key with a number, as it comes."""

    asks = VALUE

    @classmethod
    def open(cls, name: str, config: Any, opening: Opening) -> FunctionJudge:
        local = all(kind_of(opening.config.sources[source]).local for source in opening.sources)
        return cls(name, config, sources=opening.sources, keeps_returned=local)

    @classmethod
    def rehearsed(cls, config: Any, request: Request, share: float) -> Reply:
        low, high = config.reward_range or (0.0, 1.0)
        score = low + share * (high - low)
        return Reply(value={"score": score, **dict.fromkeys(config.components, score)})

    def __init__(
        self,
        name: str,
        config: Config,
        *,
        sources: Sequence[str],
        keeps_returned: bool = False,
    ) -> None:
        checked(name, config)
        super().__init__(name, config, sources=sources, fingerprint=fingerprint("function"))
        self._config = config
        self._keeps_returned = keeps_returned

    def request(self, sample: Sample, *, attempt: int) -> Request:
        # What an empty response is worth is for the function, or the service, to say.
        return Request(sample=sample, judge=self.name)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the value. Raises `InvalidReply`."""
        value = self._with_clean_names(_unwrapped(reply.value), reply.clean)
        if isinstance(value, Mapping):
            if "score" not in value:
                raise InvalidReply(
                    "the value is a mapping without the key `score`; add it, give a number, or, where a service has "
                    "it elsewhere, say so with its source's `score_key`"
                )
            verdict = self._verdict(value, _unwrapped(value["score"]), "the value under `score`")
            raw = _raw(value, verdict.score)
        else:
            verdict = self._verdict({}, value, "the value")
            raw = RawScore(verdict.score)
        returned = value if self._keeps_returned and isinstance(value, Mapping) else None
        return replace(verdict, model=reply.model, raw=raw, returned=returned)

    def _with_clean_names(self, value: Any, clean: Callable[[str], str] | None) -> Any:
        """Strike secrets out of the keys of a mapping, because these become names of metrics. What the configuration
        names as a component is no secret.
        """
        if clean is None or not isinstance(value, Mapping):
            return value
        known = {"score", "acc", *self._config.components}
        names = {key: clean(key) for key in value if isinstance(key, str) and key not in known}
        if all(name == key for key, name in names.items()):
            return value
        return {names.get(key, key): item for key, item in value.items()}

    def mapped(self, raw: RawScore) -> Verdict:
        return replace(self._verdict(raw.components, raw.score, "the recorded score"), raw=raw)

    def _verdict(self, values: Mapping[Any, Any], score: Any, what: str) -> Verdict:
        components = self._components(values)
        checked = self._score(score, what)
        correct = self._correct(checked, _label(values.get("acc")))
        return Verdict(score=checked, components=components, correct=correct, judge=self.name)

    def component_names(self) -> tuple[str, ...]:
        return self._config.components

    def _score(self, value: Any, what: str) -> float:
        if isinstance(value, bool):
            raise InvalidReply(f"{what} is a truth value, not a number; give 1.0 or 0.0")
        if not isinstance(value, (int, float)):
            raise InvalidReply(f"{what} is of type {type(value).__name__}, not a number; give a float")
        score = _label(value)
        if score is None:
            raise InvalidReply(
                f"{what} is not finite in float32, as trainers hold it; give a finite number, or an error for no score"
            )
        interval = self._config.reward_range
        if interval is not None and not interval[0] <= score <= interval[1]:
            raise InvalidReply(f"{what}, {score:g}, is outside the reward range {interval[0]:g} to {interval[1]:g}")
        return score

    def _components(self, values: Mapping[Any, Any]) -> dict[str, float]:
        named = self._config.components
        if not named:
            components = _labels(values)
            if len(components) > MOST_COMPONENTS:
                raise InvalidReply(
                    f"the value has {len(components):,} numbers beside its score; name those that count in "
                    f"judges.{self.name}.components"
                )
            return components
        components = {}
        for key in named:
            label = _label(values.get(key))
            if label is None:
                state = "holds no finite number" if key in values else "is missing"
                raise InvalidReply(
                    f"the component {key!r} {state}; give it with every score, or take it out of "
                    f"judges.{self.name}.components"
                )
            components[key] = label
        return components

    def _correct(self, score: float, acc: float | None) -> bool | None:
        if self._config.correct_at is not None:
            return score >= self._config.correct_at
        return bool(acc) if acc in (0.0, 1.0) else None


def _labels(values: Mapping[Any, Any]) -> dict[str, float]:
    """Every number of a value beside its score, by name."""
    labels = ((key, _label(value)) for key, value in values.items() if _is_name(key) and key != "score")
    return {key: label for key, label in labels if label is not None}


def _raw(value: Mapping[Any, Any], score: float) -> RawScore | None:
    """The numbers of a value, for whatever names and ranges are configured later; None: too many to be kept."""
    labels = _labels(value)
    return RawScore(score, labels) if len(labels) <= MOST_COMPONENTS else None


def _is_name(key: Any) -> bool:
    return isinstance(key, str) and len(key) <= _LONGEST_NAME_CHARS


def _unwrapped(value: Any) -> Any:
    """Take the number out of a numpy scalar or a tensor without dimensions, without importing either library."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        try:
            return value.item()
        except Exception as error:
            raise InvalidReply(f"the value cannot be read: {type(error).__name__}") from None
    return value


def _label(value: Any) -> float | None:
    """The number, finite in float32, that a value is, truth values included; None where it is none."""
    value = _unwrapped(value)
    if not isinstance(value, (int, float)):
        return None
    return float(value) if fits_float32(value) else None
