"""`qreward check`: validates a configuration, and asks every source, or compares it with another; lists the kinds."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import SecretStr
from rich.table import Table
from rich.text import Text

from ..config import Config, EndpointConfig, JudgeConfig, configured_name, load_config, read_yaml
from ..config.registry import rooms
from ..config.source_models import is_framework_url
from ..engine.difference import difference
from ..engine.trial import Trial
from ..files import read_labelled, read_rollouts
from ..journal import check_place
from ..judges import JudgeRouter, kind_of
from ..secrets import Redactor
from ..sources import LOGITS, TEXT
from ..sources.replica_set_config import ReplicaSetConfig, pool_spec
from .bench import ENOUGH_RIGHT, PAIRS, Bench, print_figures
from .console import CHECK_FAILED, ERRORS, OK, OUT, number_of, print_whole, run, say, seconds, table
from .engines import mistakes_in, open_engine
from .probe import Probe, idle_sources, probe, probe_whole, samples_for, show_prompts, with_route_to_each
from .serve_judge import start_servers
from .training_lines import Framework, cautions, say_how_to_train

_NOWHERE = "http://127.0.0.1:9"
_RATIONALE_CHARS = 100
_PROBLEM_CHARS = 400
_excerpt = Redactor().of


def _list_kinds(wanted: bool) -> None:
    """Print every registered kind with the package that it comes from. Exits with 1 if one cannot be used."""
    if not wanted:
        return
    unusable = False
    for room, kinds in rooms.items():
        shown = table("kind", "package", "what it is", left=("kind",), folds=("package", "what it is"), title=room)
        for one, description, problem in kinds.described():
            unusable = unusable or bool(problem)
            text = Text(problem, style="red") if problem else Text(description)
            shown.add_row(Text(one.name), Text(f"{one.package} {one.version}".strip()), text)
        OUT.print(shown)
    say(OUT, "A class that is not registered: kind: package.module:Class")
    raise typer.Exit(CHECK_FAILED if unusable else OK)


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    rollouts: Annotated[
        Path | None,
        typer.Option("--rollouts", "-r", metavar="FILE", help="Rows to score instead of a built-in sample."),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Most seconds for the answer of a source.", min=0.1)
    ] = 30.0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Validate only: send nothing, and need no server and no key.")
    ] = False,
    prompt: Annotated[
        bool, typer.Option("--prompt", help="Ask nothing; print exactly what each judge would send.")
    ] = False,
    row: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="With --prompt: row N of the file of --rollouts.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OLD", help="Ask nothing; show what a reload would change if OLD runs.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Also let each judge of a model score 20 built-in pairs (60 requests).")
    ] = False,
    framework: Annotated[
        Framework | None,
        typer.Option(help="Framework that the last line is for. Default: those that are installed, or all."),
    ] = None,
    kinds: Annotated[
        bool,
        typer.Option("--kinds", help="List the kinds of sources and judges.", is_eager=True, callback=_list_kinds),
    ] = False,
) -> int:
    """Validate a configuration, then send live requests to every source of every judge.

    Shows the latency, the limits that the source announces, and the verdict on a built-in sample (What is 17 plus 25?),
    or on the first row that goes to each judge. Limits are waited for. A language model also grades three pairs
    of a right answer and nonsense (six short requests), to test whether it can tell them apart. Nothing is written to a
    journal. If all is well, it ends with the line to train with.

    With --against, show for each change whether a reload applies it at once, after what is under way has ended, or not
    at all, as in: qreward check judges.yaml --against <(git show HEAD:judges.yaml)

    Exit codes: 0 all is well; 1 a source gave no valid verdict or cannot judge, a kind cannot be used, or a reload
    would be refused; 2 the configuration has mistakes.
    """
    if against is not None:
        return show_difference(against, config)
    if row is not None and not (prompt and rollouts):
        raise typer.BadParameter("--row needs --prompt and --rollouts")
    if deep and (offline or prompt):
        raise typer.BadParameter("--deep asks the judges, and --offline and --prompt ask nothing")
    if prompt:
        bare, _ = without_servers(load_config(config))
        return run(show_prompts(bare, config, rollouts, row))
    return run(check_config(config, rollouts, timeout_s=timeout, offline=offline, deep=deep, framework=framework))


async def check_config(
    path: Path,
    rollouts: Path | None = None,
    *,
    timeout_s: float = 30.0,
    offline: bool = False,
    deep: bool = False,
    framework: Framework | None = None,
) -> int:
    """Validate the file, probe every source, and print a table; then what to add to a training of `framework`.

    `offline`: nothing is sent. `deep`: judges that ask models score the built-in pairs, too. `framework` None: those
    that are installed, or all of them. A source has `timeout_s` seconds for an answer, or its own time limit if that is
    shorter. If the check fails, the last lines are its problems. Returns 0 if every source gave a valid verdict and
    every LLM judge with the default instructions could tell right answers from nonsense (`deep`: did better than a coin
    on the pairs), otherwise 1.

    Raises `ConfigurationError`, `InputError` if the rollouts cannot be read, and `JournalError` if a run
    could not open its journal.
    """
    config = load_config(path)
    if config.engine.journal is not None:
        check_place(config.engine.journal.path)
    if config.engine.server is not None:
        code = await _check_server(config, path, offline, timeout_s)
    elif offline:
        code = await _check_offline(config, path)
    else:
        code = await _check(config, path, rollouts, timeout_s)
        if deep:
            code = max(code, await _check_deeply(config, path))
    for caution in cautions(config):
        say(OUT, Text(caution, style="yellow"))
    if code == OK and (config.judges or config.engine.server is not None):  # a file for clients trains nothing
        wrapped = list(read_yaml(str(path), origin=str(path))) == ["qreward"]
        say_how_to_train(path, framework, wrapped=wrapped)
    return code


async def _check_server(config: Config, path: Path, offline: bool, timeout_s: float) -> int:
    assert config.engine.server is not None
    server = config.engine.server.model_copy(update={"start_s": min(config.engine.server.start_s, timeout_s)})
    config = config.model_copy(update={"engine": config.engine.model_copy(update={"server": server})})
    if offline:
        say(OUT, f"{path}: valid; the reward server was not asked")
        return OK
    say(ERRORS, f"asking the reward server at {server.url}, for {server.start_s:g} s at most")
    async with open_engine(config, path) as engine:
        shown = ", ".join(engine.facts().components) or "none"
        say(OUT, f"{path}: valid; the reward server at {server.url} answers; components: {shown}")
        say(OUT, "Its sources and judges: run `qreward check` with the file of the server.")
    return OK


async def _check_offline(config: Config, path: Path) -> int:
    """Open the judges and functions."""
    with mistakes_in(path):
        bare, notes = without_servers(config)
    async with open_engine(bare, path):
        say(OUT, f"{path}: valid, with {_counts(config)}; nothing was asked")
    for note in notes:
        say(OUT, note)
    say(OUT, f"Ask its sources: qreward check {shlex.quote(str(path))}")
    return OK


async def _check(config: Config, path: Path, rollouts: Path | None, timeout_s: float) -> int:
    """Probe every source, and print a table and the problems."""
    async with open_engine(with_route_to_each(_alone(config)), path) as engine:
        rows = () if rollouts is None else read_rollouts(rollouts)
        samples = samples_for(engine, (rollout.sample for rollout in rows))
        for upstream in engine.upstreams.values():
            upstream.timeout_s = min(upstream.timeout_s, timeout_s)
        say(OUT, f"{path}: valid, with {_counts(config)}")
        for upstream in engine.upstreams.values():
            if upstream.source.has_servers:
                await start_servers(upstream.source)
        if config.routes and "*" not in config.routes:
            say(OUT, 'routes: samples of other data sources get no reward; a last route "*" would judge them')
        for name in config.judges if rollouts is not None else ():
            if name not in samples:
                say(OUT, f"{name}: no row of {rollouts} goes to it; the built-in sample is used")
        with ERRORS.status("asking every source ..."):
            judged = await probe(engine, samples)
            failed = {one.judge for one in judged if one.verdict is None}
            whole = await probe_whole(engine, samples, failed)
        for name in idle_sources(engine):
            say(OUT, f"{name}: not asked, because no judge asks it")
    results = [*judged, *whole]
    if results:
        OUT.print(_table(results))
    passed = True
    for result in results:
        if result.source and result.verdict is not None and result.verdict.rationale:
            say(OUT, f'{result.source} says: "{_excerpt(result.verdict.rationale, _RATIONALE_CHARS)}"')
    for result in results:
        trial = result.trial
        if result.problem:
            say(OUT, _problem(result, built_in=result.judge not in samples))
            passed = False
        elif result.untried:
            head = (f"judge {result.judge}: ", "red")
            say(OUT, Text.assemble(head, f"source {result.source!r} did not grade the test answers: {result.untried}"))
            passed = False
        # Invalid verdicts in the trial repeat what was said of the sample.
        if trial is not None and trial.problem and not (result.problem and len(trial.flaws) > 1):
            own = _asks_its_own(config.judges[result.judge])
            say(OUT, _unable(result, trial, own=own))
            passed = passed and own
        elif trial is not None and not result.problem:
            say(OUT, f"judge {result.judge}: source {result.source!r} tells right answers from nonsense")
    return OK if passed else CHECK_FAILED


def _asks_its_own(judge: JudgeConfig) -> bool:
    """Whether a judge may be asked for something else than right answers."""
    return any(getattr(judge, key, None) is not None for key in ("instructions", "rubric"))


async def _check_deeply(config: Config, path: Path) -> int:
    """Let judges that ask models score the built-in pairs, and print the figures. Nothing is recorded."""
    names = [name for name, judge in config.judges.items() if kind_of(judge).asks in (TEXT, LOGITS)]
    bench, code = Bench(_alone(config), path, *read_labelled(PAIRS)), OK
    judged = [await bench.judged_by(name) for name in names]
    if judged:
        print_figures(judged)
    for each in judged:
        if each.figures[-1].judged * each.figures[-1].value >= ENOUGH_RIGHT:
            continue
        own = _asks_its_own(config.judges[each.name])
        code = code if own else CHECK_FAILED
        problem = f"fewer than {ENOUGH_RIGHT} of the 20 built-in pairs are judged right, which a coin may do, too"
        say(OUT, Text.assemble((f"judge {each.name}: ", "yellow" if own else "red"), problem))
    return code


def _counts(config: Config) -> str:
    counts = ((set(map(configured_name, config.sources)), "source"), (config.judges, "judge"), (config.routes, "route"))
    return ", ".join(number_of(len(part), noun) for part, noun in counts)


def _table(results: list[Probe]) -> Table:
    shown = table("source", "judge", "latency", "verdict", "announces", folds=("source", "judge", "announces"))
    for result in results:
        verdict = result.verdict
        shown.add_row(
            Text.assemble(result.source or "(as a whole)", ("\n  " + _excerpt(result.model, 60), "dim")),
            Text(result.judge),
            seconds(result.latency_s),
            Text("none", "red") if verdict is None else Text(f"{verdict.score:.3g}", "green"),
            _announced(result.announced),
        )
    return shown


def _announced(limits: Mapping[str, float]) -> str:
    """Describe the announced limits per window; sources do not announce the length of the window."""
    return "\n".join(f"{limit:,.0f} {name.replace('_', ' ')}" for name, limit in limits.items()) or "nothing"


def _problem(result: Probe, *, built_in: bool) -> Text:
    """Describe why a source gave no verdict."""
    remedy = ""
    if not result.asked and built_in:
        remedy = "; the built-in sample does not fit this judge, so use one of yours with --rollouts"
    elif result.trial is not None and len(result.trial.flaws) > 1:
        of = f"{len(result.trial.flaws)} of {2 * len(result.trial.pairs)}"
        remedy = f"; {of} test answers got no valid verdict, either"
        if "raise judges." not in result.problem:
            remedy += "; use a more capable model"
    # Errors of sources begin with the name of the source.
    name = f"source {result.source!r}"
    named = not result.source or result.problem.startswith(name)
    problem = result.problem if named else f"{name}: {result.problem}"
    return Text.assemble((f"judge {result.judge}: ", "red"), problem, remedy)


def _unable(result: Probe, trial: Trial, *, own: bool) -> Text:
    """Describe why a judge seems unable. By its `own` instructions or rubric it may be asked for something else."""
    able, remedy = "cannot", "; use a more capable model"
    if own:
        able = "may be unable to"
        remedy = "; if it is not asked for right answers, check its verdicts on rows of yours (--rollouts)"
    problem = _excerpt(trial.problem, _PROBLEM_CHARS)
    head = (f"judge {result.judge}: ", "yellow" if own else "red")
    return Text.assemble(head, f"source {result.source!r} {able} judge: {problem}{remedy}")


def without_servers(config: Config) -> tuple[Config, list[str]]:
    """Return a configuration that can be opened without servers, keys and a training framework, and one line for each
    thing that is missing here and that a run needs.

    Placeholders replace keys that are not set, addresses from a framework, and Ray.
    Raises `ConfigurationError` for servers that could not be placed on any cluster.
    """
    notes: list[str] = []
    sources: dict[str, Any] = {}
    for name, source in config.sources.items():
        if not isinstance(source, EndpointConfig):
            continue
        changes: dict[str, Any] = {}
        if isinstance(source.api_key_env, str) and not os.environ.get(source.api_key_env, "").strip():
            changes |= {"api_key_env": None, "api_key": SecretStr("none")}
            notes.append(
                f"{name}: {source.api_key_env} is not set; set it where you train: export {source.api_key_env}=..."
            )
        if any(map(is_framework_url, source.urls)):
            changes[source.URL_KEY] = tuple(_NOWHERE if is_framework_url(url) else url for url in source.urls)
            notes.append(f"{name}: its address comes from the training framework")
        if isinstance(source, ReplicaSetConfig) and source.placement == "ray":
            pool_spec(name, source)  # what Ray could not place is a mistake with any cluster
            changes |= {"placement": "local", "platform": "cpu", "devices": None}
            notes.append(f"{name}: its servers run on a Ray cluster, which was not joined")
        sources[name] = source.model_copy(update=changes)
    return _alone(config, shared="off").model_copy(update={"sources": {**config.sources, **sources}}), notes


def _alone(config: Config, **engine: Any) -> Config:
    """A check must not create, open or fill the journal of a run."""
    changes = {"journal": None, "reload": False, **engine}
    return config.model_copy(update={"engine": config.engine.model_copy(update=changes)})


def show_difference(old: Path, new: Path) -> int:
    """Print what differs between two files, and return 1 if it cannot be reloaded.

    Raises `ConfigurationError` for mistakes in either.
    """
    before, after = _loaded(old), _loaded(new)
    found = difference(before, after)
    if not found:
        say(OUT, "no change")
        return OK
    shown = table("what", "before", "after", "effect", left=("what", "before", "after"), folds=("effect",))
    for change in found.changes:
        # Instructions and names may look like markup.
        effect = "needs a restart" if change.restart else "is reloaded"
        shown.add_row(*map(Text, (change.path, change.before or "-", change.after or "-", effect)))
    print_whole(OUT, shown)
    if found.refused:
        names = ", ".join(change.path for change in found.refused)
        say(OUT, f"a reload would be refused as a whole: {names} needs a restart")
        return CHECK_FAILED
    say(OUT, "a reload would apply this as a whole")
    return OK


def _loaded(path: Path) -> Config:
    config = load_config(path)
    with mistakes_in(path):
        JudgeRouter(config, key=secrets.token_bytes(16))
    return config
