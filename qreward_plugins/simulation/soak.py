"""The soak: plays trials on all cores, until one breaks a promise or the seeds run out.

A shard is a range of seeds for one process. Its result is small, so that a hundred thousand trials fit in memory. The
fingerprint of a soak sums the schedules of its trials in any order. Two runs of the same seeds, in other processes or
with other hash seeds, have the same fingerprint, or promise P7 is broken.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import TypeVar

from ..samples import Scored
from .budgets import hedges_of
from .promises import Broken, broken_promises, replay_differs
from .record import Record
from .trial import Trial, random_trial
from .trial_player import play

T = TypeVar("T")

SHARD = 50
"""Seeds of a shard."""
REPLAY_EVERY = 16
"""One trial in this many is played twice."""
_FINGERPRINTS = 2**64


@dataclass
class Tally:
    """The sums over all trials."""

    trials: int = 0
    replayed: int = 0
    samples: int = 0
    scored: int = 0
    attempts: int = 0
    hedges: int = 0
    throttled: int = 0
    floors: Counter[str] = field(default_factory=Counter)
    """Scored samples whose score is a floor, by cause and reason."""
    failures: Counter[str] = field(default_factory=Counter)
    """Failed samples by cause and reason."""
    given_up: int = 0
    """Samples whose callers cancelled, or that a closed engine refused."""
    virtual_s: float = 0.0
    fingerprint: int = 0

    def add(self, other: Tally) -> None:
        """Add another tally to this one."""
        self.trials += other.trials
        self.replayed += other.replayed
        self.samples += other.samples
        self.scored += other.scored
        self.attempts += other.attempts
        self.hedges += other.hedges
        self.throttled += other.throttled
        self.failures += other.failures
        self.floors += other.floors
        self.given_up += other.given_up
        self.virtual_s += other.virtual_s
        self.fingerprint = (self.fingerprint + other.fingerprint) % _FINGERPRINTS

    def count(self, trial: Trial, record: Record) -> None:
        """Add one trial."""
        self.trials += 1
        self.samples += sum(1 for _ in trial.samples())
        self.attempts += len(record.sent)
        self.hedges += hedges_of(record)
        self.throttled += sum(sent.ending == "throttled" for sent in record.sent)
        outcomes = [given.outcome for given in record.given()]
        for outcome in outcomes:
            if isinstance(outcome, Scored):
                self.scored += 1
                if outcome.verdict.failure is not None:
                    self.floors[outcome.verdict.failure.label] += 1
            elif outcome is not None:
                self.failures[outcome.label] += 1
        self.given_up += outcomes.count(None)
        self.virtual_s += record.ended_at
        digest = blake2b(f"{trial.seed} {record.text()}".encode(), digest_size=8).digest()
        self.fingerprint = (self.fingerprint + int.from_bytes(digest, "little")) % _FINGERPRINTS


@dataclass(frozen=True)
class Finding:
    """A seed whose trial broke promises."""

    seed: int
    broken: tuple[Broken, ...]

    def describe(self) -> str:
        """The broken promises, and how to replay the seed."""
        lines = [f"seed {self.seed} broke {broken}" for broken in self.broken]
        return "\n".join([*lines, f"  replay: {replay_command(self.seed)}"])


@dataclass(frozen=True)
class Soaked:
    """The results of a range of seeds."""

    tally: Tally
    findings: tuple[Finding, ...]

    def describe(self, *, most: int = 3) -> str:
        """The first findings with their trials, as text."""
        texts = [f"{finding.describe()}\n{random_trial(finding.seed).describe()}" for finding in self.findings[:most]]
        if len(self.findings) > most:
            texts.append("more seeds: " + ", ".join(str(finding.seed) for finding in self.findings[most:]))
        return "\n\n".join(texts)


def replay_command(seed: int) -> str:
    """The command that replays this seed with its trace."""
    return f"python -m qreward_plugins.simulation --seed {seed} --trace"


def check(seed: int, *, replay: bool = False) -> tuple[Trial, Record, list[Broken]]:
    """Play the trial of a seed and check every promise; with `replay`, play it twice and compare."""
    trial = random_trial(seed)
    record = play(trial, trace=replay)
    broken = broken_promises(trial, record)
    if replay:
        differs = replay_differs(record, play(trial, trace=True))
        broken += [differs] if differs is not None else []
    return trial, record, broken


def soak(first: int, last: int, *, replay_every: int = REPLAY_EVERY) -> Soaked:
    """Play the trials of the seeds from `first` to before `last` in this process."""
    tally, findings = Tally(), []
    for seed in range(first, last):
        replay = seed % replay_every == 0
        try:
            trial, record, broken = check(seed, replay=replay)
        except Exception as error:
            findings.append(Finding(seed, (crashed("the trial itself", error),)))
            continue
        tally.count(trial, record)
        tally.replayed += replay
        if broken:
            findings.append(Finding(seed, tuple(broken)))
    return Soaked(tally, tuple(findings))


def crashed(what: str, error: Exception) -> Broken:
    """A trial or a cluster that raised: the error, and where."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    return Broken(what, f"{error!r} in {where.name} ({os.path.basename(where.filename)}:{where.lineno})")


def shards(first: int, last: int, size: int = SHARD) -> list[tuple[int, int]]:
    """The seeds from `first` to before `last` in ranges of at most `size`."""
    return list(pairwise([*range(first, last, size), last]))


def soak_in_processes(soak: Callable[[int, int], T], first: int, last: int, *, jobs: int) -> Generator[T, None, None]:
    """Play the seeds in `jobs` processes; yield what `soak` returns for each shard. Closing it ends the soak."""
    # Spawned, because forked processes would inherit the state of threads.
    with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as processes:
        running: list[Future[T]] = []
        try:
            running += [processes.submit(soak, *shard) for shard in shards(first, last)]
            for done in as_completed(running):
                yield done.result()
        finally:
            for future in running:
                future.cancel()
