"""Checks a data set as its framework will read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .files import DataError, read_rows
from .formats import FORMATS, Task

_SHOWN_CHARS = 600
_SHOWN_PROBLEMS = 5


@dataclass(frozen=True)
class Report:
    """What a check found. `problems` are rows that the framework could not train on; `notes` are worth a look.

    `lengths` are the prompts' lengths in tokens, sorted; empty without a tokenizer.
    """

    path: Path
    tasks: tuple[Task, ...]
    columns: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    lengths: tuple[int, ...] = ()
    rendered: str = field(default="", repr=False)

    @property
    def mean_tokens(self) -> int | None:
        """The mean length of a prompt in tokens, at least 1; None without a tokenizer."""
        return max(1, round(sum(self.lengths) / len(self.lengths))) if self.lengths else None


def check(
    framework: str,
    path: Path,
    *,
    tokenizer: Any = None,
    max_tokens: int | None = None,
    tags: frozenset[str] | None = None,
) -> Report:
    """Check a data set as `framework` will read it.

    `tokenizer` is one of transformers; without it the prompts are not measured. `max_tokens` is the longest prompt that
    the framework keeps. `tags` are those that ROLL's domains include. Raises `DataError` if the file cannot be read.
    """
    rows = read_rows(path)
    if not rows:
        raise DataError(f"{path}: has no rows")
    expected = FORMATS[framework]
    tasks, problems, notes = [], [], []
    for number, row in enumerate(rows, 1):
        missing = [column for column in expected.columns if row.get(column) is None]
        try:
            if missing:
                raise ValueError(f"there is no {' and no '.join(missing)}")
            tasks.append(expected.task(row))
        except (ValueError, TypeError, AttributeError) as error:
            problems.append(f"row {number}: {error}")
    lengths, rendered = _measured(tasks, tokenizer)
    if max_tokens is not None and lengths:
        over = sum(length > max_tokens for length in lengths)
        if over == len(lengths):
            problems.append(f"all prompts are longer than {max_tokens} tokens, so {framework} would keep none")
        elif over:
            notes.append(f"{over} prompts are longer than {max_tokens} tokens, and {framework} leaves them out")
    notes.extend(_repeated(tasks))
    if tags is not None:
        other = sorted({task.source for task in tasks} - tags)
        if other:
            problems.append(f"no domain includes the tag {', '.join(other)}; add it to tag_included")
    return Report(path, tuple(tasks), tuple(rows[0]), tuple(problems), tuple(notes), tuple(sorted(lengths)), rendered)


def _measured(tasks: Sequence[Task], tokenizer: Any) -> tuple[list[int], str]:
    """The lengths of the prompts in tokens, and the first prompt as text."""
    chats = [[dict(message) for message in task.messages] for task in tasks]
    if not chats:
        return [], ""
    if tokenizer is None:
        return [], "\n".join(f"[{message['role']}] {message['content']}" for message in chats[0])
    try:
        texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    # transformers raises ValueError without a template; a template raises what it wants.
    except Exception as error:
        raise DataError(f"the tokenizer cannot render the prompts: {str(error).splitlines()[0][:200]}") from None
    # The template has written the special tokens.
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]], texts[0]


def _repeated(tasks: Sequence[Task]) -> list[str]:
    references: dict[str, set[str]] = {}
    for task in tasks:
        references.setdefault(task.key, set()).add(task.reference)
    notes = []
    if len(references) < len(tasks):
        notes.append(f"{len(tasks) - len(references)} prompts repeat an earlier one")
    differing = sum(len(answers) > 1 for answers in references.values())
    if differing:
        notes.append(f"{differing} prompts have several reference answers that differ")
    return notes


def load_tokenizer(path: str) -> Any:
    """Load a tokenizer from a folder, or from the local cache of the hub. Raises `DataError`."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise DataError("--tokenizer needs transformers: pip install transformers") from None
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except Exception as error:
        # transformers guesses the kind of a folder without a configuration from its name, and then raises anything.
        problem = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(
            f"{path}: there is no tokenizer on this machine ({problem}); download the model first"
        ) from None


def describe(report: Report) -> str:
    """The report as text."""
    lines = [f"{report.path}: {len(report.tasks):,} usable rows; columns: {', '.join(report.columns)}"]
    if report.lengths:
        low, middle, high = report.lengths[0], report.lengths[len(report.lengths) // 2], report.lengths[-1]
        p95 = report.lengths[min(len(report.lengths) - 1, round(0.95 * len(report.lengths)))]
        lines.append(f"prompts: {low} to {high} tokens, median {middle}, 95% up to {p95}")
    else:
        lines.append("prompts: not measured in tokens; name the model's folder with --tokenizer")
    lines.extend(f"note: {note}" for note in report.notes)
    lines.extend(f"problem: {problem}" for problem in report.problems[:_SHOWN_PROBLEMS])
    if len(report.problems) > _SHOWN_PROBLEMS:
        lines.append(f"problem: {len(report.problems) - _SHOWN_PROBLEMS} more rows")
    if report.tasks:
        first = report.tasks[0]
        shown = report.rendered if len(report.rendered) <= _SHOWN_CHARS else report.rendered[:_SHOWN_CHARS] + " ..."
        lines += ["first prompt:", *(f"  {line}" for line in shown.splitlines())]
        lines += [f"its reference: {first.reference[:_SHOWN_CHARS]}", f"its data source: {first.source or 'none'}"]
    return "\n".join(lines)
