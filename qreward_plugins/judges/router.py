"""The judges of a configuration, and which of them a sample goes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import Config, judge_for, judges_in_charge, own_sources
from ..errors import ConfigurationError, Mistake
from ..samples import Sample
from .base import Judge, Opening
from .leaf import Leaf
from .opening import open_judge


class JudgeRouter:
    """Opens the judges of `config`, and finds the one for a sample.

    `key` is the secret of fences (`Opening.key`). Raises `ConfigurationError` with the mistakes of all judges.
    """

    def __init__(self, config: Config, *, key: bytes) -> None:
        self._config = config
        self._key = key
        self.judges: dict[str, Judge] = {}
        """All judges, by name."""
        mistakes: list[Mistake] = []
        for name in config.judges:
            try:
                self._open(name)
            except ConfigurationError as error:
                mistakes += error.mistakes
        if mistakes:
            # A judge that does not open keeps those from opening that it is a part of.
            raise ConfigurationError(list(dict.fromkeys(mistakes)))
        self.judges = {name: self.judges[name] for name in config.judges}

    def _open(self, name: str) -> Judge:
        """Open a judge, and before it those that it awaits."""
        if name not in self.judges:
            opening = Opening(self._config, own_sources(self._config, name), self._key, self._open)
            self.judges[name] = open_judge(name, self._config.judges[name], opening)
        return self.judges[name]

    @property
    def leaves(self) -> dict[str, Leaf]:
        """The judges that ask sources themselves, by name."""
        return {name: judge for name, judge in self.judges.items() if isinstance(judge, Leaf)}

    def judge_of(self, sample: Sample) -> Judge | None:
        """Who judges a sample; None if no route leads to anybody."""
        name = judge_for(self._config, sample.data_source)
        return None if name is None else self.judges[name]

    def calls_of(self, samples: Iterable[Sample]) -> int:
        """How many calls samples take at most, without retries."""
        judges = (self.judge_of(sample) for sample in samples)
        return sum(judge.calls for judge in judges if judge is not None)

    @property
    def most_calls(self) -> int:
        """How many calls one sample takes at most, without retries."""
        return max((judge.calls for judge in self.judges.values()), default=1)

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that the verdicts of all samples together are known to carry."""
        return tuple(component for judge in self._in_charge() for component in judge.component_names())

    @property
    def defines_correct(self) -> bool:
        """Whether any judge in charge says of each response whether it is correct."""
        return any(judge.defines_correct for judge in self._in_charge())

    def _in_charge(self) -> Sequence[Judge]:
        return [self.judges[name] for name in judges_in_charge(self._config)]
