"""What the hooks see of the samples of a step or a validation, as metrics for verl's tracker.

verl drops `reward_extra_info` after training and has no metric of it. It does not mark the rows of a validation, so
these are marked here (`mark_rows`). The means of a validation are computed as if failed samples were average: a failed
sample takes the mean of its prompt's scored samples, so `mean@n` keeps its n. Otherwise the prompts that lose a sample,
which are often the hard ones, would move to `mean@(n-1)`. A prompt without any scored sample is left out.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from qreward_plugins.adapters import summary

from .rewards import MISSING, PREFIX, WAITED, is_absent, plain_or_none, unpacked
from .rollouts import VALIDATION

_log = logging.getLogger("verl_adapter")

_PREFIXES = {"train": PREFIX, "val": f"{PREFIX}val/"}


class RewardLog:
    """Collects the extra info of samples until the tracker asks for their metrics."""

    def __init__(self) -> None:
        self._facts: dict[str, list[tuple[str, dict[str, Any]]]] = {split: [] for split in _PREFIXES}
        """By split, of each sample its prompt and its facts."""
        self._waited: dict[str, float] = {}
        self.unscored_prompts = 0
        """The prompts of a validation of which no sample has a reward."""

    def add(self, split: Literal["train", "val"], samples: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Count samples by the uid of their prompt and their extra info. Those that an agent loop has rewarded itself
        have none, and count not.
        """
        for uid, info in samples:
            if is_absent(info.get(f"{PREFIX}failed")):
                continue
            facts = {name.removeprefix(PREFIX): plain_or_none(value) for name, value in info.items()}
            # Beside a sample without a reward stands the number that verl was given for it.
            missing = facts.get(MISSING.removeprefix(PREFIX))
            self._facts[split].append((uid, facts | ({"reward": None} if missing else {})))
            waited = json.loads(info[WAITED]) if split == "train" and info.get(WAITED) else {}
            if math.fsum(waited.values()) > math.fsum(self._waited.values()):
                self._waited = waited

    def since_last(self) -> dict[str, float]:
        """Metrics of what was added since the last call; empty without any."""
        metrics: dict[str, float] = {}
        for split, prefix in _PREFIXES.items():
            uids, facts = zip(*self._facts[split], strict=True) if self._facts[split] else ((), ())
            metrics |= {f"{prefix}{name}": float(value) for name, value in summary(facts, uids).items()}
        if self._facts["val"]:
            metrics[f"{_PREFIXES['val']}unscored_prompts"] = float(self.unscored_prompts)
        metrics |= {f"{PREFIX}{name}": seconds for name, seconds in self._waited.items()}
        self._facts, self._waited, self.unscored_prompts = {split: [] for split in _PREFIXES}, {}, 0
        return metrics


@functools.lru_cache(maxsize=32)
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    _log.warning("%s", text)


def mark_rows(validate: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps `_validate`: the rows of the validation's data loader are marked in their column `extra_info`."""
    loader = self.val_dataloader
    if getattr(loader.collate_fn, "func", None) is not _marked:
        loader.collate_fn = functools.partial(_marked, loader.collate_fn)
    return validate(self, *args, **kwargs)


def _marked(collate: Callable[[Any], dict[str, Any]], rows: Any) -> dict[str, Any]:
    """Collates rows as verl does, and marks each as a validation row."""
    columns = collate(rows)
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
