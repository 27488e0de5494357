#!/usr/bin/env python3
"""Checks a recipe before it is started, and ends with one table. `run.sh RECIPE --dry-run` of each recipe calls it.

It composes the configuration with the framework's own code, and checks that every key is known to the framework, that
paths exist, that the GPUs that are asked for exist, that the data set has the rows that the framework reads, and that
the judges are valid and answer: one row of the training data is judged. `qreward plan` says what a step of judging
takes and costs. It trains nothing and writes nothing.

Exit codes: 0 no check failed; 1 some did, and the table has the remedies; 2 the command line has mistakes.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from dryrun.lines import Line, failed, show
from rich.console import Console

HERE = Path(__file__).resolve().parent


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="ask no judge, and start no server")
    parser.add_argument("--missing", action="append", default=[], metavar="TEXT", help="what run.sh found missing")
    frameworks = parser.add_subparsers(dest="framework", required=True)
    verl = frameworks.add_parser("verl")
    verl.add_argument("folder", type=Path, help="folder of the recipe")
    verl.add_argument("name", help="name of the recipe, such as grpo")
    verl.add_argument("overrides", nargs="*", help="Hydra overrides of the run")
    slime = frameworks.add_parser("slime")
    slime.add_argument("judges", type=Path, help="the file of the judges")
    slime.add_argument("flags", nargs=argparse.REMAINDER, help="the flags of train.py, after --")
    roll = frameworks.add_parser("roll")
    roll.add_argument("folder", type=Path, help="folder of the recipe")
    roll.add_argument("name", help="name of the recipe, such as grpo")
    roll.add_argument("roll", type=Path, help="the checkout of ROLL, from which relative paths start")
    asked = parser.parse_args(arguments)
    # Read when transformers is imported: a dry run downloads nothing.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    lines = [Line("start", "FAIL", text) for text in asked.missing]
    try:
        lines += _lines(asked)
    except Exception as error:
        # Frameworks accept values of the wrong type, which fail only when they are used here.
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if HERE in Path(frame.filename).parents]
        problem = f"{type(error).__name__}: {' '.join(str(error).split())}; while reading: {frames[-1].line}"
        remedy = "a value of the recipe or of an override has a type that its key does not take"
        lines.append(Line("dry run", "FAIL", problem, remedy))
    out = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    name = getattr(asked, "name", "")
    show(f"dry run: {asked.framework}{' ' + name if name else ''}", lines, out)
    bad = failed(lines)
    out.print(f"{bad} of {len(lines)} checks failed" if bad else f"all {len(lines)} checks passed; nothing was started")
    return 1 if bad else 0


def _lines(asked: argparse.Namespace) -> list[Line]:
    ask = not asked.offline
    if asked.framework == "verl":
        from dryrun.verl_recipe import verl_lines

        return verl_lines(asked.folder, asked.name, asked.overrides, ask=ask)
    if asked.framework == "slime":
        from dryrun.slime_recipe import slime_lines

        return slime_lines(asked.judges, [flag for flag in asked.flags if flag != "--"], ask=ask)
    from dryrun.roll_recipe import roll_lines

    return roll_lines(asked.folder, asked.name, asked.roll, ask=ask)


if __name__ == "__main__":
    sys.exit(main())
