"""The judges of a configuration, and which of them a sample goes to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..config import Config, judge_for, judges_in_charge, sources_of
from ..config import models as configuration
from ..errors import ConfigurationError, Mistake
from ..samples import Sample
from ..sources import kind_of
from .base import Judge
from .function import FunctionJudge
from .leaf import Leaf
from .llm import LLMJudge
from .sums import SumJudge


class JudgeRouter:
    """Opens the judges of `config`, and finds the one for a sample.

    `key` is as in `build_judge`. Raises `ConfigurationError` with the mistakes of all judges.
    """

    def __init__(self, config: Config, *, key: bytes) -> None:
        self._config = config
        self.judges: dict[str, Judge] = {}
        """All judges, by name."""
        mistakes: list[Mistake] = []
        for name, node in config.judges.items():
            if isinstance(node, configuration.SumJudge):
                continue
            names = sources_of(config, name)
            functions = all(kind_of(config.sources[source]).local for source in names)
            try:
                self.judges[name] = build_judge(name, node, sources=names, key=key, keeps_returned=functions)
            except ConfigurationError as error:
                mistakes += error.mistakes
        if mistakes:
            raise ConfigurationError(mistakes)
        for name in config.judges:
            self._open(name)

    def _open(self, name: str) -> Judge:
        """Open a judge after those that it awaits."""
        if name not in self.judges:
            node = self._config.judges[name]
            assert isinstance(node, configuration.SumJudge), "the others are open"
            parts = [self._open(part) for part in node.weights]
            self.judges[name] = SumJudge(name, node, parts=parts, nodes=self._config.judges)
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


def build_judge(
    name: str,
    config: configuration.AskingJudge,
    *,
    sources: Sequence[str],
    key: bytes,
    keeps_returned: bool = False,
) -> Leaf:
    """Build the judge that `config` describes.

    `sources` names the sources that may answer it, and `key` is the secret that the identifiers of its fences are drawn
    with (at least 16 bytes that the policy cannot know; 64 are used).
    `keeps_returned` is for judges of functions (`FunctionJudge`).
    Raises `ConfigurationError` with every mistake of the templates and numbers, by its path `judges.<name>.<key>`.
    """
    if isinstance(config, configuration.LLMJudge):
        return LLMJudge(name, config, sources=sources, key=key)
    return FunctionJudge(name, config, sources=sources, keeps_returned=keeps_returned)
