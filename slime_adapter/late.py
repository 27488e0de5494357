"""Masks failed samples, and unmasks them if their verdict comes late.

A sample may fail first and be scored later. slime scores the samples of some aborted groups again. With
`--partial-rollout` it keeps complete samples for a later rollout without asking again, so scoring continues after the
abort. Meanwhile a failed sample has the mean of its siblings, which other threads score. So all changes of a failed
sample happen here, under one lock: an earlier result never overwrites a later one, and nothing changes after a hook of
slime has read the sample.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Any

from .samples import ROLLOUT_SAMPLE, keep_record, mask, record_of

_BEFORE = "before"
"""`remove_sample` and `loss_mask` from before `fail`, and the loss mask that it set (`masked`)."""
_OPEN = "open"
"""Whether the reward may still change: to the siblings' new mean, or to a late verdict."""
_PENDING = "pending"
"""Whether a verdict may still come."""
_LATE = "late"
"""The reward of a late verdict. It is kept because slime may still assign the stand-in that was returned earlier."""

_lock = threading.Lock()


def fail(args: Any, sample: ROLLOUT_SAMPLE, record: Mapping[str, Any]) -> None:
    """Mark a sample as failed and mask it."""
    with _lock:
        _unmask(sample)
        before = {name: getattr(sample, name, None) for name in ("remove_sample", "loss_mask")}
        mask(args, sample)
        masked = getattr(sample, "loss_mask", None)
        if masked is not before["loss_mask"]:
            before["masked"] = list(masked or ())
        keep_record(sample, {**record, "excluded": True, _OPEN: True, _BEFORE: before})


def score(sample: ROLLOUT_SAMPLE, record: Mapping[str, Any]) -> None:
    """Mark a sample as scored and undo an earlier failure."""
    with _lock:
        _unmask(sample)
        keep_record(sample, {**record, "excluded": False})


def stand_in(sample: ROLLOUT_SAMPLE, reward: Any) -> None:
    """Give a failed sample the mean of its siblings, unless it was scored meanwhile or settled."""
    with _lock:
        record = record_of(sample)
        if record.get("excluded") and record.get(_OPEN):
            sample.reward = reward


def expect(samples: Iterable[ROLLOUT_SAMPLE]) -> None:
    """Mark failed samples whose verdicts may still come."""
    with _lock:
        for sample in samples:
            keep_record(sample, {**record_of(sample), _PENDING: True})


def write_late(sample: ROLLOUT_SAMPLE, reward: Any, record: Mapping[str, Any]) -> bool:
    """Write a late verdict into its sample, unless the sample is settled; return whether it was written."""
    with _lock:
        if not record_of(sample).get(_PENDING):
            return False
        _unmask(sample)
        sample.reward = reward
        keep_record(sample, {**record, "excluded": False, _LATE: reward})
        return True


def settle(samples: Iterable[ROLLOUT_SAMPLE]) -> None:
    """Apply late verdicts, and refuse all later changes of these samples."""
    with _lock:
        for sample in samples:
            record = record_of(sample)
            if _LATE in record:
                sample.reward = record[_LATE]
            if not record.keys().isdisjoint((_OPEN, _PENDING, _LATE)):
                kept = {key: value for key, value in record.items() if key not in (_OPEN, _PENDING, _LATE)}
                keep_record(sample, kept)


def _unmask(sample: ROLLOUT_SAMPLE) -> None:
    """Undo `fail`. Keep a loss mask that slime has set since (it masks off-policy tokens), and the mask of tokens that
    were generated since.
    """
    before = record_of(sample).get(_BEFORE)
    if before is None:
        return
    sample.remove_sample = before["remove_sample"]
    masked = before.get("masked")
    now = getattr(sample, "loss_mask", None)
    if masked is None or now is None or list(now[: len(masked)]) != masked:
        return
    since = list(now[len(masked) :])
    was = before["loss_mask"]
    sample.loss_mask = was if not since else [*([1] * len(masked) if was is None else was), *since]
