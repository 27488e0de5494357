"""`qreward check`: validates a configuration, and asks every source."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..config import Config, configured_name, load_config, read_yaml
from ..errors import ConfigurationError, InputError, KeeperSilent
from ..files import read_rollouts
from ..journal import check_place
from ..judges import kind_of
from ..samples import Sample
from ..secrets import Redactor
from ..sharing.channels import channel_of
from ..sources import TEXT
from .figures import number_of, seconds
from .offline import without_servers
from .probe import Probe, idle_sources, probe, probe_for_clients, samples_for, untried_judges
from .running import OK, SOURCE_SILENT, open_engine, say
from .servers import start_servers
from .training_lines import Framework, framework_of, say_how_to_train

_RATIONALE_CHARS = 100
_PROBLEM_CHARS = 400
_excerpt = Redactor().of


async def check_config(
    path: Path,
    rollouts: Path | None,
    out: Console,
    errors: Console,
    *,
    timeout_s: float = 30.0,
    offline: bool = False,
    framework: Framework | None = None,
) -> int:
    """Validate the file, probe every source, and print a table; then what to add to a training of `framework`.

    `offline`: nothing is sent. `framework` None: the one that can be told, or all of them. If the check fails, the last
    lines are its problems.
    """
    code = await (_check_offline(path, out) if offline else _check(path, rollouts, out, errors, timeout_s))
    if code == OK and _trains(load_config(path)):
        wrapped = list(read_yaml(str(path), origin=str(path))) == ["qreward"]
        say_how_to_train(out, path, framework or framework_of(path, wrapped=wrapped), wrapped=wrapped)
    return code


def _trains(config: Config) -> bool:
    """Whether a trainer can use the file: one for clients has no judges."""
    return bool(config.judges) or config.engine.server is not None


async def _check_offline(path: Path, out: Console) -> int:
    """Validate the file, and open its judges and functions. Returns 0. Raises `ConfigurationError`."""
    config = load_config(path)
    if config.engine.server is not None:
        say(out, f"{path}: valid; the reward server was not asked")
        return OK
    if config.engine.journal is not None:
        check_place(config.engine.journal.path)
    try:
        bare, notes = without_servers(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None
    async with open_engine(bare, path):
        say(out, f"{path}: valid, with {_counts(config)}; nothing was asked")
    for note in notes:
        say(out, note)
    say(out, f"Ask its sources: qreward check {shlex.quote(str(path))}")
    return OK


async def _check(path: Path, rollouts: Path | None, out: Console, errors: Console, timeout_s: float) -> int:
    """Validate the file, probe every source, and print a table.

    Returns 0 if every source gave a valid verdict and every LLM judge with the default instructions could tell right
    answers from nonsense, otherwise 1. A source has `timeout_s` seconds for an answer, or its own time limit if that is
    shorter. Raises `ConfigurationError`, `InputError` if the rollouts are empty or cannot be read, and `JournalError`
    if a run could not open its journal.
    """
    config = load_config(path)
    if config.engine.server is not None:
        server = config.engine.server
        say(errors, f"asking the reward server at {server.url}, for {server.start_s:g} s at most")
        async with open_engine(config, path) as engine:
            shown = ", ".join(engine.facts().components) or "none"
            say(out, f"{path}: valid; the reward server at {config.engine.server.url} answers; components: {shown}")
            say(out, "Its sources and judges: run `qreward check` with the file of the server.")
        return OK
    if config.engine.journal is not None:
        check_place(config.engine.journal.path)
    # A check must not create, open or fill the journal of a run. Its requests count against the run's limits.
    shared = "auto" if config.engine.shared == "ray" else config.engine.shared
    engine_alone = config.engine.model_copy(update={"journal": None, "shared": shared})
    bare = config.model_copy(update={"engine": engine_alone})
    async with open_engine(bare, path) as engine:
        samples: dict[str, Sample] = {}
        if rollouts is not None:
            samples = samples_for(engine, _samples_of(rollouts))
        for upstream in engine.upstreams.values():
            upstream.timeout_s = min(upstream.timeout_s, timeout_s)
        say(out, f"{path}: valid, with {_counts(config)}")
        for line in _summaries(config):
            say(out, line)
        keeper_silent = await _tell_keeper(config, path, out)
        await start_servers(engine, out, errors)
        if config.routes and "*" not in config.routes:
            say(out, 'routes: samples of other data sources get no reward; a last route "*" would judge them')
        for name in engine.judges if rollouts is not None else ():
            if name not in samples:
                say(out, f"{name}: no row of {rollouts} goes to it; the built-in sample is used")
        for name, source in config.sources.items():
            if getattr(source, "dialect", "") == "auto":
                dialect: Any = getattr(engine.upstreams[name].source, "dialect", None)
                say(out, f"{name}: dialect {dialect.name}, as its server answered")
        with errors.status("asking every source ..."):
            asked = await asyncio.gather(probe(engine, samples), probe_for_clients(engine))
            results = [result for part in asked for result in part]
        idle, untried = idle_sources(engine), untried_judges(engine)
        models = {name for name, judge in engine.judges.items() if judge.asks == TEXT}
    if results:
        out.print(_table(results))
    for result in results:
        if result.verdict is not None and result.verdict.rationale:
            say(out, f'{result.source} says: "{_excerpt(result.verdict.rationale, _RATIONALE_CHARS)}"')
    for name in untried:
        say(out, f"{name}: not tried, because a check cannot make the calls of its kind")
    for name in idle:
        say(out, f"{name}: not asked, because neither a judge nor `models` uses it")
    failed = [result for result in results if result.problem]
    for result in failed:
        say(out, _problem(result, built_in=result.judge not in samples, capable=result.judge in models))
    unable = [
        result
        for result in results
        # Invalid verdicts in the trial repeat what was said of the sample.
        if result.trial is not None and result.trial.problem and not (result.problem and len(result.trial.flaws) > 1)
    ]
    for result in unable:
        say(out, _unable(result, own=_has_own_instructions(config, result.judge)))
    surely = any(not _has_own_instructions(config, result.judge) for result in unable)
    return SOURCE_SILENT if failed or surely or keeper_silent else OK


def _counts(config: Config) -> str:
    counts = ((set(map(configured_name, config.sources)), "source"), (config.judges, "judge"), (config.routes, "route"))
    return ", ".join(number_of(len(part), noun) for part, noun in counts)


async def _tell_keeper(config: Config, path: Path, out: Console) -> bool:
    """Tell who keeps the limits that processes share without Ray. Return True if the keeper does not answer."""
    if config.engine.shared != "machine":
        return False
    try:
        channel = channel_of(config)
    except ConfigurationError as error:
        raise ConfigurationError(error.mistakes, origin=str(path)) from None
    assert channel is not None
    try:
        say(out, f"limits: {await channel.describe()}")
    except KeeperSilent as error:
        say(out, Text.assemble(("limits: ", "red"), str(error)))
        return True
    finally:
        await channel.aclose()
    return False


def _has_own_instructions(config: Config, judge: str) -> bool:
    return getattr(config.judges[judge], "instructions", None) is not None


def _samples_of(rollouts: Path) -> Iterator[Sample]:
    """Yield the samples of a file. Raises `InputError` if there are none."""
    rollout = None
    for rollout in read_rollouts(rollouts):
        yield rollout.sample
    if rollout is None:
        raise InputError(f"{rollouts}: has no rows")


def _summaries(config: Config) -> list[str]:
    """Describe the judges that do not ask sources themselves, such as sums."""
    shown = {name: kind_of(judge).summary(judge) for name, judge in config.judges.items()}
    return [f"{name}: {summary}" for name, summary in shown.items() if summary]


def _table(results: list[Probe]) -> Table:
    table = Table("source", "judge", "latency", "verdict", "announces", box=None, padding=(0, 1), pad_edge=False)
    for result in results:
        table.add_row(
            Text.assemble(result.source, ("\n  " + _excerpt(result.model, 60), "dim")),
            Text(result.judge or "(clients)"),
            seconds(result.latency_s),
            _given(result),
            _announced(result.announced),
        )
    return table


def _given(result: Probe) -> Text:
    if not result.judge and not result.problem:
        return Text("answers", "green")
    return Text("none", "red") if result.verdict is None else Text(f"{result.verdict.score:.3g}", "green")


def _announced(limits: Mapping[str, float]) -> str:
    """Describe the announced limits per window; sources do not announce the length of the window."""
    parts = []
    for what in ("requests", "tokens"):
        limit, left = limits.get(f"{what}_per_window"), limits.get(f"{what}_remaining")
        if limit is not None:
            parts.append(f"{limit:,.0f} {what}" + ("" if left is None else f", {left:,.0f} left"))
        elif left is not None:
            parts.append(f"{left:,.0f} {what} left")
    return "\n".join(parts) or "nothing"


def _problem(result: Probe, *, built_in: bool, capable: bool) -> Text:
    """Describe why a source gave no verdict. `capable`: whether a more capable model may give one."""
    remedy = ""
    if not result.asked and built_in:
        remedy = "; the built-in sample does not fit this judge, so use one of yours with --rollouts"
    elif capable and result.trial is not None and len(result.trial.flaws) > 1:
        remedy = (
            f"; {len(result.trial.flaws)} of {2 * len(result.trial.pairs)} test answers got no valid verdict, either"
        )
        remedy += "; use a more capable model"
    # Errors of sources begin with the name of the source.
    name = f"source {result.source!r}"
    problem = result.problem if result.problem.startswith(name) else f"{name}: {result.problem}"
    whose = f"judge {result.judge}: " if result.judge else "models: "
    return Text.assemble((whose, "red"), problem, remedy)


def _unable(result: Probe, *, own: bool) -> Text:
    assert result.trial is not None, "only a judge that was tried is found unable"
    shown = f"source {result.source!r} may be unable to judge: " if own else f"source {result.source!r} cannot judge: "
    remedy = (
        "; if its instructions do not ask for right answers, check its verdicts on rows of yours (--rollouts)"
        if own
        else "; use a more capable model"
    )
    problem = _excerpt(result.trial.problem, _PROBLEM_CHARS)
    return Text.assemble((f"judge {result.judge}: ", "yellow" if own else "red"), shown, problem, remedy)
