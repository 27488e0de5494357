"""`make demo`: GRPO with the real verl trainer on this machine's CPU, rewarded through qreward by two judge servers.
`make demo JUDGE=llm`: by a language model in llama.cpp, beside them.

Also: `python recipes/verl/cpu/demo.py [--judge rules|llm] [--algorithm grpo|ppo] [--steps N] [--seed N] [--out DIR]`.
"""

from __future__ import annotations

import argparse
import signal
import sqlite3
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from llama_server import MODEL, served
from omegaconf import OmegaConf
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from scorer import score
from tasks import Assets, Sizes, prepare
from training import Step, Training, TrainingFailed, train

from qreward_plugins.testing import Faults, JudgeServerProcess, Latency, Report, ServerLimits

FLAKY = {"error_500": 0.04, "reset": 0.03, "error_429_seconds": 0.003, "truncated_json": 0.02, "wrong_nonce": 0.02}
"""Shares of the slow judge's answers that are faults."""


LIMITS = {
    "fast": ServerLimits(requests_per_minute=600, concurrency=16),
    "slow": ServerLimits(requests_per_minute=1800, concurrency=32),
}
"""What the judges enforce; judges.yaml declares the same."""


CONFIGURATIONS = {"rules": "judges.yaml", "llm": "judges_llm.yaml"}
STEPS = {"rules": 25, "llm": 12}
WHO = {"rules": "two judges", "llm": "a language model"}


def servers() -> dict[str, JudgeServerProcess]:
    """The two judges, each in its own process."""
    fast = Latency(median_s=0.05, sigma=0.3)
    slow = Latency(median_s=0.2, sigma=0.4, stragglers=0.005)
    return {
        "fast": JudgeServerProcess(score, limits=LIMITS["fast"], latency=fast, seed=1),
        "slow": JudgeServerProcess(score, limits=LIMITS["slow"], latency=slow, faults=Faults(rates=FLAKY), seed=2),
    }


def main() -> int:
    """Run the demo; the exit code is 0 when it trained and no limit was broken."""
    parser = argparse.ArgumentParser(description="Train a tiny model on the CPU, rewarded by two judge servers.")
    parser.add_argument("--algorithm", choices=("grpo", "ppo"), default="grpo")
    parser.add_argument("--judge", choices=("rules", "llm"), default="rules", help="who judges (default: rules)")
    parser.add_argument("--steps", type=int, help="training steps (default: 25; with a language model 12)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the questions and the model (default: 0)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for logs and the plot (default: demo)")
    options = parser.parse_args()
    steps_wanted: int = options.steps or STEPS[options.judge]
    console = Console()
    started = time.monotonic()

    def phase(text: str) -> None:
        console.print(f"[{time.monotonic() - started:4.0f} s] {text}", markup=False, highlight=False)

    # A default SIGTERM would leave the trainer and the judges running.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    journal = out / f"{options.algorithm}.journal"

    phase("1/4 making the questions, and a tiny model that can guess sums")
    assets = prepare(out / "assets", Sizes(seed=options.seed))
    phase("2/4 starting two judge servers" + (f" and {MODEL} in llama.cpp" if options.judge == "llm" else ""))
    judges = servers()
    with ExitStack() as stack:
        for server in judges.values():
            stack.enter_context(server)
        environment = {
            "QREWARD_JOURNAL": str(journal),
            **{f"{name.upper()}_JUDGE_URL": server.base_url for name, server in judges.items()},
        }
        if options.judge == "llm":
            try:
                environment["LLM_JUDGE_URL"] = stack.enter_context(served(out / "llama.log"))
            except RuntimeError as error:
                console.print(f"[red]{escape(str(error))}[/red]", highlight=False)
                return 1
        config = _written(environment, Path(__file__).resolve().with_name(CONFIGURATIONS[options.judge]), out)
        environment["QREWARD_CONFIG"] = str(config)
        plot = out / "reward.png"
        for leftover in (*out.glob(f"{journal.name}*"), plot):  # of the last run
            leftover.unlink(missing_ok=True)
        phase("3/4 starting Ray and verl, then one validation (the longest phase)")
        try:
            training = _train(assets, out, options.algorithm, steps_wanted, environment, console)
        except TrainingFailed as error:
            console.print(f"[red]the training failed:[/red]\n{escape(str(error))}", highlight=False)
            return 1
        reports = {name: server.report() for name, server in judges.items()}
    phase("4/4 done; the servers are stopped")
    verdicts, failed = _read_journal(journal)
    console.print(_source_table(reports, verdicts))
    steps = training.steps
    console.print(_limits_kept(reports, _workers()), highlight=False)
    console.print(_step_table(steps))
    _plot(
        steps, plot, f"{options.algorithm.upper()} with verl on a CPU, rewarded by {WHO[options.judge]} through qreward"
    )
    violations = sum(report.violations_total for report in reports.values())
    first, last = _mean(steps[:3]), _mean(steps[-3:])
    console.print(
        f"Mean reward {first:.2f} -> {last:.2f} (first and last three steps); right answers to held-out questions "
        f"{training.accuracy_before:.0%} -> {training.accuracy_after:.0%}. {sum(verdicts.values())} verdicts, {failed} "
        f"samples without one, {violations} limit violations, {time.monotonic() - started:.0f} s.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_look_at(plot, journal, config, options.judge), markup=False, highlight=False, soft_wrap=True)
    return 0 if violations == 0 else 1


def _written(environment: Mapping[str, str], template: Path, out: Path) -> Path:
    """Write the configuration of this run with its addresses, so that `qreward plan` can read it afterwards."""
    text = template.read_text()
    for name, value in environment.items():
        text = text.replace(f"${{oc.env:{name}}}", value)
    path = out / "judges.yaml"
    path.write_text(text)
    return path


def _look_at(plot: Path, journal: Path, config: Path, judge: str) -> str:
    """What to look at after the run, as commands that work in this folder."""
    here = Path.cwd()
    plot, journal, config = (
        path.relative_to(here) if path.is_relative_to(here) else path for path in (plot, journal, config)
    )
    qreward = Path(sys.executable).with_name("qreward")
    qreward = qreward.relative_to(here) if qreward.is_relative_to(here) else qreward
    look = {
        "the reward, step by step": f"{plot}",
        "what the judges said": f"{qreward} journal {journal}",
        "why a sample got so low a reward": f"{qreward} why {journal} --worst",
        "all of that in the browser": f"{qreward} ui {journal}",
    }
    if judge == "llm":
        both = "--judge language_model --other-judge rule --at 0.54"
        look["where the model and the rule differ"] = f"{qreward} diff {journal} {journal} {both}"
    else:
        # A plan makes responses up, and in those the language model finds no answer to ask about.
        look["what a larger step would cost"] = f"{qreward} plan {config} --samples 1024 --seeds 2"
    lines = [f"{number}. {what + ':':<36} {where}" for number, (what, where) in enumerate(look.items(), 1)]
    return "\n".join(["What to look at:", *lines])


def _train(
    assets: Assets, out: Path, algorithm: str, steps: int, environment: Mapping[str, str], console: Console
) -> Training:
    progress = Progress(
        TextColumn(algorithm.upper()),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps, {task.fields[note]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )
    with progress:
        task = progress.add_task(algorithm, total=steps, note="starting Ray and verl ...")

        def on_step(step: Step) -> None:
            progress.update(task, completed=step.number, note=f"reward {step.reward:.2f}")
            line = f"step {step.number}/{steps}: reward {step.reward:.2f}, {step.seconds:.1f} s"
            console.print(line, highlight=False)

        return train(assets, out, algorithm=algorithm, steps=steps, environment=environment, on_step=on_step)


def _read_journal(path: Path) -> tuple[dict[str, int], int]:
    """Verdicts by source, and the number of samples without a reward. Those that the floor got have one."""
    connection = sqlite3.connect(path)
    try:
        scored = connection.execute(
            "SELECT source, count(*) FROM outcomes WHERE outcome = 'scored' AND cached = 0 GROUP BY source"
        )
        failed = connection.execute("SELECT count(*) FROM outcomes WHERE outcome != 'scored' AND cause != 'policy'")
        return dict(scored.fetchall()), int(failed.fetchone()[0])
    finally:
        connection.close()


def _source_table(reports: Mapping[str, Report], verdicts: Mapping[str, int]) -> Table:
    table = Table(title="what the judge servers saw", box=box.SIMPLE, pad_edge=False)
    for column in ("source", "requests", "retries", "429s", "p50 / p95", "tokens", "violations"):
        table.add_column(column, no_wrap=True, justify="left" if column == "source" else "right")
    for name, report in reports.items():
        table.add_row(
            name,
            str(report.requests),
            str(report.requests - verdicts.get(name, 0)),
            str(report.throttled),
            f"{report.latency_p50_s or 0:.2f} / {report.latency_p95_s or 0:.2f} s",
            f"{report.prompt_tokens + report.completion_tokens:,}",
            str(report.violations_total),
        )
    return table


def _workers() -> int:
    recipe = OmegaConf.load(Path(__file__).resolve().with_name("cpu.yaml"))
    return int(OmegaConf.select(recipe, "reward.num_workers"))


def _limits_kept(reports: Mapping[str, Report], workers: int) -> str:
    """A line for each source: its limit, and the most requests that it saw from all workers."""
    return "\n".join(
        f"{name}: limit {LIMITS[name].requests_per_minute:.0f}/min, seen at most {report.max_requests_in_window} in any"
        f" minute, over {workers} workers"
        for name, report in reports.items()
    )


def _step_table(steps: Sequence[Step]) -> Table:
    table = Table("steps", "reward", "", "s/step", title="reward per step", box=box.SIMPLE, pad_edge=False)
    size = max(1, len(steps) // 10)
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        bar = "█" * round(30 * _mean(part))
        label = f"{part[0].number}" if len(part) == 1 else f"{part[0].number}-{part[-1].number}"
        table.add_row(label, f"{_mean(part):.2f}", bar, f"{sum(step.seconds for step in part) / len(part):.1f}")
    return table


def _mean(steps: Sequence[Step]) -> float:
    return sum(step.reward for step in steps) / len(steps)


def _plot(steps: Sequence[Step], path: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    numbers = [step.number for step in steps]
    window = 5
    smooth = [_mean(steps[max(0, index + 1 - window) : index + 1]) for index in range(len(steps))]
    axes.plot(numbers, [step.reward for step in steps], "o", markersize=4, alpha=0.5, label="mean reward of a step")
    axes.plot(numbers, smooth, linewidth=2, label=f"mean of the last {window} steps")
    axes.set(xlabel="training step", ylabel="reward (0 to 1)", ylim=(0, 1))
    axes.set_title(title, fontsize="medium")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("stopped")
