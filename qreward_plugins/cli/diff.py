"""`qreward diff`: how two judges, or two versions of one, differ on the same samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from ..errors import InputError
from ..journal.comparison import Figure, Judged, JudgedPair, figures, latest_judges, pairs_of
from ..journal.stories import journals_in
from ..secrets import one_line
from .console import OK, OUT, number, number_of, print_whole, say, table

_SAID_CHARS = 120
_MOST_CHANGES = 5


def command(
    first: Annotated[str, typer.Argument(metavar="A", help="A journal.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one, or the same with --other-judge.")],
    judge: Annotated[str | None, typer.Option(metavar="NAME", help="The judge of both. Default: the only one.")] = None,
    other: Annotated[
        str | None, typer.Option("--other-judge", metavar="NAME", help="The judge in B, if it is not that of --judge.")
    ] = None,
    at: Annotated[float, typer.Option(metavar="REWARD", help="From this reward on a sample counts as good.")] = 0.5,
) -> int:
    """Compare the rewards of two journals on the samples that both have, such as those of qreward score with two
    configurations: by id, step and split, of the latest run in each.

    Exit codes: 0 compared; 2 there is no such journal or judge, or no sample is in both.
    """
    a, b = _read(first, judge), _read(second, other or judge)
    if (first, a.judge) == (second, b.judge):
        remedy = "name another journal (score again with another --out), or --other-judge"
        raise InputError(f"A and B are both {a.judge} of {first}; {remedy}")
    try:
        pairs = pairs_of(a, b)
    except InputError as error:
        raise InputError(f"{first} and {second}: {error}") from None
    others = sum(not pair.same for pair in pairs)
    for name, path, one in (("A", first, a), ("B", second, b)):
        failed = f", {one.failed:,} without a reward" if one.failed else ""
        count = number_of(len(one.samples), "sample")
        say(OUT, f"{name}: {_line(path)}, run {_line(one.run)}, judge {_line(one.judge)}: {count}{failed}")
    differ = f"; {others:,} of them are other responses under the same id" if others else ""
    say(OUT, f"{number_of(len(pairs), 'sample')} with a reward in both{differ}\n")
    print_whole(OUT, _table(figures(pairs, at)))
    down = sum(pair.a >= at > pair.b for pair in pairs)
    up = sum(pair.b >= at > pair.a for pair in pairs)
    share = (down + up) / len(pairs)
    say(OUT, f"\n{down + up:,} change sides at {at:g} ({share:.1%}): {down:,} fall below it, {up:,} rise to it")
    changed = [pair for pair in pairs if pair.a != pair.b]
    if changed:
        OUT.print()
        print_whole(OUT, _changes(changed))
    return OK


def _read(path: str, judge: str | None) -> Judged:
    """Read the latest run of a journal. Raises `JournalError`, and `InputError` for a judge that is not there."""
    if journals_in([path]) != [path]:
        raise InputError(f"{path} is a directory; name one journal in it")
    run, judges, wholes = latest_judges(path)
    chosen = judge if judge is not None else next(iter(wholes if len(wholes) == 1 else judges), "")
    if chosen not in judges or (judge is None and len(judges) > 1 and len(wholes) != 1):
        known = ", ".join(sorted(judges)) or "none"
        has = number_of(len(judges), "judge") if judge is None else f"no judge {judge!r}"
        raise InputError(f"{path}: its latest run has {has}; name one with --judge or --other-judge: {known}")
    return Judged.read([path], run, chosen)


def _table(found: Sequence[Figure]) -> Table:
    shown = table("", "value", "95 % interval", left=("",))
    for name, value, low, high in found:
        shown.add_row(name, number(value), "" if low is None else f"{number(low)} to {number(high)}")
    return shown


def _changes(pairs: Sequence[JudgedPair]) -> Table:
    names = ("sample", "A said", "B said")
    shown = table("A", "B", *names, folds=names, title="largest changes")
    for pair in sorted(pairs, key=lambda pair: -abs(pair.b - pair.a))[:_MOST_CHANGES]:
        texts = (Text(_line(text)) for text in (pair.name, *pair.said))
        shown.add_row(number(pair.a), number(pair.b), *texts)
    return shown


def _line(text: str) -> str:
    return one_line(text, _SAID_CHARS)
