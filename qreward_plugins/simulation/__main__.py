"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
trial and show it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from .cluster_plan import random_plan
from .cluster_soak import ClusterFinding, ClusterTally, check_cluster, soak_clusters_in_processes
from .promises import broken_promises, replay_differs
from .soak import REPLAY_EVERY, Finding, Tally, cores, soak_in_processes
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
    parser.add_argument("--jobs", type=_positive, default=cores(), help="processes; default: one for each core")
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
        return _many_clusters(*options.seeds, jobs=options.jobs, most=options.findings)
    if options.seed is not None:
        return _one(options.seed, show_trace=options.trace)
    return _many(*options.seeds, jobs=options.jobs, replay_every=options.replay_every, most=options.findings)


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


def _many(first: int, last: int, *, jobs: int, replay_every: int, most: int) -> int:
    console = Console()
    tally, findings, started_at = Tally(), list[Finding](), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    soaking = soak_in_processes(first, last, jobs=jobs, replay_every=replay_every)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("trials", total=last - first)
            for soaked in soaking:
                tally.add(soaked.tally)
                for finding in soaked.findings:
                    findings.append(finding)
                    console.out(f"{finding.describe()}\n{random_trial(finding.seed).describe()}\n", highlight=False)
                progress.update(task, completed=tally.trials, description=_broken(len(findings)))
                if len(findings) >= most:
                    break
    finally:
        soaking.close()
    console.print(_table(tally, len(findings), time.monotonic() - started_at))
    if findings:
        console.out(_broken(len(findings)) + ", the first one: " + min(findings, key=_seed_of).describe())
    return 1 if findings else 0


def _one_cluster(seed: int) -> int:
    print(random_plan(seed).describe())
    cluster, tally, broken = check_cluster(seed)
    for server in cluster.servers.values():
        for said in server.broken:
            print(said)
    for one in broken:
        print(f"cluster {seed} broke {one}")
    if not broken:
        print(f"cluster {seed} kept every limit and was done after {tally.virtual_s:.1f} s")
    return 1 if broken else 0


def _many_clusters(first: int, last: int, *, jobs: int, most: int) -> int:
    console = Console()
    tally, findings, started_at = ClusterTally(), list[ClusterFinding](), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    soaking = soak_clusters_in_processes(first, last, jobs=jobs)
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("clusters", total=last - first)
            for soaked in soaking:
                tally.add(soaked.tally)
                findings += soaked.findings
                if soaked.findings:
                    console.out(f"{soaked.describe()}\n", highlight=False)
                progress.update(task, completed=tally.plans, description=_broken(len(findings)))
                if len(findings) >= most:
                    break
    finally:
        soaking.close()
    table = Table(show_header=False, box=None)
    for name, value in (
        ("clusters", f"{tally.plans:,}"),
        ("seeds that broke a promise", f"{len(findings):,}"),
        ("requests", f"{tally.requests:,}"),
        ("reports to keepers", f"{tally.reports:,}"),
        ("keepers", f"{tally.keepers:,}"),
        ("slowest", f"{tally.slowest[0]:.0%} of the time allowed (seed {tally.slowest[1]})"),
        ("virtual time", f"{tally.virtual_s:,.0f} s in {time.monotonic() - started_at:,.0f} s"),
        ("fingerprint", f"{tally.fingerprint:016x}"),
    ):
        table.add_row(name, value)
    console.print(table)
    return 1 if findings else 0


def _table(tally: Tally, findings: int, wall_s: float) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in (
        ("trials", f"{tally.trials:,}, {tally.replayed:,} of them played twice"),
        ("seeds that broke a promise", f"{findings:,}"),
        ("samples", f"{tally.samples:,}"),
        ("scored", f"{tally.scored:,}"),
        *((f"scored with a floor: {reason}", f"{count:,}") for reason, count in tally.floors.most_common()),
        *((f"failed: {reason}", f"{count:,}") for reason, count in tally.failures.most_common()),
        ("cancelled by their callers", f"{tally.given_up:,}"),
        ("attempts", f"{tally.attempts:,}"),
        ("hedges", f"{tally.hedges:,}"),
        ("throttled", f"{tally.throttled:,}"),
        ("virtual time", f"{tally.virtual_s:,.0f} s in {wall_s:,.0f} s"),
        ("fingerprint", f"{tally.fingerprint:016x}"),
    ):
        table.add_row(name, value)
    return table


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
