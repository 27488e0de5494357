"""What the hooks see of the samples of a step or a validation, as metrics for verl's tracker.

verl drops `reward_extra_info` after training and has no metric of it.
"""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from qreward_plugins.adapters import summary

from .rewards import MISSING, PREFIX, WAITED, is_absent, plain

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
            facts = {name.removeprefix(PREFIX): _plain(value) for name, value in info.items()}
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


def _plain(value: Any) -> Any:
    """A value of a column as Python has it; None for one that stands for none."""
    value = plain(value)
    return None if is_absent(value) else value


@functools.lru_cache(maxsize=32)
def warn_once(text: str) -> None:
    """Log a warning, the first time that it is given."""
    _log.warning("%s", text)
