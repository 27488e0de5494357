"""`qreward calibrate`: measures the scores of a reward model once, for the step `zscore` of its judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ..config import Config, JudgeConfig, judge_for, own_sources, parts_of
from ..engine import RewardEngine
from ..errors import InputError
from ..files import read_rollouts
from ..judges import kind_of
from ..judges.calibration import Calibration, Identity
from ..samples import Failed, Sample
from ..system.threads import taken_in_thread
from .console import ERRORS, OK, OUT, REWARDS_MISSING, number_of, run, say
from .engines import load_own, open_engine, progress_shown


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[Path, typer.Argument(metavar="ROLLOUTS", help="Rows to score, .jsonl, .json or .parquet.")],
) -> int:
    """Measure the scores of a reward model on rows like those of the training.

    Asks the sources of each judge of kind reward_model whose transform begins with zscore: FILE, and writes FILE: mean
    and standard deviation of the scores before the transform, and the identity of the model and of what was sent. Rows
    are as for `score`.

    Exit codes: 0 every row has a score; 2 the input or the configuration has mistakes, or all scores are equal; 3 some
    rows have no score.
    """
    return run(_calibrate(config, rollouts))


async def _calibrate(path: Path, samples: Path) -> int:
    """Measure each judge whose `transform` begins with `zscore`. Raises `ConfigurationError` and `InputError`."""
    config, code = load_own(path), OK
    for name, raw, out in _measured(config, path):
        code = max(code, await _measure(config, path, name, raw, out, samples))
    return code


def _measured(config: Config, path: Path) -> list[tuple[str, JudgeConfig, Path]]:
    """The judges to measure, each with its configuration for that and its file. Raises `InputError` without any."""
    measured = {name: kind_of(node).measurement(node) for name, node in config.judges.items()}
    found = [(name, each[0], Path(each[1]).expanduser()) for name, each in measured.items() if each]
    if not found:
        raise InputError(f"{path}: no judge has a transform with zscore: FILE; add one to a judge of kind reward_model")
    for *_, out in found:
        Calibration.check_place(out)
    return found


async def _measure(config: Config, path: Path, judge: str, raw: JudgeConfig, out: Path, samples: Path) -> int:
    """Write the scores of a judge, `raw`: before the transform."""
    chosen = sum(1 for _ in _samples_of(config, judge, samples))
    if not chosen:
        raise InputError(f"{samples}: no row goes to the judge {judge!r}")
    sources = {name: config.sources[name] for name in own_sources(config, judge)}
    alone = config.model_copy(update={"judges": {judge: raw}, "sources": sources, "routes": {}})
    scores: list[float] = []
    failed: Counter[str] = Counter()
    examples: dict[str, str] = {}
    async with open_engine(alone, path) as engine:
        identity = _identity(engine, judge)
        say(ERRORS, f"asking for the scores of {number_of(chosen, 'row')} of {samples} (judge {judge})")
        async with progress_shown(ERRORS, chosen, engine):
            async for _, outcome in engine.score_stream(taken_in_thread(_samples_of(config, judge, samples))):
                if isinstance(outcome, Failed):
                    failed[outcome.label] += 1
                    examples.setdefault(outcome.label, outcome.detail)
                else:
                    scores.append(outcome.reward)
    for reason, count in failed.most_common():
        say(ERRORS, Text(f"{count:,} without a score", "red") + Text(f" ({reason}): {examples[reason]}"))
    measured = Calibration.measured(scores, identity)
    # The numbers are shown even if the file cannot be written: the scores may have cost money.
    say(OUT, Text(f"judge {judge}, model {measured.model}", "bold"))
    say(OUT, f"{measured.n:,} scores, mean {measured.mean:.4g}, standard deviation {measured.std:.4g}")
    measured.write(out)
    say(OUT, f"written to {out}")
    return REWARDS_MISSING if failed else OK


def _samples_of(config: Config, judge: str, path: Path) -> Iterator[Sample]:
    """Yield the samples that go to the judge, or to a judge that it is a part of."""
    for rollout in read_rollouts(path):
        routed = judge_for(config, rollout.sample.data_source)
        if routed is not None and judge in parts_of(config, routed):
            yield rollout.sample


def _identity(engine: RewardEngine, judge: str) -> Identity:
    """Return what the scores depend on. Raises `InputError` if the judge has sources with different scores."""
    opened: Any = engine.judges[judge]
    first, *others = opened.sources
    identity: Identity = opened.identity(engine.upstreams[first].source)
    for other in others:
        if identity.difference(opened.identity(engine.upstreams[other].source)):
            raise InputError(
                f"judge {judge!r} asks different models ({first}, {other}), and their scores have different scales; "
                "give each a judge of its own"
            )
    return identity
