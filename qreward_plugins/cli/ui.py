"""`qreward ui`: a page over journals, in the browser of this machine.

It listens at 127.0.0.1 only. A page that others can reach would need a login, and who trains on another machine has
SSH, which forwards a port.
"""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from typing import Annotated

import typer
from aiohttp import web

from ..errors import InputError
from ..journal.stories import journals_in
from ..system.output_files import check_new
from .console import ERRORS, OK, OUT, Journals, Overwrite, replaced, run, say


def command(
    paths: Journals,
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port at 127.0.0.1; 0: any.")] = 8899,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the trend and the audit as one file, .html, and end.")
    ] = None,
    overwrite: Overwrite = False,
) -> int:
    """Show a run in the browser: its rewards over the steps, the samples of a step, and the story of each sample.

    Trend: reward, failures, flat groups, latency and cost over the steps, with the alarms of the audit.

    Step: its samples, to filter and sort, and what it waited for. Sample: what `qreward why` shows.

    Compare: two judges, or two runs, on the same samples.

    Sources: those of a run that goes on, with a button that holds one.

    It reads journals, also while runs write them, and changes nothing but which sources are held. Only this machine can
    open the page; from another one, forward the port: ssh -L 8899:127.0.0.1:8899 HOST. Ctrl-C ends it.

    Exit codes: 2 there is no such journal, or the port is taken; 130 stopped with Ctrl-C.
    """
    if report is not None:
        check_new(report, ".html", overwrite=overwrite)
        return write_report(journals_in(paths), report)
    return run(serve_page(journals_in(paths), port))


def write_report(paths: list[str], out: Path) -> int:
    """Write a report. Raises `JournalError`, and `InputError` if it cannot be written."""
    from ..ui.pages import RunPage

    with ERRORS.status("reading the journal ..."):
        text = RunPage(paths).report()
    with replaced(out) as partial:
        partial.write_text(text, encoding="utf-8")
    say(OUT, f"{out} needs no server; any browser shows it")
    return OK


async def serve_page(paths: list[str], port: int) -> int:
    """Serve the page until it is cancelled. Raises `JournalError`, and `InputError` if the port is taken."""
    from ..ui.pages import RunPage

    page = RunPage(paths)
    runner = web.AppRunner(page.application(), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    try:
        with ERRORS.status("reading the journal ..."):
            entries = await page.load()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
        except OSError as error:
            taken = "is taken" if error.errno == errno.EADDRINUSE else f"cannot be opened ({error.strerror})"
            raise InputError(f"port {port} {taken}; choose another one with --port") from None
        say(OUT, f"{entries:,} entries at http://127.0.0.1:{runner.addresses[0][1]}/ (Ctrl-C ends it)")
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()
    return OK
