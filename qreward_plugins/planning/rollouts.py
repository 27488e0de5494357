"""Makes the samples of a rehearsal: rollouts with lengths and data sources that are drawn for each seed.

The lengths are assumed, or read from a file or a journal.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ..config import Config, judge_for
from ..errors import InputError
from ..files import read_rollouts
from ..samples import Sample
from ..simulation.draws import BYTES_PER_TOKEN, prompt_tokens

LONGEST_TOKENS = 1_000_000
_FORMS = "write a number of tokens (800), lognormal:MEAN:SIGMA (lognormal:800:0.6), or file:ROLLOUTS.jsonl"


@dataclass(frozen=True)
class Lengths:
    """Lengths of rollouts in tokens.

    `mean` and `sigma` are those of a lognormal distribution (with sigma 0, all lengths are equal). If there are `seen`
    lengths, lengths are drawn from them. If there are `rollouts`, these are used unchanged.
    """

    mean: float = 800.0
    sigma: float = 0.6
    seen: tuple[int, ...] = ()
    rollouts: tuple[Sample, ...] = ()
    origin: str = ""
    """Where `seen` and `rollouts` come from, in words."""

    def draw(self, count: int, rng: random.Random) -> list[int]:
        """Draw `count` lengths of at least 1. Not for `rollouts`, which have their own lengths."""
        if self.seen:
            return [max(1, rng.choice(self.seen)) for _ in range(count)]
        if not self.sigma:
            return [max(1, round(self.mean))] * count
        middle = math.log(self.mean) - self.sigma**2 / 2
        return [
            min(LONGEST_TOKENS, max(1, round(math.exp(middle + self.sigma * rng.gauss(0, 1))))) for _ in range(count)
        ]

    def describe(self) -> str:
        """Describe the lengths in words."""
        if self.rollouts:
            texts = (sample.response.encode("utf-8", "surrogatepass") for sample in self.rollouts)
            mean = fmean(prompt_tokens(len(text)) for text in texts)
            return f"the rollouts of {self.origin}, {mean:,.0f} tokens in the mean"
        if self.seen:
            return f"{fmean(self.seen):,.0f} tokens in the mean, from {self.origin}"
        spread = f" in the mean (lognormal, sigma {self.sigma:g})" if self.sigma else ""
        return f"{self.mean:,.0f} tokens{spread}"


def parse_lengths(text: str, *, most: int) -> Lengths:
    """Read `800`, `lognormal:800:0.6` or `file:rollouts.jsonl`.

    Of a file, at most `most` rollouts are used, drawn at random. Raises `InputError`.
    """
    kind, separator, rest = text.strip().partition(":")
    if separator and kind == "file":
        return _of_file(Path(rest).expanduser(), most)
    parts = rest.split(":") if separator else [kind]
    if (separator and kind != "lognormal") or len(parts) > 2:
        raise InputError(f"--tokens {text!r} is no distribution of lengths; {_FORMS}")
    try:
        mean = float(parts[0])
        sigma = (float(parts[1]) if len(parts) == 2 else Lengths.sigma) if separator else 0.0
    except ValueError:
        raise InputError(f"--tokens {text!r} is no distribution of lengths; {_FORMS}") from None
    if not (1 <= mean <= LONGEST_TOKENS and 0 <= sigma <= 3):
        raise InputError(f"--tokens {text!r}: the mean goes from 1 to {LONGEST_TOKENS:,} tokens, sigma from 0 to 3")
    return Lengths(mean, sigma)


def _of_file(path: Path, most: int) -> Lengths:
    rng = random.Random("rollouts 0")
    kept: list[Sample] = []
    for number, rollout in enumerate(read_rollouts(path)):
        if len(kept) < most:
            kept.append(rollout.sample)
        elif (place := rng.randrange(number + 1)) < most:
            kept[place] = rollout.sample
    if not kept:
        raise InputError(f"{path}: has no rows")
    return Lengths(rollouts=tuple(kept), origin=str(path))


_WORDS = "so we add the two numbers and check the sum once more before we write it down, "


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
        shares = dict(self.data_sources)
        named = rng.choices(list(shares), list(shares.values()), k=count) if shares else []
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
    """Return a data source that the route `"*"` matches, or else the first route: most globs match themselves."""
    pattern = "*" if "*" in config.routes else next(iter(config.routes), "")
    if pattern and judge_for(config, pattern) is None:
        raise InputError(f"no data source can be derived from the route {pattern!r}; name one with --data-source")
    return pattern


def check_data_sources(config: Config, names: Sequence[str]) -> None:
    """Raise `InputError` for a data source that no judge scores."""
    for name in names:
        if judge_for(config, name) is None:
            routes = ", ".join(config.routes) or "none, and several judges"
            raise InputError(f"no route matches the data source {name!r}; routes: {routes}. Choose with --data-source")


def _text(length: int) -> str:
    return (_WORDS * (length // len(_WORDS) + 1))[: max(1, length)]
