"""The soak: plays trials or clusters on all cores, until some break a promise or the seeds run out.

A shard is a range of seeds for one process. Its result is small, so that a hundred thousand trials fit in memory. The
fingerprint of a soak sums the schedules of its seeds in any order. Two runs of the same seeds, in other processes or
with other hash seeds, have the same fingerprint, or promise P7 is broken.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Generator
from concurrent.futures import as_completed
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from itertools import pairwise

from ..samples import Scored
from ..system.processes import process_pool, terminate
from .cluster import Cluster
from .cluster_plan import ALLOWED_S, random_plan
from .promises import Broken, broken_promises, hedges_of, replay_differs
from .record import Record
from .trial import Trial, random_trial
from .trial_player import play, quiet

SHARD = 50
"""Seeds of a shard."""
REPLAY_EVERY = 16
"""One trial in this many is played twice."""
_FINGERPRINTS = 2**64
_MOST_SAID = 3


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


def soak_in_processes(first: int, last: int, *, jobs: int, cluster: bool = False) -> Generator[Tally, None, None]:
    """Play the seeds in `jobs` processes; yield the results of each shard. Closing it ends the soak."""
    play_shard = partial(soak, cluster=cluster)
    with process_pool(jobs) as processes:
        try:
            for done in as_completed([processes.submit(play_shard, *shard) for shard in shards(first, last)]):
                yield done.result()
        except BaseException:
            terminate(processes)
            raise


def _check_trial(seed: int) -> tuple[Tally, list[Broken]]:
    trial, record, broken = check(seed, replay=seed % REPLAY_EVERY == 0)
    outcomes = [given.outcome for given in record.given()]
    counts = Counter(samples=sum(1 for _ in trial.samples()))
    for outcome in outcomes:
        if isinstance(outcome, Scored):
            counts["scored"] += 1
            if outcome.verdict.failure is not None:
                counts[f"scored with a floor: {outcome.verdict.failure.label}"] += 1
        elif outcome is not None:
            counts[f"failed: {outcome.label}"] += 1
    counts["cancelled by their callers"] = outcomes.count(None)
    counts["attempts"] = len(record.sent)
    counts["hedges"] = hedges_of(record)
    counts["throttled"] = sum(sent.ending == "throttled" for sent in record.sent)
    return Tally(1, counts, record.ended_at, _fingerprint(f"{trial.seed} {record.text()}")), broken


def _fingerprint(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
