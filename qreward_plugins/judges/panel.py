"""The judges of a configuration, and which of them a sample goes to.

Most samples go to one judge. Those of a sum go to several, so whoever scores a sample asks for its judge and then for
the parts of that, of which a judge that is no sum has one: itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from ..config import Config, judge_for, judges_in_charge, sources_of
from ..config import models as configuration
from ..errors import ConfigurationError, Mistake
from ..samples import Sample
from ..sources import kind_of
from .base import Judge
from .function import FunctionJudge
from .llm import LLMJudge
from .sums import JudgeSum

InCharge: TypeAlias = Judge | JudgeSum
"""What a sample goes to."""


class Panel:
    """The judges of `config`.

    `key` is as in `build_judge`. Raises `ConfigurationError` with the mistakes of all judges.
    """

    def __init__(self, config: Config, *, key: bytes) -> None:
        self._config = config
        self.judges: dict[str, Judge] = {}
        """The judges that ask sources, by name."""
        self.sums: dict[str, JudgeSum] = {}
        """The sums of them, by name."""
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
        for name, node in config.judges.items():
            if isinstance(node, configuration.SumJudge):
                parts = [self.judges[part] for part in node.weights]
                self.sums[name] = JudgeSum(name, node, parts=parts, nodes=config.judges)

    def judge_of(self, sample: Sample) -> InCharge | None:
        """Who judges a sample; None: no route leads to anybody."""
        name = judge_for(self._config, sample.data_source)
        return None if name is None else self.sums.get(name) or self.judges[name]

    def requests_of(self, samples: Iterable[Sample]) -> int:
        """How many requests samples take, if none has to be made again."""
        judges = (self.judge_of(sample) for sample in samples)
        return sum(len(parts_of(judge)) for judge in judges if judge is not None)

    @property
    def most_requests(self) -> int:
        """How many requests a sample takes at most, if none has to be made again."""
        return max((len(judge.parts) for judge in self.sums.values()), default=1)

    def component_names(self) -> tuple[str, ...]:
        """Names of the components that the verdicts of all samples together are known to carry."""
        in_charge = [self.sums.get(name) or self.judges[name] for name in judges_in_charge(self._config)]
        return tuple(component for judge in in_charge for component in judge.component_names())

    @property
    def correct_at(self) -> Mapping[str, float]:
        """From which reward on a response is correct, by the names of those judges in charge that say so."""
        bars = {name: self._config.judges[name].correct_at for name in judges_in_charge(self._config)}
        return {name: bar for name, bar in bars.items() if bar is not None}


def parts_of(judge: InCharge) -> Sequence[Judge]:
    """The judges whose requests are made for a sample that goes to `judge`."""
    return judge.parts if isinstance(judge, JudgeSum) else (judge,)


def build_judge(
    name: str,
    config: configuration.AskingJudge,
    *,
    sources: Sequence[str],
    key: bytes,
    keeps_returned: bool = False,
) -> Judge:
    """Build the judge that `config` describes.

    `sources` names the sources that may answer it, and `key` is the secret that the identifiers of its fences are drawn
    with (at least 16 bytes that the policy cannot know; 64 are used).
    `keeps_returned` is for judges of functions (`FunctionJudge`).
    Raises `ConfigurationError` with every mistake of the templates and numbers, by its path `judges.<name>.<key>`.
    """
    if isinstance(config, configuration.LLMJudge):
        return LLMJudge(name, config, sources=sources, key=key)
    return FunctionJudge(name, config, sources=sources, keeps_returned=keeps_returned)
