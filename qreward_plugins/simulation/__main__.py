"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
seed and show it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from ..sources.function import processors
from .cluster_plan import random_plan
from .soak import Tally, check, check_cluster, soak_in_processes

_MOST_FINDINGS = 10
"""Seeds that broke a promise after which a soak ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if every promise was kept, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m qreward_plugins.simulation",
        description="Play random trials of the whole engine in virtual time, and check its promises.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=_seeds, default=(0, 2000), metavar="FIRST:LAST", help="default: 0:2000")
    what.add_argument("--seed", type=int, help="play this seed alone, a trial twice, and show everything that happened")
    parser.add_argument("--cluster", action="store_true", help="play clusters of workers that share limits instead")
    parser.add_argument("--jobs", type=int, default=processors(), help="processes; default: one for each core")
    options = parser.parse_args(arguments)
    return _many(options) if options.seed is None else _one(options.seed, cluster=options.cluster)


def _one(seed: int, *, cluster: bool) -> int:
    if cluster:
        tally, broken = check_cluster(seed)
        print(f"{random_plan(seed).describe()}\ndone after {tally.virtual_s:.1f} s")
    else:
        trial, record, broken = check(seed, replay=True)
        print(f"{trial.describe()}\n{record.text()}", end="")
    for one in broken:
        print(f"seed {seed} broke {one}")
    if not broken:
        print(f"seed {seed} kept every promise")
    return 1 if broken else 0


def _many(options: argparse.Namespace) -> int:
    tally, started_at = Tally(), time.monotonic()
    soaking = soak_in_processes(*options.seeds, jobs=options.jobs, cluster=options.cluster)
    try:
        for soaked in soaking:
            tally.add(soaked)
            if soaked.findings:
                print(f"{soaked.describe()}\n", flush=True)
            if len(tally.findings) >= _MOST_FINDINGS:
                break
    finally:
        soaking.close()
    print(
        f"{tally.played:,} {'clusters' if options.cluster else 'trials'}; {len(tally.findings)} seeds broke a promise"
    )
    for name, count in tally.counts.items():
        print(f"  {name}: {count:,}")
    print(f"  virtual time: {tally.virtual_s:,.0f} s in {time.monotonic() - started_at:,.0f} s")
    print(f"  fingerprint: {tally.fingerprint:016x}")
    return 1 if tally.findings else 0


def _seeds(text: str) -> tuple[int, int]:
    first, separator, last = text.partition(":")
    try:
        seeds = (int(first), int(last)) if separator else (0, int(first))
    except ValueError:
        seeds = (0, 0)
    if seeds[0] >= seeds[1]:
        raise argparse.ArgumentTypeError(f"seeds are FIRST:LAST, as in 0:2000, or a number of them, not {text!r}")
    return seeds


if __name__ == "__main__":
    sys.exit(main())
