"""Validations: marks their rows, because verl does not, and computes their means as if failed samples were average.

A failed sample takes the mean of its prompt's scored samples, so `mean@n` keeps its n. Otherwise the prompts that lose
a sample, which are often the hard ones, would move to `mean@(n-1)`. A prompt without any scored sample is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .metrics import RewardLog
from .rewards import MISSING, PREFIX, is_absent, unpacked
from .rollouts import VALIDATION


def mark_rows(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `_validate`: the rows of the validation's data loader are marked in their column `extra_info`."""
    loader = self.val_dataloader
    if not isinstance(loader.collate_fn, MarkedRows):
        loader.collate_fn = MarkedRows(loader.collate_fn)
    return validate(self, *args, **kwargs)


class MarkedRows:
    """Collates rows as verl does, and marks each as a validation row."""

    def __init__(self, collate: Callable[[Any], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> dict[str, Any]:
        columns = self._collate(rows)
        infos = columns.get("extra_info", [None] * len(rows))
        marked = np.empty(len(rows), dtype=object)
        marked[:] = [{**(info or {}), VALIDATION: True} for info in infos]
        return {**columns, "extra_info": marked}


def with_means(
    log: RewardLog,
    process: Callable[..., Any],
    sources: Sequence[Any],
    uids: Sequence[Any],
    infos: Mapping[str, Sequence[Any]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wraps `process_validation_metrics`: in a column, a row without a value takes the mean of its prompt's others."""
    columns = unpacked(infos)
    names = [name for name in columns if name.startswith(PREFIX) or name in ("acc", "reward")]
    prompts: dict[tuple[str, str], list[int]] = {}
    for row, prompt in enumerate(zip(map(str, sources), map(str, uids), strict=True)):
        prompts.setdefault(prompt, []).append(row)
        log.add("val", [(" ".join(prompt), {name: columns[name][row] for name in names})])
    missing = {row for row, value in enumerate(columns.get(MISSING) or ()) if value}
    log.unscored_prompts += sum(missing.issuperset(rows) for rows in prompts.values())
    if expected := kwargs.get("expected_acc_counts"):
        # Of a prompt whose sessions have all ended in errors, verl takes an `acc` of 0, if its data source has any.
        told = {str(sources[row]) for row, value in enumerate(columns.get("acc") or ()) if not is_absent(value)}
        kwargs["expected_acc_counts"] = {prompt: count for prompt, count in expected.items() if prompt[0] in told}
    filled = {name: list(values) for name, values in columns.items()}
    for name, values in columns.items():
        absent = {row for row, value in enumerate(values) if is_absent(value)}
        absent |= missing if _is_about_response(name) else set()
        for rows in prompts.values():
            present = [values[row] for row in rows if row not in absent]
            for row in absent.intersection(rows):
                filled[name][row] = _filling(present)
    return process(sources, uids, filled, *args, **kwargs)


def _filling(present: Sequence[Any]) -> Any:
    """What a row without a value takes: the mean, and of texts the first. Of nothing, it is a text: verl has no mean of
    a prompt whose values are texts, and does not count their samples as wrong (0.9.1: `expected_acc_counts`).
    """
    if present and all(isinstance(value, (int, float, np.number, np.bool_)) for value in present):
        return math.fsum(map(float, present)) / len(present)
    return present[0] if present else ""


def _is_about_response(name: str) -> bool:
    """Whether a column describes the response, and not how its scoring went."""
    return not name.startswith(PREFIX) or name.startswith(f"{PREFIX}score/")
