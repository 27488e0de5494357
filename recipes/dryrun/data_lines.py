"""The lines about the data sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dataset.checks import Report, check, load_tokenizer
from dataset.files import DataError

from .lines import Line
from .machine import local_model


def tokenizer_of(model: str) -> Any:
    """The tokenizer of a model that is on this machine, else None."""
    if local_model(model) is None:
        return None
    try:
        return load_tokenizer(model)
    except DataError:
        return None


def data_lines(
    framework: str,
    train: Sequence[str | Path],
    val: Sequence[str | Path],
    *,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    tags: frozenset[str] | None = None,
) -> tuple[list[Line], list[Report]]:
    """Check the files for training and validation. Returns the lines, and the reports of the training files."""
    lines: list[Line] = []
    reports: dict[str, list[Report]] = {"training": [], "validation": []}
    for split, paths in (("training", train), ("validation", val)):
        for path in paths:
            try:
                report = check(framework, Path(path), tokenizer=tokenizer, max_tokens=max_tokens, tags=tags)
            except DataError as error:
                remedy = f"make it: python recipes/prepare_data.py {framework} --from ... --to {path}"
                lines.append(Line(f"{split} data", "FAIL", str(error), remedy))
                continue
            reports[split].append(report)
            lines.append(_line(framework, split, report))
    trained = {task.key for report in reports["training"] for task in report.tasks}
    shared = sum(task.key in trained for report in reports["validation"] for task in report.tasks)
    if shared:
        problem = f"{shared} prompts of the validation are in the training data, too"
        lines.append(Line("data", "note", problem, "validate on prompts that are not trained on"))
    return lines, reports["training"]


def _line(framework: str, split: str, report: Report) -> Line:
    measured = f"of {report.lengths[0]} to {report.lengths[-1]} tokens" if report.lengths else "of unknown length"
    found = f"{report.path}: {len(report.tasks):,} rows, prompts {measured}"
    if report.problems:
        more = f", and {len(report.problems) - 1} more" if len(report.problems) > 1 else ""
        remedy = f"python recipes/prepare_data.py {framework} --check {report.path}"
        return Line(f"{split} data", "FAIL", f"{found}; {report.problems[0]}{more}", remedy)
    if report.notes:
        return Line(f"{split} data", "note", f"{found}; {'; '.join(report.notes)}")
    return Line(f"{split} data", "ok", found)
