#!/usr/bin/env python3
"""Makes the data set of a framework from questions and answers on this machine, and checks it. Downloads nothing.

    python recipes/prepare_data.py verl --from gsm8k/train.jsonl --to data/train.parquet --name gsm8k
    python recipes/prepare_data.py verl --check data/train.parquet --tokenizer /models/Qwen2.5-7B --max-tokens 1024

`--from` takes JSONL or parquet with a column of questions and one of answers. Of an answer with `####`, as in GSM8K,
the reference is what comes after it. What is written is checked at once. A file is written whole or not at all, and an
existing one is replaced only with --overwrite.

Exit codes: 0 the data set can be used; 1 the check found rows that cannot; 2 a file or an option has mistakes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FRAMEWORKS = ("verl", "slime", "roll")
INSTRUCTION = "Think step by step, and end with a line that states the final answer: The answer is ..."
_MARK = "####"
_SHOWN_CHARS = 600
_SHOWN_PROBLEMS = 5


class DataError(Exception):
    """A file or an option has mistakes. The message says where, and what to do."""


@dataclass(frozen=True)
class Task:
    """One row: the prompt's messages, the reference answer, where it comes from, and the worked solution if known."""

    messages: tuple[Mapping[str, str], ...]
    reference: str
    source: str
    solution: str = ""

    @property
    def key(self) -> str:
        """Equal prompts have equal keys."""
        return json.dumps([dict(message) for message in self.messages], sort_keys=True)


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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read all rows of a JSONL or parquet file. Raises `DataError`."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    if not path.is_file():
        raise DataError(f"{path}: there is no such file")
    if path.suffix not in (".jsonl", ".json", ".parquet"):
        raise DataError(f"{path}: must be JSON lines (.jsonl) or parquet (.parquet); convert it first")
    try:
        return _parquet_rows(path) if path.suffix == ".parquet" else list(_json_lines(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from None


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("parquet needs pyarrow: pip install 'qreward-plugins[parquet]'") from None
    return pyarrow


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    pyarrow = _pyarrow()
    try:
        rows: list[dict[str, Any]] = pyarrow.parquet.read_table(path).to_pylist()
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: cannot be read as parquet: {str(error).splitlines()[0]}") from None
    return rows


def _json_lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            try:
                # Files from Windows begin with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    continue
                row = json.loads(text)
            except UnicodeDecodeError:
                raise DataError(f"{where}: is not UTF-8 text; convert the file first (iconv -t UTF-8)") from None
            except json.JSONDecodeError as error:
                problem = f"{error.msg}, at character {error.pos}"
                raise DataError(f"{where}: every line must be one JSON object, and this is none ({problem})") from None
            except RecursionError:
                raise DataError(f"{where}: is nested too deeply") from None
            if not isinstance(row, dict):
                raise DataError(f"{where}: every line must be one JSON object, and this is a {type(row).__name__}")
            yield row


def tasks_from(
    rows: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    question: str,
    answer: str,
    name: str,
    instruction: str,
    skip_bad: bool = False,
) -> tuple[list[Task], int]:
    """Read questions and answers. Returns the tasks, and the number of rows that `skip_bad` left out.

    Raises `DataError` that names the bad rows; with `skip_bad`, only if no row is left.
    """
    found, bad = [], []
    for number, row in enumerate(rows, 1):
        try:
            text, answered = (_column(row, column) for column in (question, answer))
            solution, mark, last = answered.rpartition(_MARK)
            reference = last.strip() if mark else answered
            if not reference:
                raise ValueError(f"nothing comes after {_MARK} in {answer}")
        except ValueError as error:
            bad.append(f"{path}, row {number}: {error}")
            continue
        prompt = f"{text}\n\n{instruction}" if instruction else text
        found.append(Task(({"role": "user", "content": prompt},), reference, name, solution.strip()))
    if not rows:
        raise DataError(f"{path}: has no rows")
    if bad and not (skip_bad and found):
        more = [f"{len(bad) - _SHOWN_PROBLEMS:,} more of {len(rows):,} rows"] if len(bad) > _SHOWN_PROBLEMS else []
        remedy = "correct them, or leave such rows out with --skip-bad" if found else "no row can be used"
        raise DataError("\n".join([*bad[:_SHOWN_PROBLEMS], *more, remedy]))
    return found, len(bad)


def _column(row: Mapping[str, Any], column: str) -> str:
    """The text in a column of a row. Raises ValueError."""
    if column not in row:
        raise ValueError(
            f"there is no column {column!r}, only {', '.join(map(str, row))}; name yours with --question and --answer"
        )
    value = row[column]
    if value is None or (isinstance(value, str) and not value.strip()):
        raise ValueError(f"{column} is empty")
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not isinstance(value, str) and not number:
        raise ValueError(f"{column} must be a text or a number, and is {value!r:.40} ({type(value).__name__})")
    text = str(value).strip()
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column} has a broken character (half of a surrogate pair)") from None
    return text


def _verl_row(task: Task, index: int, split: str) -> dict[str, Any]:
    return {
        "data_source": task.source,
        "prompt": [dict(message) for message in task.messages],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": task.reference},
        "extra_info": {"index": index, "split": split, "solution": task.solution},
    }


def _slime_row(task: Task, index: int, split: str) -> dict[str, Any]:
    about = {"data_source": task.source, "index": index, "split": split, "solution": task.solution}
    return {"prompt": [dict(message) for message in task.messages], "label": task.reference, "metadata": about}


def _roll_row(task: Task, index: int, split: str) -> dict[str, Any]:
    # The columns and types of ROLL's own training files, with which it may be mixed. `tag` chooses the domain.
    return {
        "id": str(index),
        "source": task.source,
        "difficulty": "0",
        "prompt": task.messages[-1]["content"],
        "messages": json.dumps([dict(message) for message in task.messages], ensure_ascii=False),
        "ground_truth": task.reference,
        "case_type": "",
        "test_case_function": "",
        "test_cases": "",
        "tag": task.source,
    }


_ROW: Mapping[str, Callable[[Task, int, str], dict[str, Any]]] = {
    "verl": _verl_row,
    "slime": _slime_row,
    "roll": _roll_row,
}


def write(framework: str, tasks: Sequence[Task], path: Path, split: str, *, overwrite: bool = False) -> None:
    """Write the data set of a framework: parquet for verl, JSONL for slime and ROLL; whole, or not at all.

    Raises `DataError`.
    """
    rows = [_ROW[framework](task, index, split) for index, task in enumerate(tasks)]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if framework == "verl":
                pyarrow = _pyarrow()
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), partial)
            else:
                with partial.open("w", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            refuse_existing(path, overwrite=overwrite)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror or error})") from None


def refuse_existing(path: Path, *, overwrite: bool) -> None:
    """Raise `DataError` for a file that must not be replaced."""
    if path.is_dir():
        raise DataError(f"{path}: is a folder; name a file in it")
    if not overwrite and os.path.lexists(path):
        raise DataError(f"{path}: exists; add --overwrite, or name another file")


def _verl_task(row: Mapping[str, Any]) -> Task:
    graded = row["reward_model"]
    if not isinstance(graded, Mapping) or "ground_truth" not in graded:
        raise ValueError("reward_model has no ground_truth")
    about = row.get("extra_info") or {}
    solution = about.get("solution") or about.get("answer") or ""
    return Task(_messages(row["prompt"]), _text(graded["ground_truth"]), _text(row["data_source"]), str(solution))


def _slime_task(row: Mapping[str, Any]) -> Task:
    about = row.get("metadata") or {}
    if not isinstance(about, Mapping):
        raise ValueError("metadata is no object")
    prompt = row["prompt"]
    # With --apply-chat-template slime makes one message of a plain text.
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else _messages(prompt)
    source = about.get("data_source") or about.get("source_name") or ""
    return Task(messages, _text(row["label"]), str(source), str(about.get("solution") or ""))


def _roll_task(row: Mapping[str, Any]) -> Task:
    messages = row["messages"]
    return Task(
        _messages(json.loads(messages) if isinstance(messages, str) else messages),
        _text(row["ground_truth"]),
        _text(row["tag"]),
    )


_TASK: Mapping[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], Task]]] = {
    # RLHFDataset reads `prompt`; the reward loop reads `data_source` and `reward_model`.
    "verl": (("data_source", "prompt", "reward_model"), _verl_task),
    # slime.utils.data.Dataset with --input-key prompt --label-key label.
    "slime": (("prompt", "label"), _slime_task),
    # get_encode_function reads `messages`, update_dataset_domain reads `tag`, reward workers `id` and `ground_truth`.
    "roll": (("id", "messages", "ground_truth", "tag"), _roll_task),
}
"""For each framework the columns that it reads, and what turns a row into a `Task`."""


def _messages(messages: Any) -> tuple[Mapping[str, str], ...]:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise ValueError("the prompt is no list of messages")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError("a message of the prompt has no role")
        if not isinstance(message.get("content"), str):
            raise ValueError("the content of a message is no text")
    return tuple({"role": message["role"], "content": message["content"]} for message in messages)


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)) or not str(value).strip():
        raise ValueError("the reference answer or the data source is no text, or empty")
    return str(value)


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
    columns, to_task = _TASK[framework]
    tasks, problems, notes = [], [], []
    for number, row in enumerate(rows, 1):
        missing = [column for column in columns if row.get(column) is None]
        try:
            if missing:
                raise ValueError(f"there is no {' and no '.join(missing)}")
            tasks.append(to_task(row))
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
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0]
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


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=FRAMEWORKS)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--from", dest="made_from", type=Path, metavar="FILE", help="questions and answers")
    what.add_argument("--check", type=Path, metavar="FILE", help="check a data set, and write nothing")
    parser.add_argument("--to", type=Path, metavar="FILE", help="what to write: .parquet for verl, otherwise .jsonl")
    parser.add_argument("--overwrite", action="store_true", help="replace what --to names, if it exists")
    parser.add_argument("--question", default="question", help="column of the questions (default: question)")
    parser.add_argument("--answer", default="answer", help="column of the answers (default: answer)")
    parser.add_argument("--skip-bad", action="store_true", help="leave out rows without a question or an answer")
    parser.add_argument(
        "--name", default="", help="data source, or ROLL's tag (default: the name of the file's folder)"
    )
    parser.add_argument("--split", default="train", help="train (default), test ...; recorded in the row")
    parser.add_argument("--instruction", default=INSTRUCTION, help="text after every question; empty for none")
    parser.add_argument("--limit", type=_positive, metavar="N", help="take the first N rows only")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="the model's folder, to measure prompts in tokens")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="longest prompt that the framework keeps")
    asked = parser.parse_args(arguments)
    try:
        if asked.max_tokens and not asked.tokenizer:
            raise DataError("--max-tokens needs --tokenizer, which measures the prompts")
        # Before anything is written.
        tokenizer = load_tokenizer(asked.tokenizer) if asked.tokenizer else None
        left_out = 0
        path = asked.check
        if path is None:
            path, left_out = asked.to, _make(asked)
        report = check(asked.framework, path, tokenizer=tokenizer, max_tokens=asked.max_tokens)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    if left_out:
        report = replace(report, notes=(*report.notes, f"{left_out} rows of {asked.made_from} were left out"))
    try:
        print(describe(report), flush=True)
    except OSError as error:
        # Python would fail again when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            print(f"the report cannot be written ({error.strerror})", file=sys.stderr)
            return 2
    return 1 if report.problems else 0


def _make(asked: argparse.Namespace) -> int:
    """Write the data set, and return the number of rows that were left out. Raises `DataError`."""
    if asked.to is None:
        raise DataError("--from needs --to")
    wanted = ".parquet" if asked.framework == "verl" else ".jsonl"
    if asked.to.suffix != wanted:
        raise DataError(f"{asked.to}: the file for {asked.framework} must end in {wanted}")
    refuse_existing(asked.to, overwrite=asked.overwrite)
    rows = read_rows(asked.made_from)
    if asked.to.exists() and asked.to.samefile(asked.made_from):
        raise DataError(f"{asked.to}: --from and --to are the same file")
    tasks, left_out = tasks_from(
        rows[: asked.limit],
        asked.made_from,
        question=asked.question,
        answer=asked.answer,
        name=asked.name or asked.made_from.resolve().parent.name,
        instruction=asked.instruction,
        skip_bad=asked.skip_bad,
    )
    write(asked.framework, tasks, asked.to, asked.split, overwrite=asked.overwrite)
    return left_out


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
