"""How long a batch takes, compared with the shortest possible time: this project and its peers, in virtual time.

Every policy runs its own code on simulated servers (`qreward_plugins.simulation`); only the network and the clock are
replaced, so that an hour of waiting takes seconds and every policy gets the same random numbers. The result is makespan
over bound: the time until the last sample has its score, over the shortest time that is possible if everything is known
in advance. The bound ignores noise and lost work, so 1.0 is not always reachable, and luck can beat it.

    python bench/makespan.py [--samples 512 2048 4096] [--seeds 20] [--scenarios NAME ...] [--policies NAME ...]
                             [--jobs 2] [--json FILE] [--plot FILE]
    python bench/makespan.py --faults [--samples 256] [--seeds 20]       # a second table: this project at single faults

Install the peers: `pip install -r bench/requirements.txt`. Missing ones are left
out. The same seeds give the same numbers.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import logging
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import warnings
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import common
from peers import POLICIES, Policy, clock
from peers.results import CAP_S, Run, mean, ratio_to
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from qreward_plugins import RewardEngine, Scored
from qreward_plugins.simulation import FAULTS, SCENARIOS, scenario
from qreward_plugins.simulation import run as in_virtual_time

FIRST_SEED = 5000
"""Seeds that nothing was tuned on."""

COLD = "ours"


class Chunk(NamedTuple):
    """What one process does: it imports one policy, and runs nothing else."""

    policy: str
    scenario: str
    samples: int
    seeds: tuple[int, ...]


def missing(policy: Policy) -> str:
    """Why a policy cannot run here; "" if it can."""
    top = policy.imports.partition(".")[0]
    return "" if importlib.util.find_spec(top) else f"{policy.package} is not installed"


def chunks(policies: Iterable[str], scenarios: Iterable[str], samples: Iterable[int], seeds: int) -> list[Chunk]:
    """All the work, the largest batches first."""
    numbers = tuple(range(FIRST_SEED, FIRST_SEED + seeds))
    work = [Chunk(p, s, n, numbers) for n in samples for s in scenarios for p in policies]
    return sorted(work, key=lambda chunk: -chunk.samples)


_done: Any = None


def _start_worker(done: Any) -> None:
    global _done
    _done = done
    clock.install()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)


def _work(chunk: Chunk) -> list[Run]:
    from peers.running import run

    results = []
    for seed in chunk.seeds:
        results.append(run(chunk.policy, chunk.scenario, chunk.samples, seed))
        if _done is not None:
            _done.put(1)
    return results


def measure(work: Sequence[Chunk], jobs: int, console: Console) -> list[Run]:
    """All runs, each chunk in a fresh process: what a peer keeps in globals goes no further than its own runs."""
    # Sets of strings must have the same order in all processes, or the same seed would not give the same numbers.
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    done = context.SimpleQueue()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    results: list[Run] = []
    with (
        Progress(*columns, console=console) as progress,
        context.Pool(jobs, _start_worker, (done,), maxtasksperchild=1) as pool,
    ):
        task = progress.add_task("runs", total=sum(len(chunk.seeds) for chunk in work))

        def count() -> None:
            while done.get():
                progress.advance(task)

        counter = threading.Thread(target=count)
        counter.start()
        try:
            for runs in pool.imap_unordered(_work, work):
                results.extend(runs)
        finally:
            done.put(0)
            counter.join()
    return sorted(results, key=lambda run: (run.samples, run.scenario, run.policy, run.seed))


def show(runs: Sequence[Run], console: Console) -> None:
    """A table for each number of samples."""
    policies = [name for name in POLICIES if any(run.policy == name for run in runs)]
    for samples in sorted({run.samples for run in runs}):
        of_size = [run for run in runs if run.samples == samples]
        scenarios = [name for name in SCENARIOS if any(run.scenario == name for run in of_size)]
        seeds = len({run.seed for run in of_size})
        title = f"Makespan / bound of {samples} samples (1 is the best; mean of {seeds} seeds)"
        table = common.table("scenario", "bound", *policies, title=title)
        for name in scenarios:
            rows = [run for run in of_size if run.scenario == name]
            bound_s = statistics.fmean(run.bound_s for run in rows)
            cells = [_number(mean(run.ratio for run in rows if run.policy == policy)) for policy in policies]
            table.add_row(name, f"{bound_s:.0f} s", *cells)
        table.add_section()
        by_policy = {name: [run for run in of_size if run.policy == name] for name in policies}
        ratios = {name: mean(run.ratio for run in rows) for name, rows in by_policy.items()}
        table.add_row("[bold]mean", "", *(f"[bold]{_number(ratio)}" for ratio in ratios.values()))
        if COLD in policies:
            table.add_row("times ours", "", *(_number(ratio_to(by_policy[COLD], rows)) for rows in by_policy.values()))
        table.add_section()
        for title, cell in _SMALL_PRINT.items():
            table.add_row(title, "", *(cell(rows) for rows in by_policy.values()))
        console.print(table)


class FaultRun(NamedTuple):
    """How this project's engine fared in one of `FAULTS`."""

    makespan_s: float
    bound_s: float
    failed: int
    """Samples without a score."""
    requests: int


def at_fault(name: str, samples: int, seed: int) -> FaultRun:
    """One batch of a fresh engine. The same arguments give the same numbers."""
    made = scenario(name, samples=samples, seed=seed)
    servers = made.sources()

    async def main() -> tuple[int, float]:
        async with RewardEngine(made.config(), sources=servers) as engine:
            outcomes = await engine.score_all(made.samples())
            failed = sum(not isinstance(outcome, Scored) for outcome in outcomes)
            return failed, asyncio.get_running_loop().time()

    failed, makespan_s = in_virtual_time(main())
    return FaultRun(makespan_s, made.bound_s(), failed, sum(server.sent for server in servers.values()))


def show_faults(samples: int, seeds: int, console: Console) -> None:
    """The table of `FAULTS`."""
    title = f"A batch of {samples} at single faults (mean of {seeds} seeds; requests: of a sample)"
    table = common.table("scenario", "bound", "makespan", "failed", "requests", "what fails", title=title)
    for name in FAULTS:
        runs = [at_fault(name, samples, seed) for seed in range(FIRST_SEED, FIRST_SEED + seeds)]
        makespan_s, bound_s, failed, requests = (statistics.fmean(numbers) for numbers in zip(*runs, strict=True))
        numbers = (f"{bound_s:.0f} s", f"{makespan_s:.1f} s", f"{failed:.1f}", f"{requests / samples:.2f}")
        table.add_row(name, *numbers, scenario(name, samples=1).title)
    console.print(table)


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _per_sample(rows: Sequence[Run], number: str) -> str:
    return f"{sum(getattr(run, number) for run in rows) / sum(run.samples for run in rows):.3f}"


_SMALL_PRINT = {
    "calls a sample": lambda rows: _per_sample(rows, "calls"),
    "over a known limit, a sample": lambda rows: _per_sample(rows, "violations"),
    "over an untold limit, a sample": lambda rows: _per_sample(rows, "surprises"),
    "given up, of 1000": lambda rows: f"{1000 * sum(r.given_up for r in rows) / sum(r.samples for r in rows):.1f}",
    "without a score": lambda rows: str(sum(run.unscored for run in rows)),
    f"stopped at {CAP_S:.0f} s": lambda rows: f"{sum(run.makespan_s >= CAP_S for run in rows)} of {len(rows)}",
}


def explain(console: Console, skipped: Mapping[str, str]) -> None:
    """What the small print means."""
    console.print(
        "over a limit: requests that a server refused because a limit was spent, one that it declares (known) or one "
        "that it tells nobody of (untold). given up: samples that a policy ended without a score; they are handed in "
        f"again, until all have one or {CAP_S:.0f} virtual seconds are over. ours: a fresh engine; ours-warm: its "
        "second batch, after a rest. --configurations says how each policy is set."
    )
    for name, reason in skipped.items():
        console.print(f"left out: {name} ({reason})")


def configuration_of(policy: Policy) -> dict[str, str]:
    """How a policy is set, in words, and its version."""
    module = importlib.import_module(f"peers.{policy.module}")
    try:
        version = metadata.version(policy.package)
    except metadata.PackageNotFoundError:
        version = "(source tree)"
    about = " ".join((inspect.getdoc(module) or "").split())
    return {
        "title": policy.title,
        "version": version,
        "about": about,
        "set": " ".join(inspect.getdoc(module.Peer).split()),
    }


def show_configurations(policies: Iterable[str], console: Console) -> None:
    for name in policies:
        said = configuration_of(POLICIES[name])
        console.print(f"[bold]{name}[/]: {said['title']} {said['version']}. {said['about']}\n{said['set']}\n")


def as_json(runs: Sequence[Run], policies: Sequence[str]) -> dict[str, Any]:
    """Every run, and how each policy was set."""
    summary = []
    for samples in sorted({run.samples for run in runs}):
        for name in policies:
            rows = [run for run in runs if run.samples == samples and run.policy == name]
            if rows:
                summary.append({"policy": name, "samples": samples, "ratio": mean(run.ratio for run in rows)})
    return {
        "unit": "virtual seconds; ratio: makespan over bound",
        "stopped_at_s": CAP_S,
        "python": platform.python_version(),
        "scenarios": {name: scenario(name, samples=1).title for name in SCENARIOS},
        "policies": {name: configuration_of(POLICIES[name]) for name in policies},
        "summary": summary,
        "runs": [run.as_json() for run in runs],
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--samples", type=int, nargs="+", default=[512, 2048, 4096], metavar="N")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="runs of each kind (default: 20)")
    parser.add_argument("--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), metavar="NAME", help=", ".join(POLICIES))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes at once")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the table to FILE (wants matplotlib)")
    parser.add_argument("--faults", action="store_true", help="this project at single faults, instead of the scenarios")
    parser.add_argument("--configurations", action="store_true", help="say how each policy is set, and run nothing")
    options = parser.parse_args()
    if min(options.samples) < 1 or options.seeds < 1 or options.jobs < 1:
        parser.error("--samples, --seeds and --jobs are at least 1")
    reasons = {name: missing(POLICIES[name]) for name in options.policies or POLICIES}
    skipped = {name: reason for name, reason in reasons.items() if reason}
    if options.policies and skipped:
        sys.exit("; ".join(f"{name}: {reason}" for name, reason in skipped.items()) + "; see bench/requirements.txt")
    policies = [name for name in reasons if name not in skipped]
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    if options.faults:
        logging.disable(logging.CRITICAL)
        for samples in options.samples:
            show_faults(samples, options.seeds, console)
        return
    clock.install()
    if options.configurations:
        show_configurations(policies, console)
        return
    if options.plot:
        from peers.plot import draw  # before the hours of work, not after them
    work = chunks(policies, options.scenarios, options.samples, options.seeds)
    runs = measure(work, options.jobs, console)
    show(runs, console)
    explain(console, skipped)
    common.write(options.json, as_json(runs, policies))
    if options.plot:
        draw(runs, options.plot)


if __name__ == "__main__":
    main()
