"""Validations: marks their rows, because verl does not, and computes their means as if failed samples were average.

A failed sample takes the mean of its prompt's scored samples, so `mean@n` keeps its n. Otherwise the prompts that lose
a sample, which are often the hard ones, would move to `mean@(n-1)`. A prompt without any scored sample is left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .metrics import RewardLog
from .rewards import MISSING, PREFIX, is_absent, unpacked
from .rollouts import VALIDATION


def marking(validate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `_validate`: the rows of the validation's data loader are marked in their column `extra_info`."""

    @functools.wraps(validate)
    def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        loader = self.val_dataloader
        if not isinstance(loader.collate_fn, MarkedRows):
            loader.collate_fn = MarkedRows(loader.collate_fn)
        return validate(self, *args, **kwargs)

    return marked


class MarkedRows:
    """Collates rows as verl does, and marks each as a validation row."""

    def __init__(self, collate: Callable[[Any], dict[str, Any]]) -> None:
        self._collate = collate

    def __call__(self, rows: Any) -> dict[str, Any]:
        columns = self._collate(rows)
        return {**columns, "extra_info": _marked(columns.get("extra_info"), len(rows))}


def with_means(log: RewardLog, process: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `process_validation_metrics`: in a column, a row without a value takes the mean of its prompt's others."""

    @functools.wraps(process)
    def processed(sources: Any, uids: Any, infos: Mapping[str, Sequence[Any]], *args: Any, **kwargs: Any) -> Any:
        columns = unpacked(infos)
        names = [name for name in columns if name.startswith(PREFIX) or name in ("acc", "reward")]
        facts = ({name: columns[name][row] for name in names} for row in range(len(uids)))
        log.add("val", zip((f"{source} {uid}" for source, uid in zip(sources, uids, strict=True)), facts, strict=True))
        prompts: dict[tuple[str, str], list[int]] = {}
        for row, prompt in enumerate(zip(map(str, sources), map(str, uids), strict=True)):
            prompts.setdefault(prompt, []).append(row)
        missing = {row for row, value in enumerate(columns.get(MISSING) or ()) if value}
        log.add_unscored_prompts(sum(missing.issuperset(rows) for rows in prompts.values()))
        expected = dict(kwargs.get("expected_acc_counts") or {})
        parts: dict[tuple[int, ...], dict[str, list[Any]]] = {}
        for name, values in columns.items():
            absent = {row for row, value in enumerate(values) if is_absent(value)}
            absent |= missing if _is_about_response(name) else set()
            filled, kept = list(values), []
            for prompt, rows in prompts.items():
                present = [values[row] for row in rows if row not in absent]
                if present:
                    kept += rows
                    for row in absent.intersection(rows):
                        filled[row] = _filling(present)
                elif name == "acc":
                    # verl counts every session without `acc` as wrong, but its correctness is unknown.
                    expected.pop(prompt, None)
            kept.sort()
            if kept:
                parts.setdefault(tuple(kept), {})[name] = [filled[row] for row in kept]
        if "expected_acc_counts" in kwargs:
            kwargs["expected_acc_counts"] = expected
        found: dict[Any, dict[str, Any]] = {}
        for chosen, part in parts.items():
            told = process([sources[row] for row in chosen], [uids[row] for row in chosen], part, *args, **kwargs)
            for source, metrics in told.items():
                found.setdefault(source, {}).update(metrics)
        return found

    return processed


def _filling(present: Sequence[Any]) -> Any:
    """What a row without a value takes: the mean, and of texts the first."""
    if all(isinstance(value, (int, float, np.number, np.bool_)) for value in present):
        return math.fsum(map(float, present)) / len(present)
    return present[0]


def _is_about_response(name: str) -> bool:
    """Whether a column describes the response, and not how its scoring went."""
    return not name.startswith(PREFIX) or name.startswith(f"{PREFIX}score/")


def _marked(infos: Any, count: int) -> Any:
    """A column of `count` rows like `infos`, each with the mark."""
    column = np.empty(count, dtype=object)
    column[:] = [{**(info or {}), VALIDATION: True} for info in (infos if infos is not None else [None] * count)]
    return column
