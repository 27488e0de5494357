"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
seed and show it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..sources.function import processors
from .cluster_plan import random_plan
from .promises import Broken
from .soak import REPLAY_EVERY, Finding, Tally, check, check_cluster, soak, soak_clusters, soak_in_processes
from .trial import random_trial


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every promise was kept, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m qreward_plugins.simulation",
        description="Play random trials of the whole engine in virtual time, and check its promises.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=_seeds, default=(0, 2000), metavar="FIRST:LAST", help="default: 0:2000")
    what.add_argument("--seed", type=int, help="play this seed alone, a trial twice")
    parser.add_argument("--cluster", action="store_true", help="play clusters of workers that share limits instead")
    parser.add_argument("--trace", action="store_true", help="with --seed: show everything that happened in a trial")
    parser.add_argument("--jobs", type=_positive, default=processors(), help="processes; default: one for each core")
    parser.add_argument(
        "--replay-every",
        type=_positive,
        default=REPLAY_EVERY,
        help="play one trial in so many twice; default: %(default)s",
    )
    parser.add_argument(
        "--findings",
        type=_positive,
        default=10,
        help="end after so many seeds that broke a promise; default: %(default)s",
    )
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return _one(options)
    return _many(options)


def _one(options: argparse.Namespace) -> int:
    seed: int = options.seed
    broken: list[Broken]
    if options.cluster:
        print(random_plan(seed).describe())
        tally, broken = check_cluster(seed)
        print(f"done after {tally.virtual_s:.1f} s")
    else:
        print(random_trial(seed).describe())
        _, record, broken = check(seed, replay=True)
        if options.trace:
            print(record.text(), end="")
    for one in broken:
        print(f"seed {seed} broke {one}")
    if not broken:
        print(f"seed {seed} kept every promise")
    return 1 if broken else 0


def _many(options: argparse.Namespace) -> int:
    console, tally, findings = Console(), Tally(), list[Finding]()
    what = "clusters" if options.cluster else "trials"
    play = soak_clusters if options.cluster else functools.partial(soak, replay_every=options.replay_every)
    (first, last), started_at = options.seeds, time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    soaking = soak_in_processes(play, first, last, jobs=options.jobs)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=last - first)
            for soaked in soaking:
                tally.add(soaked.tally)
                findings += soaked.findings
                if soaked.findings:
                    console.out(f"{soaked.describe()}\n", highlight=False)
                progress.update(task, completed=tally.played, description=_broken(len(findings)))
                if len(findings) >= options.findings:
                    break
    finally:
        soaking.close()
    table = Table(show_header=False, box=None)
    table.add_row(what, f"{tally.played:,}")
    table.add_row("seeds that broke a promise", f"{len(findings):,}")
    for name, count in tally.counts.items():
        table.add_row(name, f"{count:,}")
    if options.cluster:
        table.add_row("slowest", f"{tally.slowest[0]:.0%} of the time allowed (seed {tally.slowest[1]})")
    table.add_row("virtual time", f"{tally.virtual_s:,.0f} s in {time.monotonic() - started_at:,.0f} s")
    table.add_row("fingerprint", f"{tally.fingerprint:016x}")
    console.print(table)
    if findings:
        first_one = min(findings, key=lambda finding: finding.seed)
        console.out(_broken(len(findings)) + ", the first one: " + first_one.describe())
    return 1 if findings else 0


def _broken(count: int) -> str:
    return "every promise kept" if not count else f"{count} seed{'' if count == 1 else 's'} broke a promise"


def _seeds(text: str) -> tuple[int, int]:
    first, separator, last = text.partition(":")
    try:
        seeds = (int(first), int(last)) if separator else (0, int(first))
    except ValueError:
        seeds = (0, 0)
    if seeds[0] >= seeds[1]:
        raise argparse.ArgumentTypeError(f"seeds are FIRST:LAST, as in 0:2000, or a number of them, not {text!r}")
    return seeds


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a number from 1 on, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
