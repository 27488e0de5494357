"""`qreward sources`: how the sources of a run are that goes on, and holding one by hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from ..journal.live_sources import LiveSource, hold_source, live_sources
from ..journal.stories import journals_in
from ..secrets import one_line
from .console import OK, OUT, STYLES, Journals, print_whole, say, seconds, short, table

_WORDS = ("run", "source", "state")
_COUNTS = ("processes", "waiting", "in flight", "at once", "per minute", "429s", "errors", "p50", "p95")


def command(
    paths: Journals,
    hold: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Give this source no further calls; repeatable.")
    ] = None,
    release: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Let it take calls again; repeatable.")
    ] = None,
) -> int:
    """Show the sources of a run that goes on: state, limits, what waits and what is in flight; hold one, or release it.

    The run and this command meet in the run's journal: each of its processes writes the state of its sources there
    every second. A held source gets no further calls within two seconds, in all processes that write to this file.
    They go to other sources, or wait until their deadline; those under way go on. It is held until it is released, or
    the run ends.

    Exit codes: 0 shown or changed, also if no run is under way; 2 there is no such journal, or there is no run or no
    such source to hold or release.
    """
    files = journals_in(paths)
    for names, held in ((hold, True), (release, False)):
        for name in names or ():
            hold_source(files, name, time.time(), held=held)
    found = live_sources(files, time.time())
    if not found:
        say(OUT, f"no run is under way that writes to {' or '.join(paths)}")
    else:
        _show(found)
    return OK


def _show(found: Sequence[LiveSource]) -> None:
    shown = table(*_WORDS, *_COUNTS, left=_WORDS)
    for source in found:
        pending = {(True, False): ", to be held", (False, True): ", to be released"}
        state = source.state + pending.get((source.held, source.state == "held"), "")
        counts = (source.processes, source.waiting, source.in_flight, source.concurrency, source.requests_per_minute)
        shown.add_row(
            *(Text(one_line(source.run_id, 40)), Text(one_line(source.name, 60))),
            Text(state, STYLES.get(source.state, "")),
            *map(short, (*counts, source.throttled, source.transient + source.permanent + source.invalid)),
            *map(seconds, (source.latency_p50_s, source.latency_p95_s)),
        )
    print_whole(OUT, shown)
    for source in found:
        for note in filter(None, (source.problem.removeprefix(f"{source.name}: "), source.learned)):
            say(OUT, f"  {one_line(source.name, 60)}: {one_line(note, 400)}")
