"""The lines about the judges: their configuration, keys and devices, a judged sample, and what a step of them costs."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataset.formats import Task

from qreward_plugins import RewardEngine, Sample, Scored
from qreward_plugins.cli.training_lines import cautions, thinking
from qreward_plugins.config import Config
from qreward_plugins.config.load import colocated_sources, with_framework
from qreward_plugins.errors import InputError, QRewardError
from qreward_plugins.planning import Assumptions, Lengths, plan

from .lines import Line, check
from .machine import variables_line

FRAMEWORK = "framework://"
_CHECK_S = 900.0
"""Longest wait for `qreward check`, which may start servers."""
_PLANNED_MOST = 4096
"""A larger step is planned with so many samples, and its time scaled up."""
_TAIL_CHARS = 300
_FASTEST = 100.0
"""Tokens a second that no large model gives each request of a full batch."""
_TOKENS_A_SECOND = 30.0
"""What a full batch leaves each request, for a plan without a measurement."""


_SHARES: Mapping[str | None, tuple[str, float | None]] = {
    "vllm": ("gpu_memory_utilization", 0.9),
    "sglang": ("mem_fraction_static", None),
}
"""The argument of a server that says which share of a GPU's memory it takes, and its default; None: it computes one."""
_MOST_MEMORY = 0.95
"""The share of a GPU's memory that servers may take together. CUDA itself needs some."""


@dataclass(frozen=True)
class Times:
    """What a plan assumes: seconds of a request by source, and tokens of a verdict. None: the planner's default."""

    latency_s: Mapping[str, float]
    verdict_tokens: float | None
    origin: str


@dataclass(frozen=True)
class Step:
    """What a training asks its judges for. Lengths are tokens."""

    samples: int
    steps: int | None
    """Steps of the whole training; None if it is not known."""
    most_response_tokens: int
    prompt_tokens: int | None = None


def judge_lines(config: Config, file: Path | None, task: Task | None, step: Step, *, ask: bool) -> list[Line]:
    """Check the judges of a training, ask them about one row of its data, and plan a step.

    `file` is the YAML file that `qreward check` gets; None if the tree is in the trainer's own configuration. Without
    `ask`, nothing is sent and no server is started.
    """
    lines = [_summary(config), variables_line(key_variables(config)), *_cautions(config)]
    lines.append(_journal(config))
    inside = [name for name, source in config.sources.items() if any(map(_is_inside, source_urls(source)))]
    assumptions = _assumed(config)
    if inside:
        found = f"the server of {', '.join(inside)} runs inside the training only"
        lines.append(Line("judged sample", "skipped", found))
    elif not ask:
        lines.append(Line("judged sample", "skipped", "--offline: nothing was sent"))
    elif task is None:
        lines.append(Line("judged sample", "skipped", "there is no row to judge"))
    else:
        asked, measured = asyncio.run(_asked(config, file, sample_of(task)))
        lines += asked
        assumptions = measured or assumptions
    lines.append(_plan(config, step, assumptions))
    return lines


def sample_of(task: Task) -> Sample:
    """A sample whose response is right: the worked solution, or the reference answer."""
    response = (
        f"{task.solution}\nThe answer is {task.reference}." if task.solution else f"The answer is {task.reference}."
    )
    return Sample(
        messages=[dict(message) for message in task.messages],
        response=response,
        ground_truth=task.reference,
        data_source=task.source,
    )


def source_urls(source: Any) -> Sequence[str]:
    """The URLs of a source; none for a function."""
    return tuple(getattr(source, "urls", ()))


def _is_inside(url: str) -> bool:
    return url.startswith(FRAMEWORK)


def key_variables(config: Config) -> Iterator[str]:
    """The variables that hold the keys of the sources."""
    for source in config.sources.values():
        named = getattr(source, "api_key_env", None) or ()
        yield from (named,) if isinstance(named, str) else named


def judge_devices(config: Config) -> Iterator[int]:
    """The devices that sources of kind `replicas` name for themselves, and not to share them with the trainer."""
    for source in config.sources.values():
        if source.kind == "replicas" and not getattr(source, "colocated", False):
            yield from (device for device in getattr(source, "devices", None) or () if isinstance(device, int))


def sleeping_lines(config: Config, problem: str, *, engine_share: float | None, key: str) -> Iterator[Line]:
    """Whether servers of `colocated: true` can use the trainer's GPUs. `problem`: why they cannot sleep meanwhile;
    "" if they can. `engine_share`: the share of each GPU's memory that the inference engine takes, by its key `key`.
    """
    names = colocated_sources(config)
    if names and problem:
        yield Line("sleeping judge", "FAIL", problem, "give the judge devices of its own, and remove `colocated`")
        return
    shares = {name: share for name in names if (share := _share(config.sources[name])) is not None}
    for name in names:
        devices: set[Any] = set(config.sources[name].devices or ())
        beside = {key: engine_share} if engine_share is not None else {}
        for other, share in shares.items():
            if other != name and not devices.isdisjoint(config.sources[other].devices or ()):
                beside[f"source {other}"] = share
        found = f"{name} sleeps while the trainer trains"
        if name not in shares or not beside:
            yield Line("sleeping judge", "ok", found)
            continue
        argument = _SHARES[config.sources[name].server][0]
        others = " and ".join(f"{share:g} of {whose}" for whose, share in beside.items())
        found = f"{found}; {argument} {shares[name]:g}, beside {others}"
        if shares[name] + sum(beside.values()) > _MOST_MEMORY:
            yield Line("sleeping judge", "FAIL", f"{found}: all are in memory while responses are generated",
                       f"lower one of them, to {_MOST_MEMORY:g} together")  # fmt: skip
        else:
            yield Line("sleeping judge", "ok", found)


def _share(source: Any) -> float | None:
    """The share of a GPU's memory that a server takes; None if it is not known."""
    argument, default = _SHARES.get(source.server, ("", None))
    try:
        return float(source.arguments.get(argument, default))
    except (TypeError, ValueError):
        return None


def _summary(config: Config) -> Line:
    sources = ", ".join(f"{name} ({source.kind})" for name, source in config.sources.items())
    judges = ", ".join(f"{name} ({judge.kind})" for name, judge in config.judges.items())
    return Line("judges", "ok", f"sources {sources}; judges {judges}; failed samples: {config.on_failure}")


def _cautions(config: Config) -> Iterator[Line]:
    found = list(cautions(config))
    yield from (Line("cautions", "FAIL", each) for each in found)
    if not found:
        limits = f"a sample has {config.engine.deadline_s:g} s, no try may take longer, and thoughts have their tokens"
        yield Line("cautions", "ok", limits)
    for judge, source, most in thinking(config):
        tokens, total_s = most or 8192, config.sources[source].timeouts.total_s
        need = f"{judge}: {tokens:,} tokens within {total_s:g} s need {tokens / total_s:.0f} tokens/s of {source}"
        yield Line("thinking", "ok" if tokens / total_s <= _FASTEST else "note", need)


def _assumed(config: Config) -> Times:
    """Thoughts of a quarter of what a judge may write, where it thinks; otherwise what the planner assumes."""
    tokens = {source: (most or 8192) / 4 for _, source, most in thinking(config)}
    latency_s = {source: number / _TOKENS_A_SECOND for source, number in tokens.items()}
    return Times(latency_s, max(tokens.values(), default=None), "assumed")


def _journal(config: Config) -> Line:
    journal = config.engine.journal
    if journal is None:
        return Line("journal", "note", "off: a restart asks for every verdict again", "set engine.journal.path")

    def place() -> str:
        folder = Path(journal.path).parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise NotADirectoryError(f"{folder} is no folder that can be written")
        return f"{journal.path} (of this node; each node keeps its own)"

    return check("journal", place, "make the folder on every node, on a local disk, or set QREWARD_JOURNAL")


async def _asked(config: Config, file: Path | None, sample: Sample) -> tuple[list[Line], Times | None]:
    """Run `qreward check` with the sample, then judge it as a training would."""
    checked = await _checked(file, sample)
    if checked.status == "FAIL":
        # The sample would be tried until its deadline.
        return [checked, Line("judged sample", "skipped", "the judges do not answer as they should")], None
    # As in the check: no journal of a run is filled, and no limits are shared with one.
    engine = config.engine.model_copy(update={"journal": None, "shared": "off"})
    try:
        async with RewardEngine(config.model_copy(update={"engine": engine})) as running:
            outcome = await running.score(sample)
    except QRewardError as error:
        return [checked, Line("judged sample", "FAIL", str(error), "run `qreward check` by hand")], None
    if not isinstance(outcome, Scored):
        found = f"{outcome.cause.value}/{outcome.reason}: {outcome.detail}"
        return [checked, Line("judged sample", "FAIL", found, "run `qreward check` by hand")], None
    verdict = outcome.verdict
    spent = verdict.spent
    tokens = spent.usage.prompt_tokens + spent.usage.completion_tokens
    found = f"a right answer got {verdict.score:.3g}, in {spent.latency_s:.1f} s with {tokens:,} tokens"
    measured = None
    if verdict.source in config.sources and verdict.service_s > 0:
        latency_s = {verdict.source: max(0.001, verdict.service_s)}
        measured = Times(latency_s, float(spent.usage.completion_tokens) or None, "measured just now")
    return [checked, Line("judged sample", "ok", found)], measured


async def _checked(file: Path | None, sample: Sample) -> Line:
    if file is None:
        return Line("qreward check", "skipped", "the judges are in the trainer's configuration, not in a file")
    row = {
        "messages": [dict(message) for message in sample.messages],
        "response": sample.response,
        "ground_truth": sample.ground_truth,
        "data_source": sample.data_source,
    }
    with tempfile.TemporaryDirectory() as folder:
        rollouts = Path(folder) / "row.jsonl"
        rollouts.write_text(json.dumps(row) + "\n")
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "qreward_plugins.cli", "check", str(file), "--rollouts", str(rollouts)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await asyncio.wait_for(process.communicate(), _CHECK_S)
        except (TimeoutError, asyncio.TimeoutError):
            process.kill()
            await process.wait()
            return Line("qreward check", "FAIL", f"did not end within {_CHECK_S:g} s", f"qreward check {file}")
    if process.returncode == 0:
        return Line("qreward check", "ok", f"{file}: every source answers and can judge")
    tail = " ".join(output.decode(errors="replace").split())[-_TAIL_CHARS:]
    return Line("qreward check", "FAIL", f"... {tail}", f"qreward check {file}")


def _plan(config: Config, step: Step, times: Times) -> Line:
    names = {url.removeprefix(FRAMEWORK).partition("/")[0]
             for source in config.sources.values() for url in source_urls(source) if _is_inside(url)}  # fmt: skip

    def planned() -> str | Line:
        # A plan opens the sources, and sends nothing.
        known = with_framework(config, dict.fromkeys(names, "http://127.0.0.1:9"), framework="the training")
        samples = min(step.samples, _PLANNED_MOST)
        mean = max(1, step.most_response_tokens // 2)
        assumptions = Assumptions(
            latency_s=dict(times.latency_s),
            verdict_tokens=times.verdict_tokens,
            prompt_tokens=step.prompt_tokens or Assumptions.prompt_tokens,
        )
        lengths = Lengths(mean, 0.6)
        try:
            found = plan(known, samples=samples, lengths=lengths, assumptions=assumptions, seeds=1, advise=False)
        except InputError as error:
            # A judge may need more of a row than a length, which is no fault of the training.
            return Line("plan", "skipped", f"{error}", "qreward plan FILE --samples N --tokens file:ROLLOUTS.jsonl")
        scale = step.samples / samples
        parts = [f"{step.samples:,} samples of a step need about {found.step_s.p50 * scale:.0f} s of judging"]
        parts.append(f"waits for {found.bottleneck.describes}")
        if found.cost_usd is not None:
            usd = found.cost_usd.p50 * scale
            whole = f", ${usd * step.steps:,.0f} for {step.steps:,} steps" if step.steps else ""
            parts.append(f"${usd:.2f} a step{whole}")
        if found.late:
            parts.append(f"{found.late:.0%} of the samples come after the deadline")
        parts.append(f"responses of {mean:,} tokens assumed, latencies {times.origin}")
        text = "; ".join(parts)
        if found.late > 0.01:
            remedy = "add sources, or raise limits or engine.deadline_s; qreward plan says what helps"
            return Line("plan", "FAIL", text, remedy)
        return text

    return check("plan", planned, "qreward plan FILE --samples N")
