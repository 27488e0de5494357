"""Decides which groups are trained, for frameworks that can replace a prompt (slime, ROLL).

A group with too few rewards is dropped. While a judge is down, prompts would be replaced for ever, so the gate ends the
run after too many dropped groups in a row.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from ..config import Groups
from ..errors import JudgeUnavailable


class GroupGate:
    """Drops groups with too few rewards, and ends the run after too many in a row. Thread-safe."""

    def __init__(self, settings: Groups) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._dropped_in_a_row = 0
        self._causes: Counter[str] = Counter()
        self._detail = ""

    def admit(self, size: int, causes: Iterable[str], *, detail: str = "") -> bool:
        """Whether a group of `size` samples has enough rewards (`groups.min_scored`).

        `causes` has one entry for each failed sample. `detail` is the detail of one failure, for the error message.
        Raises `JudgeUnavailable` after `groups.give_up_after` dropped groups in a row.
        """
        failed = list(causes)
        wanted = self._settings.min_scored
        enough = size if wanted == "all" else min(size, wanted)
        with self._lock:
            if size - len(failed) >= enough:
                self._start_over()
                return True
            self._dropped_in_a_row += 1
            self._causes.update(failed)
            self._detail = detail or self._detail
            if self._dropped_in_a_row < self._settings.give_up_after:
                return False
            dropped, last = self._dropped_in_a_row, f" The last failure: {self._detail}." if self._detail else ""
            reasons = ", ".join(f"{cause} {count} times" for cause, count in self._causes.most_common(3))
            self._start_over()
        raise JudgeUnavailable(
            f"{dropped} groups in a row had fewer than {enough} samples with a reward ({reasons}).{last} Replacing "
            "them would not end. `qreward check` tests every source; groups.give_up_after sets the number of groups."
        )

    def _start_over(self) -> None:
        self._dropped_in_a_row = 0
        self._causes.clear()
        self._detail = ""
