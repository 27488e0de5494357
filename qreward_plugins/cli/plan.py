"""`qreward plan`: predicts the duration, the cost and the bottleneck of a step."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from ..config import Config
from ..config.models import JournalConfig
from ..errors import InputError
from ..planning import Assumptions, Plan, plan
from ..planning.picture import check_picture, draw_timeline
from ..planning.recorded import Compared, compare, errors_of, in_figures, read_steps, recorded_shares
from ..planning.rollouts import parse_lengths
from ..planning.setting import parse_data_source, parse_latency
from ..secrets import one_line
from ..sources.function import processors
from .console import ERRORS, OK, OUT, number_of, print_whole, say, seconds, short, table
from .engines import load_own

_MOST_ADVICE = 6
_NAME_CHARS = 24
_MOST_PROCESSES = 8
_LINE_EVERY_S = 10.0
"""Without a terminal, a line tells so often how far the plan is."""
_COMPARED = {"seconds": "time", "requests": "requests", "tokens": "tokens", "cost_usd": "cost"}


def command(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="The configuration (YAML).")],
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", help="Samples in a step.", min=1, max=1_000_000)
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="JOURNAL", help="Instead of one step: the steps of a journal, each beside its plan."),
    ] = None,
    last: Annotated[int, typer.Option(help="Steps of the journal that are planned.", min=1, max=1000)] = 20,
    tokens: Annotated[
        str | None,
        typer.Option(metavar="DIST", help="Lengths of rollouts: 800, lognormal:800:0.6, or file:ROLLOUTS.jsonl."),
    ] = None,
    latency: Annotated[
        str | None,
        typer.Option(metavar="SECONDS", help="Seconds of an average request, without waiting: 3, or a=2,b=0.5."),
    ] = None,
    data_source: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SHARE]", help="Data source of the samples, which selects the judge; repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Steps to simulate.", min=1, max=1000)] = 5,
    workers: Annotated[
        int, typer.Option(help="Processes that divide the samples and share the limits.", min=1, max=1000)
    ] = 1,
    start: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How long the servers of kind replicas start. Default: not known.", min=0),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the timeline of a step (.png, .svg, .pdf); needs the extra `plot`."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.")] = False,
) -> int:
    """Simulate a training step: its duration, its cost, what it waits for, and what would help most.

    The real scheduler runs in virtual time over simulated servers with the limits of the configuration. Nothing is
    sent, and nothing is written to a journal. What is not given here is taken from the journal of the configuration,
    or assumed; the last lines say what.

    With --against, show how far such plans are off: the latest steps of a journal, each beside what is planned for as
    many samples.

    Exit codes: 0 success; 2 the input or the configuration has mistakes.
    """
    if (samples is None) == (against is None):
        raise InputError("write either --samples N, or --against JOURNAL")
    if plot is not None:
        if against is not None:
            raise InputError("--plot draws the plan of one step; leave out --against")
        check_picture(plot)
    loaded = load_own(config)
    named = [parse_data_source(text) for text in data_source or ()]
    columns = TextColumn("rehearsing"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=ERRORS, transient=True, disable=not ERRORS.is_terminal) as bar:
        task, said_at = bar.add_task("", total=None), time.monotonic()

        def tell(done: int, total: int) -> None:
            nonlocal said_at
            bar.update(task, completed=done, total=total)
            if not ERRORS.is_terminal and time.monotonic() >= said_at + _LINE_EVERY_S:
                said_at = time.monotonic()
                say(ERRORS, f"rehearsed {done} of {total} steps")

        def plan_of(loaded: Config, count: int, **how: Any) -> Plan:
            return plan(
                loaded,
                origin=str(config),
                samples=count,
                lengths=None if tokens is None else parse_lengths(tokens, most=count),
                assumptions=Assumptions(latency_s={} if latency is None else parse_latency(latency, loaded)),
                seeds=seeds,
                workers=workers,
                start_s=start,
                # More processes save little time.
                processes=min(processors(), _MOST_PROCESSES),
                progress=tell,
                **how,
            )

        found: Plan | list[Compared]
        if against is None:
            assert samples is not None
            found = plan_of(loaded, samples, data_sources=named)
        else:
            engine = loaded.engine.model_copy(update={"journal": JournalConfig(path=against)})
            recorded = loaded.model_copy(update={"engine": engine})
            shares = named or recorded_shares(against)
            steps = read_steps(against, last)
            found = compare(steps, lambda count: plan_of(recorded, count, data_sources=shares, advise=False))
    if as_json:
        figures = found.to_dict() if isinstance(found, Plan) else in_figures(found)
        OUT.out(json.dumps(figures, indent=2, allow_nan=False), highlight=False)
    elif isinstance(found, Plan):
        _print(found, config)
    else:
        _print_compared(found, config, str(against))
    if plot is not None and isinstance(found, Plan):
        title = f"{number_of(found.samples, 'sample')} in {found.timeline.makespan_s:.1f} s"
        draw_timeline(found.timeline, plot, title=title, subtitle=f"most of it: {found.bottleneck.describes}")
        say(ERRORS, f"the timeline is in {plot}")
    return OK


def _print(found: Plan, path: Path) -> None:
    judged = " and ".join(f"{count:,.0f} by {judge}" for judge, count in found.judged.items())
    say(
        OUT,
        Text.assemble((f"{path}: a step of {number_of(found.samples, 'sample')}", "bold"), f" (judged: {judged})\n"),
    )
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    step = found.step_s
    facts.add_row(
        "takes", Text.assemble((seconds(step.p50), "bold"), f"  (95% of the steps: up to {seconds(step.p95)})")
    )
    if found.first_step_s is not None:
        facts.add_row("at first", f"{seconds(found.first_step_s)}  (until the servers have started)")
    facts.add_row("costs", _costs(found))
    facts.add_row("waits for", _waits(found))
    for problem in _problems(found):
        facts.add_row(Text("but", "red"), Text(problem, "red"))
    OUT.print(Padding(facts, (0, 0, 0, 2)))
    OUT.print()
    print_whole(OUT, _source_table(found))
    OUT.print()
    _print_advice(found)
    _print_assumed(found.notes)


def _print_assumed(notes: Iterable[str]) -> None:
    say(OUT, Text("\nassumed", "bold"))
    for note in notes:
        say(OUT, Text(f"  {note}", "dim"))


def _print_compared(found: Sequence[Compared], path: Path, journal: str) -> None:
    steps = number_of(len(found), "step")
    say(OUT, Text.assemble((f"{journal}: the latest {steps}, each beside its plan by {path}", "bold"), "\n"))
    columns = ("step", "samples", "takes", "plan", "requests", "plan", "tokens", "plan", "USD", "plan")
    shown = table(*columns)
    for each in found:
        real, planned = each.measured, each.planned
        pairs = [
            (seconds(real.seconds), seconds(planned.seconds)),
            *((short(getattr(real, name)), short(getattr(planned, name))) for name in ("requests", "tokens")),
            (f"{real.cost_usd:.4f}", f"{planned.cost_usd:.4f}"),
        ]
        shown.add_row(str(real.number), f"{real.samples:,}", *(one for pair in pairs for one in pair))
    print_whole(OUT, shown)
    errors = ", ".join(f"{_COMPARED[name]} {100 * error:+.0f}%" for name, error in errors_of(found).items())
    say(OUT, Text(f"\nthe plan is off by (median): {errors}", "bold"))
    _print_assumed(dict.fromkeys(note for each in found for note in each.assumed))


def _costs(found: Plan) -> Text:
    if found.cost_usd is None:
        return Text("unknown: no source has a price")
    dollars = found.cost_usd.p50
    return Text.assemble(
        (_dollars(dollars), "bold"), f"  ({_dollars(1000 * dollars / found.samples)} per 1,000 samples)"
    )


def _waits(found: Plan) -> Text:
    whole = sum(wait.seconds for wait in found.waits)
    share = f"  ({_percent(found.bottleneck.seconds / whole)} of the time)" if whole else ""
    return Text.assemble((found.bottleneck.describes, "bold"), share)


def _problems(found: Plan) -> list[str]:
    problems = []
    if found.late >= 0.0005:
        problems.append(
            f"{_percent(found.late)} of the samples get no reward: engine.deadline_s is {found.deadline_s:g}, "
            f"and a step takes {seconds(found.step_s.p50)}"
        )
    for reason, share in found.failed.items():
        if share >= 0.0005:
            problems.append(f"{_percent(share)} of the samples are not judged for another reason ({reason})")
    return problems


def _source_table(found: Plan) -> Table:
    batches = any(use.calls_per_request > 1 for use in found.sources)
    columns = ("source", "latency", "requests", *(("calls each",) if batches else ()))
    columns += ("of requests/min", "of tokens/min", "in flight", "busy", "USD")
    shown = table(*columns, left=("source",))
    for use in found.sources:
        shown.add_row(
            one_line(use.name, _NAME_CHARS),
            seconds(use.latency_s),
            short(use.requests),
            *([f"{use.calls_per_request:.1f}"] if batches else []),
            *("-" if used is None else _percent(used) for used in (use.requests_used, use.tokens_used)),
            f"{use.peak_in_flight:,}" + ("" if use.concurrency is None else f" of {use.concurrency:,}"),
            _percent(use.out_of_places),
            "-" if use.cost_usd is None else f"{use.cost_usd:.4f}",
        )
    return shown


def _print_advice(found: Plan) -> None:
    if not found.advice:
        say(OUT, Text("no change that was tried would help much: the longest requests determine the step", "bold"))
        return
    say(OUT, Text("what would help most", "bold"))
    changes = table("  change", "step", "", "USD", left=("  change",))
    for advice in found.advice[:_MOST_ADVICE]:
        saved = 0.0 if advice.cost_usd is None else round(advice.saved_usd, 6)
        changes.add_row(
            f"  {advice.change}",
            f"{seconds(advice.now_s)[:-1]} -> {seconds(advice.step_s)[:-1]} s",
            Text(f"{-100 * advice.saved_s / advice.now_s:+.0f}%", "green"),
            f"{'-' if saved > 0 else '+'}{_dollars(abs(saved))}" if saved else "",
        )
    print_whole(OUT, changes)


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.0995 or not amount else f"${amount:.2g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.0095 or not share else f"{100 * share:.1g}%"
