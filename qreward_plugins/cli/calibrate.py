"""`qreward calibrate`: measures the scores of a reward model once, for the step `zscore` of its judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..config import Config, judge_for, own_sources, parts_of
from ..engine import RewardEngine
from ..errors import InputError
from ..files import read_rollouts
from ..judges.calibration import Calibration, Identity
from ..judges.router import kind_of
from ..samples import Failed, Sample
from ..system.threads import taken_in_thread
from .console import ERRORS, OK, OUT, REWARDS_MISSING, number_of, run, say
from .engines import load_own, open_engine
from .progress import ProgressDisplay


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="Rows to score, .jsonl, .json or .parquet.")],
    judge: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Judge to measure. Default: every one whose transform has zscore."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File to write. Default: that of zscore.")
    ] = None,
) -> int:
    """Measure the scores of a reward model on rows like those of the training.

    Asks the sources of each judge of kind reward_model whose transform begins with zscore: FILE, and writes FILE: mean,
    standard deviation and quantiles of the scores before the transform, and the identity of the model and of what was
    sent. Rows are as for `score`.

    Exit codes: 0 every row has a score; 2 the input or the configuration has mistakes, or all scores are equal; 3 some
    rows have no score.
    """
    return run(calibrate(config, rollouts, judge=judge, file=out))


@dataclass(frozen=True)
class Target:
    """A judge to measure, its configuration for that, and the file for its reference scores."""

    judge: str
    raw: Any
    out: Path


async def calibrate(path: Path, samples: Path, *, judge: str | None = None, file: Path | None = None) -> int:
    """Ask the sources for the scores of the samples, and write the files.

    Measures the judges whose `transform` begins with `zscore`, or `judge` alone; `file` replaces the path of its
    `zscore`. Returns 0, or 3 if some samples have no score. Raises `ConfigurationError` and `InputError`.
    """
    config = load_own(path)
    code = OK
    for target in _targets(config, judge, file):
        code = max(code, await _measure(config, path, target, samples))
    return code


def _targets(config: Config, judge: str | None, file: Path | None) -> list[Target]:
    """Return the judges to measure. Raises `InputError` if there are none."""
    measured = {name: kind_of(node).measurement(node) for name, node in config.judges.items()}
    known = {name: measurement for name, measurement in measured.items() if measurement is not None}
    if judge is not None:
        if judge not in known:
            names = ", ".join(known) or "none"
            raise InputError(f"{judge!r} is no judge with reference scores; these are: {names}")
        known = {judge: known[judge]}
    if file is not None:
        if len(known) != 1:
            raise InputError(f"--out is the file of one judge; name it with --judge ({', '.join(known) or 'none'})")
        return [Target(name, measurement.raw, file) for name, measurement in known.items()]
    found = [
        Target(name, measurement.raw, Path(measurement.file).expanduser())
        for name, measurement in known.items()
        if measurement.file is not None
    ]
    if not found:
        raise InputError(
            "no judge has a transform with zscore: FILE; add one, or name a judge with --judge and a file with --out"
        )
    return found


async def _measure(config: Config, path: Path, target: Target, samples: Path) -> int:
    Calibration.check_place(target.out)
    chosen = sum(1 for _ in _samples_of(config, target.judge, samples))
    if not chosen:
        raise InputError(f"{samples}: no row goes to the judge {target.judge!r}")
    scores: list[float] = []
    failed: Counter[str] = Counter()
    examples: dict[str, str] = {}
    async with open_engine(_alone(config, target), path) as engine:
        identity = _identity(engine, target.judge)
        say(ERRORS, f"asking for the scores of {number_of(chosen, 'row')} of {samples} (judge {target.judge})")
        async with ProgressDisplay(ERRORS, chosen, engine):
            async for _, outcome in engine.score_stream(taken_in_thread(_samples_of(config, target.judge, samples))):
                if isinstance(outcome, Failed):
                    failed[outcome.label] += 1
                    examples.setdefault(outcome.label, outcome.detail)
                else:
                    scores.append(outcome.reward)
    for reason, count in failed.most_common():
        say(ERRORS, Text(f"{count:,} without a score", "red") + Text(f" ({reason}): {examples[reason]}"))
    measured = Calibration.measured(scores, identity)
    # The numbers are shown even if the file cannot be written: the scores may have cost money.
    say(OUT, Text(f"judge {target.judge}, model {measured.identity.model}", "bold"))
    say(OUT, f"{measured.n:,} scores, mean {measured.mean:.4g}, standard deviation {measured.std:.4g}")
    say(OUT, ", ".join(f"{100 * at:g}%: {score:.4g}" for at, score in measured.quantiles.items()))
    measured.write(target.out)
    say(OUT, f"written to {target.out}")
    return REWARDS_MISSING if failed else OK


def _alone(config: Config, target: Target) -> Config:
    """Return the configuration with one judge and its sources; its rewards are the scores to measure."""
    sources = {name: config.sources[name] for name in own_sources(config, target.judge)}
    return config.model_copy(update={"judges": {target.judge: target.raw}, "sources": sources, "routes": {}})


def _samples_of(config: Config, judge: str, path: Path) -> Iterator[Sample]:
    """Yield the samples that go to the judge, or to a judge that it is a part of."""
    for rollout in read_rollouts(path):
        routed = judge_for(config, rollout.sample.data_source)
        if routed is not None and judge in parts_of(config, routed):
            yield rollout.sample


def _identity(engine: RewardEngine, judge: str) -> Identity:
    """Return what the scores depend on. Raises `InputError` if the judge has sources with different scores."""
    opened = engine.judges[judge]
    first, *others = opened.sources
    identity = opened.identity(engine.upstreams[first].source)
    for other in others:
        if identity.difference(opened.identity(engine.upstreams[other].source)):
            raise InputError(
                f"judge {judge!r} asks different models ({first}, {other}), and their scores have different scales; "
                "give each a judge of its own"
            )
    return identity
