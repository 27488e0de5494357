"""Verdicts that come after slime took their samples back.

With `--partial-rollout` slime keeps the samples of an aborted rollout and trains them in a later one; a complete sample
is not scored again then. So scoring goes on behind the abort, and a verdict is written into its sample until the
sample is used: when a filter or the post-process hook has looked at it, it must not change under their hands.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from .samples import ROLLOUT_SAMPLE, keep_record, record_of

_PENDING = "pending"
_lock = threading.Lock()


def expect(samples: Iterable[ROLLOUT_SAMPLE]) -> None:
    """Mark samples whose verdicts are still to come."""
    with _lock:
        for sample in samples:
            keep_record(sample, {**record_of(sample), _PENDING: True})


def write_late(sample: ROLLOUT_SAMPLE, reward: Any, record: Mapping[str, Any]) -> bool:
    """Write a verdict into its sample, unless the sample is in use already; return whether it was written."""
    with _lock:
        before = record_of(sample)
        if not before.get(_PENDING):
            return False
        sample.reward = reward
        sample.remove_sample = False
        sample.loss_mask = before.get("loss_mask")
        keep_record(sample, record)
        return True


def settle(samples: Iterable[ROLLOUT_SAMPLE]) -> None:
    """From here on these samples stay as they are."""
    with _lock:
        for sample in samples:
            record = record_of(sample)
            if record.get(_PENDING):
                keep_record(sample, {key: value for key, value in record.items() if key != _PENDING})
