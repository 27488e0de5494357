"""`python -m qreward_plugins.simulation`: soak the scheduler, or with `--cluster` the sharing of limits; or play one
seed and show it.

A soak plays trials or clusters on all cores, until some break a promise or the seeds run out. A shard is a range of
seeds for one process. Its result is small, so that a hundred thousand trials fit in memory. The fingerprint of a soak
sums the schedules of its seeds in any order. Two runs of the same seeds, in other processes or with other hash seeds,
have the same fingerprint, or promise P7 is broken.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise

from ..samples import Outcome
from ..sources.function import processors
from ..system.processes import process_pool, terminate
from .cluster import Cluster
from .cluster_plan import ALLOWED_S, random_plan
from .promises import Broken, broken_promises, hedges_of, replay_differs
from .trial import Trial, random_trial
from .trial_player import Record, play, quiet

SHARD = 50
"""Seeds of a shard."""
REPLAY_EVERY = 16
"""One trial in this many is played twice."""
_FINGERPRINTS = 2**64
_MOST_SAID = 3
_MOST_FINDINGS = 10
"""Seeds that broke a promise after which a soak ends."""


@dataclass
class Tally:
    """The sums over all trials or clusters, and each seed that broke promises with a text that says which, how to
    replay it, and what was played.
    """

    played: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Samples, requests and so on, in the order in which they are shown."""
    virtual_s: float = 0.0
    fingerprint: int = 0
    findings: dict[int, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.played += other.played
        self.counts.update(other.counts)
        self.virtual_s += other.virtual_s
        self.fingerprint = (self.fingerprint + other.fingerprint) % _FINGERPRINTS
        self.findings |= other.findings

    def describe(self) -> str:
        """The first findings, as text."""
        return "\n\n".join(list(self.findings.values())[:_MOST_SAID])


def replay_command(seed: int, *, cluster: bool = False) -> str:
    """The command that replays this seed."""
    return f"python -m qreward_plugins.simulation {'--cluster ' if cluster else ''}--seed {seed}"


def check(seed: int, *, replay: bool = False) -> tuple[Trial, Record, list[Broken]]:
    """Play the trial of a seed and check every promise; with `replay`, play it twice and compare."""
    trial = random_trial(seed)
    record = play(trial)
    broken = broken_promises(trial, record)
    if replay:
        differs = replay_differs(record, play(trial))
        broken += [differs] if differs is not None else []
    return trial, record, broken


def check_cluster(seed: int) -> tuple[Tally, list[Broken]]:
    """Play the plan of a seed and check the promises."""
    plan = random_plan(seed)
    with quiet(), Cluster(plan) as cluster:
        done_at = cluster.run(plan.quiet_at() + ALLOWED_S)
    broken = [Broken("P3", problem) for server in cluster.servers.values() for problem in server.broken[:3]]
    broken += [Broken("P1", failed) for worker in cluster.workers for failed in worker.failed[:3]]
    if unfinished := cluster.unfinished():
        broken.append(Broken("liveness", f"{unfinished} requests wait {ALLOWED_S:.0f} s after the last fault"))
    counts = {
        "requests": sum(len(server.came_from) for server in cluster.servers.values()),
        "reports to keepers": sum(worker.reports for worker in cluster.workers),
        "keepers": len(cluster.keepers),
    }
    seen = [done_at, counts, [server.came_from for server in cluster.servers.values()]]
    return Tally(1, Counter(counts), done_at, _fingerprint(f"{seed} {seen}")), broken


def soak(first: int, last: int, *, cluster: bool = False) -> Tally:
    """Play the trials or the clusters of the seeds from `first` to before `last` in this process."""
    tally = Tally()
    for seed in range(first, last):
        try:
            one, broken = check_cluster(seed) if cluster else _check_trial(seed)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{error!r} in {where.name} ({os.path.basename(where.filename)}:{where.lineno})"
            broken = [Broken("the simulation itself", said)]
        else:
            tally.add(one)
        if broken:
            lines = [f"seed {seed} broke {one}" for one in broken]
            what = random_plan(seed) if cluster else random_trial(seed)
            lines += [f"  replay: {replay_command(seed, cluster=cluster)}", what.describe()]
            tally.findings[seed] = "\n".join(lines)
    return tally


def shards(first: int, last: int, size: int = SHARD) -> list[tuple[int, int]]:
    """The seeds from `first` to before `last` in ranges of at most `size`."""
    return list(pairwise([*range(first, last, size), last]))


def _check_trial(seed: int) -> tuple[Tally, list[Broken]]:
    trial, record, broken = check(seed, replay=seed % REPLAY_EVERY == 0)
    counts = Counter(samples=sum(1 for _ in trial.samples()))
    counts.update(_ending(given.outcome) for given in record.given())
    counts.update(
        attempts=len(record.sent),
        hedges=hedges_of(record),
        throttled=sum(sent.ending == "throttled" for sent in record.sent),
    )
    return Tally(1, counts, record.ended_at, _fingerprint(f"{trial.seed} {record.text()}")), broken


def _ending(outcome: Outcome | None) -> str:
    if outcome is None:
        return "cancelled by their callers"
    if outcome.failure is None:
        return "scored"
    return f"{'failed' if outcome.reward is None else 'got a floor'}: {outcome.failure.label}"


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


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
    """Play the seeds in `jobs` processes, until they run out or some broke a promise."""
    tally, started_at = Tally(), time.monotonic()
    with process_pool(options.jobs) as processes:
        try:
            playing = [processes.submit(soak, *shard, cluster=options.cluster) for shard in shards(*options.seeds)]
            for done in as_completed(playing):
                soaked = done.result()
                tally.add(soaked)
                if soaked.findings:
                    print(f"{soaked.describe()}\n", flush=True)
                if len(tally.findings) >= _MOST_FINDINGS:
                    break
        finally:
            terminate(processes)
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
    from .__main__ import main as main_of_module

    # The processes of a soak find its functions under the name of the module only.
    sys.exit(main_of_module())
