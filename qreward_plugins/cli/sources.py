"""`qreward sources`: how the sources of a run are that goes on, and holding one by hand."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from ..journal.live_sources import LiveSource, hold_source, live_sources
from ..journal.stories import journals_in
from ..secrets import one_line
from .console import OK, OUT, Journals, print_whole, say, seconds, short, table
from .progress import STYLES

_COLUMNS = ("source", "state", "waiting", "in flight", "at once", "per minute", "429s", "errors", "p50", "p95")


def command(
    paths: Journals,
    hold: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Give this source no further calls; repeatable.")
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Let it take calls again; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each source.")] = False,
) -> int:
    """Show the sources of a run that goes on: state, limits, what waits and what is in flight; hold one, or release it.

    The run and this command meet in the run's journal: each of its processes writes the state of its sources there
    every second. A held source gets no further calls within two seconds, in all processes that write to this file.
    They go to other sources, or wait until their deadline; those under way go on. It is held until it is released, or
    the run ends.

    Exit codes: 0 shown or changed; 2 there is no such journal, no run is under way, or it has no such source.
    """
    files = journals_in(paths)
    for names, held in ((hold, True), (release, False)):
        for name in names or ():
            hold_source(files, name, time.time(), held=held)
    found = live_sources(files, time.time())
    if as_json:
        for source in found:
            # JSON has no infinity.
            numbers = {key: None if value in (math.inf, math.nan) else value for key, value in asdict(source).items()}
            say(OUT, json.dumps(numbers))
    elif not found:
        say(OUT, f"no run is under way that writes to {' or '.join(paths)}")
    else:
        _show(found)
    return OK


def _show(found: Sequence[LiveSource]) -> None:
    for run_id in dict.fromkeys(source.run_id for source in found):
        sources = [source for source in found if source.run_id == run_id]
        say(OUT, f"run {one_line(run_id, 80)}, processes: {max(source.processes for source in sources)}\n")
        shown = table(*_COLUMNS, left=_COLUMNS[:2])
        for source in sources:
            limits = [
                short(each) if each < math.inf else "-" for each in (source.concurrency, source.requests_per_minute)
            ]
            errors = source.transient + source.permanent + source.invalid
            shown.add_row(
                Text(one_line(source.name, 60)),
                Text(source.state, STYLES.get(source.state, "")),
                *(short(source.waiting), short(source.in_flight), *limits, short(source.throttled), short(errors)),
                *map(seconds, (source.latency_p50_s, source.latency_p95_s)),
            )
        print_whole(OUT, shown)
        for source in sources:
            notes = [source.problem.removeprefix(f"{source.name}: "), source.learned, _pending(source)]
            for note in filter(None, notes):
                say(OUT, f"  {one_line(source.name, 60)}: {one_line(note, 400)}")


def _pending(source: LiveSource) -> str:
    """What was asked for and has not happened yet."""
    if source.held and source.state != "held":
        return "it will be held within two seconds"
    return "it will be released within two seconds" if source.state == "held" and not source.held else ""
