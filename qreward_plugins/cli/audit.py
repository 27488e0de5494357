"""`qreward audit`: alarms for reward hacking, and for a judge that changes.

`journal.audit` has the checks; the page of `qreward ui` shows the same alarms.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Annotated

import orjson
import typer
from rich.table import Table
from rich.text import Text

from ..journal.audit import AuditFinding, audit
from ..journal.stories import journals_in
from ..secrets import one_line
from .console import ERRORS, OK, OUT, Journals, print_whole, say, table

_ALARM = 1
"""The exit code."""


def command(
    paths: Journals,
    of_run: Annotated[
        str | None, typer.Option("--run", metavar="NAME", help="This run. Default: the latest one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each check.")] = False,
) -> int:
    """Look for reward hacking and for a judge that changes, after the fact, in the training samples of a run.

    length: responses grow, and in groups their length goes with the reward, from the first third of the steps to the
    last one.

    component: one component explains the rewards in groups, and did not at first, while another one falls.

    groups: most groups have equal rewards, and more of them than at first.

    phrases: a phrase spreads, and responses with it get higher rewards.

    flips: a question that was asked again got another answer.

    models: the replies of a source name another model.

    An alarm is a reason to look, with `qreward why` and `qreward ui`, and no proof; and no alarm is no proof of the
    contrary. An effect counts if it is 3.5 standard errors beyond its bound; "-" says that there is too little to tell.

    Exit codes: 0 no alarm; 1 an alarm; 2 there is no such journal, or no training sample in it.
    """
    with ERRORS.status(Text(f"reading {' and '.join(paths)} ...")):
        run, findings = audit(journals_in(paths), of_run)
    if as_json:
        for finding in findings:
            say(OUT, orjson.dumps(finding).decode())
    else:
        say(OUT, f"run {one_line(run, 80)}\n")
        print_whole(OUT, _table(findings))
        say(OUT, "\nThis audits what has happened already; an alarm is a reason to look, and no proof.")
        if any(finding.alarm for finding in findings):
            say(OUT, f"look at the samples: qreward ui {shlex.join(paths)}")
    return _ALARM if any(finding.alarm for finding in findings) else OK


def _table(findings: Sequence[AuditFinding]) -> Table:
    shown = table("check", "of", "", "found", left=("check", "of", ""), folds=("found",))
    for finding in findings:
        word, style = {True: ("ALARM", "red"), False: ("ok", "green"), None: ("-", "dim")}[finding.alarm]
        shown.add_row(finding.check, Text(one_line(finding.about, 40)), Text(word, style), Text(finding.said))
    return shown
