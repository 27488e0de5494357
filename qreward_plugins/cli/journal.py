"""`qreward journal`: what the judges said, and which sample each step waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.stories import journals_in
from ..secrets import one_line
from .console import OK, OUT, Journals, number_of, print_whole, say, seconds, short, table
from .journal_reports import LATEST, Row, SourceReport, StepReport, drawn, read_rows, slowest, sources_of, steps_of

_WIDEST_NAME = 16
_WIDEST_CHARS = 20_000
_LEFT = ("run", "sample", "step", "judge", "source")


def command(
    paths: Journals,
    step: Annotated[int | None, typer.Option(metavar="N", help="Only this training step, the slowest first.")] = None,
    last: Annotated[int, typer.Option(metavar="N", min=1, help="How many of the latest steps are shown.")] = 10,
    verdicts: Annotated[int, typer.Option(metavar="N", min=0, help="How many verdicts are shown.")] = 8,
) -> int:
    """Show what a journal recorded, also while a run writes it.

    For each step: how many outcomes and failures, the mean score, and the slowest sample, how long it waited and on
    which source. For each source: answers, retries, time, tokens and cost. Then some verdicts, with the words of the
    judge.

    Exit codes: 0 shown; 2 there is no such journal, or nothing in it.
    """
    names = " and ".join(paths)
    rows = [row for path in journals_in(paths) for row in read_rows(path, step)]
    if not rows:
        raise InputError(f"{names} has no outcomes" + ("" if step is None else f" of step {step}"))
    found = steps_of(rows)
    latest = "the latest " if len(rows) >= LATEST else ""
    failed, floors = sum(row.failed for row in rows), sum(row.floor is not None for row in rows)
    runs = len({row.run_id for row in rows})
    of_runs = f" of {runs} runs" if runs > 1 else ""
    floor = f", {floors:,} got a floor" if floors else ""
    count = number_of(len(rows), "outcome")
    say(OUT, f"{names}: {latest}{count}{of_runs}, {failed:,} of them failed{floor}\n")
    shown = found[-last:]
    which = f", the last {len(shown)} of {len(found)}" if len(shown) < len(found) else ""
    print_whole(OUT, _steps(shown, f"steps, and the slowest sample of each{which}", by_run=runs > 1))
    OUT.print()
    print_whole(OUT, _sources(sources_of(rows)))
    if verdicts:
        title = "drawn from all" if step is None else "the slowest of the step first"
        picked = drawn(rows, verdicts) if step is None else slowest(rows, verdicts)
        OUT.print()
        print_whole(OUT, _verdicts(picked, f"verdicts, {title}"), widest=80)
    if verdicts:
        say(OUT, "\nqreward why FILE --row N: the whole story of a row")
    say(OUT, "\nwaited: in the queue, for a limit, or in tries that failed; the rest is the time of the answer itself")
    return OK


def _steps(found: Sequence[StepReport], title: str, *, by_run: bool) -> Table:
    columns = ("step", "judge", "n", "failed", "score", "median", "slowest", "waited", "tries", "source")
    shown = table(*(("run",) if by_run else ()), *columns, left=_LEFT, title=title)
    for one in found:
        last = one.slowest
        shown.add_row(
            *([_name(one.run_id)] if by_run else []),
            *(_name(one.label), _name(one.judge), str(one.rows), _failed(one.failed), _score(one.score)),
            *(seconds(one.median_s), seconds(last.latency_s), seconds(last.waited_s)),
            *(str(last.attempts), _name(last.source)),
        )
    return shown


def _sources(found: Iterable[SourceReport]) -> Table:
    columns = ("source", "n", "from journal", "retries", "median", "slowest", "tokens", "USD")
    shown = table(*columns, left=_LEFT, title="sources")
    for one in found:
        counts = map(str, (one.rows, one.cached, one.retries))
        cost = f"{one.cost_usd:.4f}" if one.cost_usd else "-"
        shown.add_row(
            _name(one.source), *counts, seconds(one.median_s), seconds(one.slowest_s), short(one.tokens), cost
        )
    return shown


def _verdicts(rows: Sequence[Row], title: str) -> Table:
    columns = ("row", "sample", "step", "judge", "score", "took", "what it said")
    shown = table(*columns, left=_LEFT, folds=columns[-1:], title=title)
    for row in rows:
        words = row.detail or row.rationale or "-"
        said = Text(_escaped(words), style="red" if row.failed else "")
        names = map(_name, (row.sample_id or "-", row.label, row.judge))
        shown.add_row(str(row.id), *names, _score(row.reward), seconds(row.latency_s), said)
    return shown


def _name(text: str) -> Text:
    return Text(one_line(text if len(text) <= _WIDEST_NAME else text[: _WIDEST_NAME - 3] + "...", _WIDEST_CHARS))


def _escaped(text: str) -> str:
    """`text` with its line breaks. Other control characters are escaped: a judge may repeat those of a response, and a
    terminal would obey them.
    """
    return "\n".join(one_line(line, _WIDEST_CHARS) for line in text.splitlines())


def _failed(count: int) -> Text:
    return Text(str(count), style="red" if count else "")


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
