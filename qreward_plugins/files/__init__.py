"""Reads rollouts from JSON and parquet files, and writes the same rows with their outcomes as JSON lines.

A file is read twice. The first pass counts and checks every row, so that a mistake in row 90,000 is reported before the
first request is paid for. The second pass scores. Output goes to `OUT.partial`, which is renamed to OUT when it is
complete, so that OUT never holds a part of the rows.
"""

from __future__ import annotations

from .labelled_rows import LabelledRow, Layout, read_labelled
from .rollouts import Rollout, check_rollouts, message_list, read_rollouts, sample_of
from .tables import check_output, open_writer, partial_path, to_result

__all__ = [
    "LabelledRow",
    "Layout",
    "Rollout",
    "check_output",
    "check_rollouts",
    "message_list",
    "open_writer",
    "partial_path",
    "read_labelled",
    "read_rollouts",
    "sample_of",
    "to_result",
]
