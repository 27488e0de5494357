"""What a judge would send for a sample, without sending it: `qreward check --prompt`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.text import Text

from ..config import Config
from ..engine import RewardEngine
from ..errors import InputError
from ..files import read_rollouts
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
                _show(judge, engine.upstreams[source].source, chosen.get(name) or built_in(judge))
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


def _show(judge: Leaf, source: Source, sample: Sample) -> None:
    OUT.rule(Text(f"judge {judge.name} to source {source.name} ({one_line(source.model, 200)})", "bold"), align="left")
    try:
        verdict = judge.screened(sample)
        request = judge.request(sample, attempt=0)
    except (InputError, JudgeFailed) as error:
        say(OUT, Text(f"nothing: {one_line(str(error), _LINE_CHARS)}", "red"))
        return
    if verdict is not None:
        why = verdict.failure.describe() if verdict.failure is not None else "it needs no source"
        say(OUT, f"nothing: the reward is {verdict.score:g}; {one_line(why, _LINE_CHARS)}")
        return
    redactor = getattr(source, "redactor", None)
    for line in _written(source, request):
        # Parameters of a source may be secrets.
        say(OUT, one_line(line if redactor is None or redactor.clean is None else redactor.clean(line), _LINE_CHARS))


def _written(source: Source, request: Request) -> Iterator[str]:
    """The lines of the body of a request, or of the sample that a function gets."""
    sent = getattr(source, "sent", None)
    if callable(sent):
        *_, body = sent(request)
        yield from _lines(json.loads(body))
        return
    sample = request.sample
    shown = {"prompt": list(sample.messages), "response": sample.response, "ground_truth": sample.ground_truth}
    yield "the function is called with:"
    yield from _lines(json.loads(json.dumps(shown, default=repr)))


def _lines(value: Any, key: str = "") -> Iterator[str]:
    """A value of JSON as lines: as YAML writes it, but a text of several lines is always a block."""
    if isinstance(value, dict) and value:
        yield from [key] if key else []
        for name, each in value.items():
            yield from (("  " if key else "") + line for line in _lines(each, f"{name}:"))
    elif isinstance(value, list) and value:
        yield from [key] if key else []
        for each in value:
            yield from (f"{'- ' if number == 0 else '  '}{line}" for number, line in enumerate(_lines(each)))
    elif isinstance(value, str) and "\n" in value:
        yield f"{key} |"
        yield from (f"  {line}" for line in value.split("\n"))
    else:
        yield f"{key} {value if isinstance(value, str) else json.dumps(value)}"
