"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
trial and show it.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..sources.function import processors
from .cluster import ClusterSoaked, ClusterTally, check_cluster, soak_clusters
from .cluster_plan import random_plan
from .promises import broken_promises, replay_differs
from .soak import REPLAY_EVERY, Finding, Soaked, Tally, soak, soak_in_processes
from .trial import random_trial
from .trial_player import play


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every promise was kept, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m qreward_plugins.simulation",
        description="Play random trials of the whole engine in virtual time, and check its promises.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=_seeds, default=(0, 2000), metavar="FIRST:LAST", help="default: 0:2000")
    what.add_argument("--seed", type=int, help="play the trial of this seed alone, twice")
    parser.add_argument("--cluster", action="store_true", help="play clusters of workers that share limits instead")
    parser.add_argument("--trace", action="store_true", help="with --seed: show everything that happened")
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
    if options.cluster:
        if options.seed is not None:
            return _one_cluster(options.seed)
        return _many(soak_clusters, ClusterTally(), options)
    if options.seed is not None:
        return _one(options.seed, show_trace=options.trace)
    return _many(functools.partial(soak, replay_every=options.replay_every), Tally(), options)


def _one(seed: int, *, show_trace: bool) -> int:
    trial = random_trial(seed)
    print(trial.describe())
    record = play(trial, trace=True)
    broken = broken_promises(trial, record)
    differs = replay_differs(record, play(trial, trace=True))
    broken += [differs] if differs is not None else []
    if show_trace:
        print(record.text(), end="")
    for one in broken:
        print(f"seed {seed} broke {one}")
    if not broken:
        print(f"seed {seed} kept every promise")
    return 1 if broken else 0


def _many(
    soak: Callable[[int, int], Soaked] | Callable[[int, int], ClusterSoaked],
    tally: Tally | ClusterTally,
    options: argparse.Namespace,
) -> int:
    console, what = Console(), "clusters" if options.cluster else "trials"
    first, last = options.seeds
    findings, started_at = list[Finding](), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    soaking: Generator[Any, None, None] = soak_in_processes(soak, first, last, jobs=options.jobs)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task(what, total=last - first)
            for soaked in soaking:
                tally.add(soaked.tally)
                findings += soaked.findings
                if soaked.findings:
                    console.out(f"{soaked.describe()}\n", highlight=False)
                progress.update(task, completed=tally.trials, description=_broken(len(findings)))
                if len(findings) >= options.findings:
                    break
    finally:
        soaking.close()
    table = Table(show_header=False, box=None)
    table.add_row(what, f"{tally.trials:,}")
    table.add_row("seeds that broke a promise", f"{len(findings):,}")
    for name, value in _counts(tally) if isinstance(tally, Tally) else _cluster_counts(tally):
        table.add_row(name, value)
    table.add_row("virtual time", f"{tally.virtual_s:,.0f} s in {time.monotonic() - started_at:,.0f} s")
    table.add_row("fingerprint", f"{tally.fingerprint:016x}")
    console.print(table)
    if findings:
        console.out(_broken(len(findings)) + ", the first one: " + min(findings, key=_seed_of).describe())
    return 1 if findings else 0


def _one_cluster(seed: int) -> int:
    print(random_plan(seed).describe())
    cluster, tally, broken = check_cluster(seed)
    for server in cluster.servers.values():
        for problem in server.broken:
            print(problem)
    for one in broken:
        print(f"cluster {seed} broke {one}")
    if not broken:
        print(f"cluster {seed} kept every limit and was done after {tally.virtual_s:.1f} s")
    return 1 if broken else 0


def _counts(tally: Tally) -> Iterator[tuple[str, str]]:
    yield "played twice", f"{tally.replayed:,}"
    yield "samples", f"{tally.samples:,}"
    yield "scored", f"{tally.scored:,}"
    for reason, count in tally.floors.most_common():
        yield f"scored with a floor: {reason}", f"{count:,}"
    for reason, count in tally.failures.most_common():
        yield f"failed: {reason}", f"{count:,}"
    yield "cancelled by their callers", f"{tally.given_up:,}"
    yield "attempts", f"{tally.attempts:,}"
    yield "hedges", f"{tally.hedges:,}"
    yield "throttled", f"{tally.throttled:,}"


def _cluster_counts(tally: ClusterTally) -> Iterator[tuple[str, str]]:
    yield "requests", f"{tally.requests:,}"
    yield "reports to keepers", f"{tally.reports:,}"
    yield "keepers", f"{tally.keepers:,}"
    yield "slowest", f"{tally.slowest[0]:.0%} of the time allowed (seed {tally.slowest[1]})"


def _broken(count: int) -> str:
    return "every promise kept" if not count else f"{count} seed{'' if count == 1 else 's'} broke a promise"


def _seed_of(finding: Finding) -> int:
    return finding.seed


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
