"""Opens the judges of a configuration, and routes samples to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache, partial
from typing import NamedTuple

from ..config import Config, Route, judges_asked, judges_in_charge, own_sources, routes_of
from ..config.models import JudgeConfig
from ..config.registry import judges, kind_or_mistake
from ..errors import ConfigurationError, Mistake
from ..samples import Sample, Split
from ..secrets import described_error
from .base import GroupJudge, Judge, Opening
from .leaf import Leaf


def kind_of(config: JudgeConfig) -> type[Judge]:
    """Return the kind of judge that `config` is for. Raises ConfigurationError if it cannot be loaded."""
    return kind_or_mistake(judges, config.kind)


def compares_siblings(config: Config) -> bool:
    """Whether some samples go to a judge that compares those of a group."""
    return bool(_comparing(config))


def refuse_comparing(config: Config, why: str, *, remedy: str) -> None:
    """Raise `ConfigurationError` if some samples go to a judge that compares siblings. `why` is the reason, as a
    sentence.
    """
    if names := _comparing(config):
        raise ConfigurationError([Mistake(f"judges.{names[0]}", f"siblings cannot be compared: {why}", remedy)])


def tells_steps(config: Config) -> bool:
    """Whether a judge says what each step or turn of a response adds to its score."""
    return any(kind_of(config.judges[name]).tells_steps(config.judges[name]) for name in judges_asked(config))


def refuse_parts(config: Config, *, turns: str = "", dense: str = "") -> None:
    """Raise `ConfigurationError` for judges of turns, and for `dense`. `turns` says why turns are not known, and
    `dense` why the trainer cannot take rewards in parts, each as a sentence; "": they are, or it can.
    """
    mistakes = [
        Mistake(f"judges.{name}", f"the turns of a response are not known: {turns}", "Judge whole responses.")
        for name in judges_asked(config)
        if turns and kind_of(config.judges[name]).reads_turns
    ]
    if dense and config.dense:
        mistakes.append(Mistake("dense", f"rewards cannot come in parts: {dense}", "Remove the key."))
    if mistakes:
        raise ConfigurationError(mistakes)


def _comparing(config: Config) -> list[str]:
    return [name for name in judges_asked(config) if issubclass(kind_of(config.judges[name]), GroupJudge)]


def open_judge(name: str, config: JudgeConfig, opening: Opening) -> Judge:
    """Make the judge `name` of the configuration.

    Raises ConfigurationError with the mistakes that the kind finds, and if a kind of another package raises any error.
    """
    kind = kind_of(config)
    try:
        return kind.open(name, config, opening)
    except ConfigurationError:
        raise
    except Exception as error:
        problem = described_error(error)
        remedy = "Its constructor takes `name, config, opening`." if isinstance(error, TypeError) else ""
    # Raised outside the `except`, so that it has no `__context__`: the text of the foreign error may hold secrets.
    origin = judges.registrations(config.kind)[0].origin
    raise ConfigurationError([Mistake(f"judges.{name}", f"{origin} cannot open the judge: {problem}.", remedy)])


_KEPT_ROUTES = 1024


class Routed(NamedTuple):
    """Where samples go: their judge, the priority that the configuration gives them, whether they are sensitive to
    latency, and whether their judge compares them with their siblings.
    """

    judge: Judge
    priority: int
    latency_sensitive: bool
    compares: bool


class JudgeRouter:
    """Opens the judges of `config`, and finds the judge for a sample.

    `key` is the secret key for nonces (`Opening.key`). Raises `ConfigurationError` with the mistakes of all judges.
    """

    def __init__(self, config: Config, *, key: bytes) -> None:
        self.config = config
        self._key = key
        self.judges: dict[str, Judge] = {}
        """All judges, by name."""
        mistakes: list[Mistake] = []
        for name in config.judges:
            try:
                self._open(name)
            except ConfigurationError as error:
                mistakes += error.mistakes
        if config.dense and config.engine.server is None and not tells_steps(config):
            problem = "no judge says what each step adds to its score."
            remedy = (
                "Set `reduce` at a process reward model (not `prod`), or add a judge of kind `turns`; or remove it."
            )
            mistakes.append(Mistake("dense", problem, remedy))
        if mistakes:
            # A judge that fails to open is reported again by each judge that it is a part of.
            raise ConfigurationError(list(dict.fromkeys(mistakes)))
        self.judges = {name: self.judges[name] for name in config.judges}
        self.routed = lru_cache(_KEPT_ROUTES)(partial(self._routed, routes_of(config)))
        """Returns where the samples of a data source and a split go; None if no route matches."""

    def _open(self, name: str) -> Judge:
        """Open a judge, and the judges that it awaits."""
        if name not in self.judges:
            opening = Opening(self.config, own_sources(self.config, name), self._key, self._open)
            self.judges[name] = open_judge(name, self.config.judges[name], opening)
        return self.judges[name]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The judges that ask sources themselves, by name."""
        return {name: judge for name, judge in self.judges.items() if isinstance(judge, Leaf)}

    def seen_by(self, leaf: str, sample: Sample) -> list[Sample]:
        """Return what a judge sees of a sample, through the judges that await it."""
        awaiting = [judge for judge in self.judges.values() if leaf in (part.name for part in judge.parts)]
        found = [one for judge in awaiting for each in self.seen_by(judge.name, sample) for one in judge.seen(each)]
        found = found or [sample]
        return [each for place, each in enumerate(found) if each not in found[:place]]

    def judge_of(self, sample: Sample) -> Judge | None:
        """Return the judge for a sample; None if no route matches."""
        routed = self.routed(sample.data_source, sample.split)
        return None if routed is None else routed.judge

    def compares(self, sample: Sample) -> bool:
        """Whether a sample goes to a judge that compares it with its siblings."""
        routed = self.routed(sample.data_source, sample.split)
        return routed is not None and routed.compares

    def _routed(self, routes: Sequence[tuple[str, Route]], data_source: str, split: Split) -> Routed | None:
        route = next((route for pattern, route in routes if fnmatchcase(data_source, pattern)), None)
        if route is None:
            return None
        judge, engine = self.judges[route.judge], self.config.engine.priority
        of_split = engine.validation if split == "val" else engine.train
        given = (route.priority, self.config.judges[route.judge].priority, of_split)
        priority = next(each for each in given if each is not None)
        # Those of a validation are compared with other validations, so their rewards must not depend on siblings.
        return Routed(judge, priority, route.latency_sensitive, bool(judge.comparing) and split != "val")

    def calls_of(self, samples: Iterable[Sample]) -> int:
        """Return the most calls that these samples take, without retries."""
        judges = (self.judge_of(sample) for sample in samples)
        return sum(judge.calls for judge in judges if judge is not None)

    @cached_property
    def most_calls(self) -> int:
        """The most calls that one sample takes, without retries."""
        return max((judge.calls for judge in self.judges.values()), default=1)

    def component_names(self) -> tuple[str, ...]:
        """Return the known names of components over all judges that samples may go to."""
        return tuple(component for judge in self._in_charge() for component in judge.component_names())

    @property
    def defines_correct(self) -> bool:
        """Whether any judge that samples may go to sets `correct` in every verdict."""
        return any(judge.defines_correct for judge in self._in_charge())

    def _in_charge(self) -> Sequence[Judge]:
        return [self.judges[name] for name in judges_in_charge(self.config)]
