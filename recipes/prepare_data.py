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
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dataset.checks import check, describe, load_tokenizer
from dataset.files import DataError, read_rows, refuse_existing, write_rows
from dataset.formats import FORMATS
from dataset.questions import tasks_from

INSTRUCTION = "Think step by step, and end with a line that states the final answer: The answer is ..."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", choices=tuple(FORMATS))
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
    made = FORMATS[asked.framework]
    if asked.to.suffix != made.suffix:
        raise DataError(f"{asked.to}: the file for {asked.framework} must end in {made.suffix}")
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
    written = [made.row(task, index, asked.split) for index, task in enumerate(tasks)]
    write_rows(written, asked.to, overwrite=asked.overwrite)
    return left_out


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
