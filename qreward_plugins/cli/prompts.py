"""What a judge would send for a sample, without sending it: `qreward check --prompt`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.text import Text

from ..config import Config
from ..engine import RewardEngine
from ..errors import InputError
from ..files import read_rollouts
from ..journal.stories import lines_of
from ..judges import JudgeFailed, Leaf
from ..samples import Sample
from ..secrets import one_line
from ..sources.base import Request, Source
from .console import OK, OUT, say
from .engines import open_engine
from .probe import built_in, samples_for

_LINE_CHARS = 200_000


async def show_prompts(config: Config, path: Path, rollouts: Path | None, row: int | None) -> int:
    """Print what each judge would send to each of its sources. `row`: of this row of the rollouts, else of the first
    one that goes to the judge, or of a built-in sample.

    Raises `ConfigurationError`, and `InputError` for a row that is not there.
    """
    async with open_engine(config, path) as engine:
        chosen = _samples(engine, rollouts, row)
        for name, judge in engine.judges.items():
            for source in judge.sources:
                for sample in engine.seen_by(name, chosen.get(name) or built_in(judge)):
                    _show(judge, engine.upstreams[source].source, sample, is_built_in=name not in chosen)
    return OK


def _samples(engine: RewardEngine, rollouts: Path | None, row: int | None) -> Mapping[str, Sample]:
    if rollouts is None:
        return {}
    if row is None:
        return samples_for(engine, (rollout.sample for rollout in read_rollouts(rollouts)))
    count = 0
    for count, rollout in enumerate(read_rollouts(rollouts), 1):
        if count == row:
            return dict.fromkeys(engine.judges, rollout.sample)
    raise InputError(f"{rollouts}: has no row {row}; it has {count:,}, counted from 1")


def _show(judge: Leaf, source: Source, sample: Sample, *, is_built_in: bool) -> None:
    OUT.rule(Text(f"judge {judge.name} to source {source.name} ({one_line(source.model, 200)})", "bold"), align="left")
    try:
        verdict = judge.screened(sample)
        request = judge.request(sample, attempt=0)
    except (InputError, JudgeFailed) as error:
        of_yours = "; this is the built-in sample, show a row of yours with --rollouts FILE" if is_built_in else ""
        say(OUT, Text(f"nothing: {one_line(str(error), _LINE_CHARS)}{of_yours}", "red"))
        return
    if verdict is not None:
        why = verdict.failure.describe() if verdict.failure is not None else "it needs no source"
        say(OUT, f"nothing: the reward is {verdict.score:g}; {one_line(why, _LINE_CHARS)}")
        return
    for line in _written(source, request):
        say(OUT, one_line(line, _LINE_CHARS))


def _written(source: Source, request: Request) -> Iterator[str]:
    """The lines of the body of a request, or of the sample that a function gets."""
    written = source.written(request)
    if written is not None:
        yield from lines_of(written)
        return
    sample = request.sample
    shown = {"prompt": list(sample.messages), "response": sample.response, "ground_truth": sample.ground_truth}
    yield "the function is called with:"
    yield from lines_of(json.dumps(shown, default=repr))
