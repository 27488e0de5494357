"""Rows of rollouts in files: JSONL and parquet in, the same rows with their outcome out, in the same order.

A file is read twice: once to count and check every row, so that a mistake in row 90,000 is told before the first
request is paid for, and once to score. Output goes to `OUT.partial` and takes its place when it is complete, so that
OUT is never a torso.
"""

from __future__ import annotations

from .results import RESULT, to_result
from .rollouts import Rollout, check_rollouts, read_rollouts
from .writing import RowWriter, open_writer, partial_path

__all__ = [
    "RESULT",
    "Rollout",
    "RowWriter",
    "check_rollouts",
    "open_writer",
    "partial_path",
    "read_rollouts",
    "to_result",
]
