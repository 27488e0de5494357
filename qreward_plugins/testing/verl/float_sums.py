"""Sums, means and deviations of float32 numbers in the order in which torch adds on a CPU (SumKernel.cpp): to the last
bit on x86. Below 8 numbers the order is the same on every processor.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

LANES = 8
"""The partial sums that torch keeps in a vector register, with AVX-512, too."""

_UNROLLED = 4
_LEVELS = 4


def sum32(values: Any) -> Any:
    """The sum, as `Tensor.sum()` of a contiguous tensor."""
    flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    whole = len(flat) // LANES
    with np.errstate(all="ignore"):
        if not whole:
            return np.float32(_row_sum(flat.reshape(-1, 1))[0])
        lanes = _row_sum(flat[: whole * LANES].reshape(whole, LANES))
        total = np.float32(0)
        for value in flat[whole * LANES :]:
            total = np.float32(total + value)
        for value in lanes:
            total = np.float32(total + value)
    return total


def mean32(values: Any) -> Any:
    """The mean, as `torch.mean`; NaN of nothing."""
    count = int(np.asarray(values).size)
    with np.errstate(all="ignore"):
        return np.float32(sum32(values) / np.float32(count))


def std32(values: Any) -> Any:
    """The sample deviation, as `torch.std`: from the float32 mean, in float64."""
    return np.float32(math.sqrt(variance) if (variance := _variance(values)) == variance else math.nan)


def var32(values: Any) -> Any:
    """The sample variance, as `torch.var`."""
    return np.float32(_variance(values))


def masked_mean32(values: Any, mask: Any) -> Any:
    """The mean of the numbers that the mask has, as verl's `masked_mean`; what the mask leaves out may be NaN."""
    mask = np.asarray(mask)
    chosen = np.where(mask.astype(bool), values, np.float32(0)).astype(np.float32) * mask.astype(np.float32)
    with np.errstate(all="ignore"):
        return np.float32(sum32(chosen) / np.float32(np.float32(mask.sum()) + np.float32(1e-8)))


def masked_means(values: Any, mask: Any) -> Any:
    """The masked mean of each row."""
    rows = zip(np.asarray(values), np.asarray(mask), strict=True)
    return np.array([masked_mean32(row, there) for row, there in rows], dtype=np.float32)


def _variance(values: Any) -> float:
    flat = np.asarray(values, dtype=np.float32).reshape(-1)
    mean = float(mean32(flat))
    squares = 0.0
    for value in flat.tolist():
        squares += (value - mean) * (value - mean)
    return squares / (len(flat) - 1) if len(flat) > 1 else math.nan


def _row_sum(rows: np.ndarray[Any, Any]) -> Any:
    """Rows added up: in four interleaved sums, each in levels so that rounding does not grow with the length."""
    count = len(rows) // _UNROLLED
    partial = _levels_sum(rows[: count * _UNROLLED].reshape(count, _UNROLLED, rows.shape[1]))
    first = partial[0]
    for row in rows[count * _UNROLLED :]:
        first = first + row
    for other in partial[1:]:
        first = first + other
    return first


def _levels_sum(blocks: np.ndarray[Any, Any]) -> Any:
    count = len(blocks)
    power = max(4, math.ceil(math.log2(count) / _LEVELS)) if count > 1 else 4
    step = 1 << power
    sums = np.zeros((_LEVELS, *blocks.shape[1:]), dtype=np.float32)
    place = 0
    while place + step <= count:
        for block in blocks[place : place + step]:
            sums[0] += block
        place += step
        for level in range(1, _LEVELS):
            sums[level] += sums[level - 1]
            sums[level - 1] = 0
            if place & ((step - 1) << (level * power)):
                break
    for block in blocks[place:]:
        sums[0] += block
    for level in range(1, _LEVELS):
        sums[0] += sums[level]
    return sums[0]
