"""Defines `FunctionJudge`: it takes the value of a reward function or a scoring service as the verdict.

No model reads a prompt, so there is no fence. The numbers are not trusted, and checked as strictly as those of any
judge. A boolean is not accepted as the score: frameworks add and average scores, and a function that returns sometimes
`True` and sometimes 0.5 has a mistake that would go unnoticed. Beside the score, booleans are labels (`acc`) and count
as 1.0 and 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from ..config.models import AskingConfig, Interval
from ..errors import InvalidReply
from ..errors import kind_of as type_of
from ..samples import RawScore, Sample, Verdict, fits_float32
from ..samples.json_values import without_lone_surrogates
from ..sources import kind_of
from ..sources.base import Reply, Request
from ..sources.kind import VALUE
from .base import Opening, reaches
from .leaf import Leaf, fingerprint

_ANY = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
MOST_COMPONENTS = 100
"""Most components of a verdict if the configuration names none. Each becomes a metric, so more would be a mistake."""


class FunctionJudge(Leaf):
    """The value of a function or a scoring service, taken as the verdict.

    The value is a finite number, or a mapping with a finite number under `score`. Numbers of Python and numpy and
    tensors without dimensions are accepted. Components come from the mapping: if the configuration names keys, each of
    these must hold a finite number or a boolean. If it names none, every key that holds one becomes a component, and
    the rest (texts, lists, NaN) is dropped. `correct_at` decides correctness if it
    is configured; otherwise the key `acc`, if it is a boolean, 0 or 1. The verdict
    of a local function also has the whole mapping, in JSON's types; replies of services are not kept, to save memory.
    Raises `ConfigurationError` for numbers that contradict each other.
    """

    class Config(AskingConfig):
        """The value of a reward function or a scoring service (sources of kind `function` and `http`), taken as the
        verdict: a number, or a mapping with the key `score`."""

        reward_range: Interval | None = None
        """The range that scores must lie in. Default: any finite number."""

        components: tuple[str, ...] = ()
        """Keys of the mapping that go into the metrics. If they are named, every sample has the same metrics, failed
        samples included. Default: every key that holds a number."""

    asks = VALUE

    def __init__(self, name: str, config: Config, opening: Opening) -> None:
        super().__init__(name, config, sources=opening.sources, fingerprint=fingerprint("function"))
        self._config = config
        self._keeps_returned = all(kind_of(opening.config.sources[name]).local for name in opening.sources)

    def request(self, sample: Sample, *, attempt: int) -> Request:
        # The function or the service decides the score of an empty response.
        return Request(sample=sample, judge=self.name)

    def verdict(self, request: Request, reply: Reply) -> Verdict:
        """Read the value. Raises `InvalidReply`."""
        value, clean = _unwrapped(reply.value), reply.clean
        if clean is not None and isinstance(value, Mapping):
            # Keys become names of metrics. One that holds a secret is left out.
            value = {key: item for key, item in value.items() if not isinstance(key, str) or clean(key) == key}
        if isinstance(value, Mapping):
            if "score" not in value:
                elsewhere = (
                    "" if self._keeps_returned else ", or set `score_key` of the source to the place of the score"
                )
                told = "the value is a mapping without the key `score`; add the key, or return a number"
                raise InvalidReply(told + elsewhere)
            verdict = self._verdict(value, _unwrapped(value["score"]), "the value under `score`")
            verdict.raw = RawScore(verdict.score, _labels(value))
            if self._keeps_returned:
                verdict.returned = {_described(key): _plain(item, clean) for key, item in value.items()}
        else:
            verdict = self._verdict({}, value, "the value")
            verdict.raw = RawScore(verdict.score)
        verdict.model = reply.model
        return verdict

    def rehearsed_verdict(self, request: Request, share: float) -> Verdict:
        # As a check does. Between the ends, no sample would get past a gate that wants the high one.
        return super().rehearsed_verdict(request, float(share >= 0.5))

    def mapped(self, raw: RawScore) -> Verdict:
        verdict = self._verdict(raw.components, raw.score, "the recorded score")
        verdict.raw = raw
        return verdict

    def _verdict(self, values: Mapping[Any, Any], score: Any, what: str) -> Verdict:
        components = self._components(values)
        checked = self._score(score, what)
        bar, acc = self._config.correct_at, _label(values.get("acc"))
        correct = bool(acc) if acc in (0.0, 1.0) else None
        if bar is not None:
            correct = reaches(checked, bar)
        return Verdict(score=checked, components=components, correct=correct, judge=self.name)

    def component_names(self) -> tuple[str, ...]:
        return self._config.components

    def _score(self, value: Any, what: str) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidReply(f"{what} is of type {type(value).__name__}, not a number; return a float")
        score = _label(value)
        if score is None:
            raise InvalidReply(
                f"{what} is not finite in float32, the type of trainers; return a finite number, or raise an error"
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
                    f"the value has {len(components):,} numbers beside its score; list the ones to keep in "
                    f"judges.{self.name}.components"
                )
            return components
        components = {}
        for key in named:
            label = _label(values.get(key))
            if label is None:
                state = "holds no finite number" if key in values else "is missing"
                raise InvalidReply(
                    f"the component {key!r} {state}; return it with every score, or remove it from "
                    f"judges.{self.name}.components"
                )
            components[key] = label
        return components


def _labels(values: Mapping[Any, Any]) -> dict[str, float]:
    """Return every number of a mapping except its score, by key."""
    labels = ((key, _label(value)) for key, value in values.items() if isinstance(key, str) and key != "score")
    return {key: label for key, label in labels if label is not None}


def _unwrapped(value: Any) -> Any:
    """Convert a numpy scalar or a tensor without dimensions to a Python number, without importing either library."""
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        try:
            return value.item()
        except Exception as error:
            raise InvalidReply(f"the value cannot be read: {type(error).__name__}") from None
    return value


def _plain(value: Any, clean: Callable[[str], str] | None) -> Any:
    """Return what a function returned in JSON's types and without secrets. It may have parsed a response into anything,
    and the trainer and the reward server write it later.
    """
    try:
        plain = orjson.loads(orjson.dumps(_unwrapped(value), default=_described, option=_ANY))
    except (TypeError, ValueError, RecursionError):
        plain = _described(value)
    return plain if clean is None else _cleaned(plain, clean)


def _described(value: Any) -> str:
    try:
        return str(without_lone_surrogates(value if isinstance(value, str) else repr(value)))
    except Exception:  # such as a number of more than 4,300 digits
        return f"a value of type {type_of(value)}"


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {clean(key): _cleaned(item, clean) for key, item in value.items()}
    return [_cleaned(item, clean) for item in value] if isinstance(value, list) else value


def _label(value: Any) -> float | None:
    """Return a number or a boolean as a float; None if it is not finite in float32, or another type."""
    value = _unwrapped(value)
    if not isinstance(value, (int, float)):
        return None
    return float(value) if fits_float32(value) else None
