"""Makes the samples of a rehearsal: rollouts with the assumed lengths and data sources, drawn for each seed."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import Config, judge_for
from ..errors import InputError
from ..samples import Sample
from .lengths import BYTES_PER_TOKEN, Lengths

_WORDS = "so we add the two numbers and check the sum once more before we write it down, "

_WILDCARD = re.compile(r"\[([^!]).*?\]|[*?]", re.DOTALL)


@dataclass(frozen=True)
class Rollouts:
    """The samples of a step. `data_sources` are names with shares; if empty, those of the rollouts of a file."""

    count: int
    lengths: Lengths
    prompt_tokens: int
    data_sources: tuple[tuple[str, float], ...]
    kept: float = 1.0
    """The part of each response that is kept, for a rehearsal with shorter rollouts."""

    def samples(self, seed: int, *, prefix: str = "", count: int | None = None) -> list[Sample]:
        """Return `count` samples for a seed (default: the number of the step), with unique ids."""
        count = self.count if count is None else count
        rng = random.Random(f"plan {prefix}{seed}")
        named = rng.choices(*_columns(self.data_sources), k=count) if self.data_sources else []
        if self.lengths.rollouts:
            rows = self._rows(rng, count)
        else:
            messages = [{"role": "user", "content": _text(self.prompt_tokens * BYTES_PER_TOKEN)}]
            texts = _text(BYTES_PER_TOKEN * max(lengths)) if (lengths := self.lengths.draw(count, rng)) else ""
            rows = [Sample(messages, texts[: BYTES_PER_TOKEN * length]) for length in lengths]  # type: ignore[arg-type]
        return [
            replace(
                sample,
                id=f"{prefix}{number}",
                response=sample.response[: max(1, round(self.kept * len(sample.response)))],
                data_source=named[number] if named else sample.data_source,
            )
            for number, sample in enumerate(rows)
        ]

    def _rows(self, rng: random.Random, count: int) -> list[Sample]:
        rows: list[Sample] = []
        while len(rows) < count:
            rows += rng.sample(self.lengths.rollouts, min(count - len(rows), len(self.lengths.rollouts)))
        return rows


def default_data_source(config: Config) -> str:
    """Return a data source that the route `"*"` matches, or else the first route."""
    if not config.routes:
        return ""
    pattern = "*" if "*" in config.routes else next(iter(config.routes))
    # Wildcards of the glob are replaced by text, and a class like [ab] by its first character.
    name = _WILDCARD.sub(lambda found: found[1] or ("any" if found[0] == "*" else "x"), pattern)
    if judge_for(config, name) is None:
        raise InputError(f"no data source can be derived from the route {pattern!r}; name one with --data-source")
    return name


def check_data_sources(config: Config, names: Sequence[str]) -> None:
    """Raise `InputError` for a data source that no judge scores."""
    for name in names:
        if judge_for(config, name) is None:
            routes = ", ".join(config.routes) or "none, and several judges"
            raise InputError(f"no route matches the data source {name!r}; routes: {routes}. Choose with --data-source")


def _columns(shares: Sequence[tuple[str, float]]) -> tuple[list[str], list[float]]:
    return [name for name, _ in shares], [share for _, share in shares]


def _text(length: int) -> str:
    return (_WORDS * (length // len(_WORDS) + 1))[: max(1, length)]
