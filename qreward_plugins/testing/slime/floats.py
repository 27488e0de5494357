"""Arithmetic in 32-bit floats as torch does it on a CPU, without torch.

Where slime subtracts nearly equal numbers, only rounding is left, and slime divides by it. To get the same numbers,
these sums are rounded at every step and added in torch's order.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

_LANES = 8
_WAYS = 4


def round32(value: float) -> float:
    """The nearest 32-bit float."""
    return array("f", [value])[0]


def _strided_sum(values: Sequence[float]) -> float:
    """torch's order: four interleaved sums, the rest added to the first, then their sum."""
    whole = len(values) // _WAYS * _WAYS
    sums = [0.0] * _WAYS
    for position, value in enumerate(values[:whole]):
        sums[position % _WAYS] = round32(sums[position % _WAYS] + value)
    for value in values[whole:]:
        sums[0] = round32(sums[0] + value)
    total = sums[0]
    for part in sums[1:]:
        total = round32(total + part)
    return total


def sum32(values: Sequence[float]) -> float:
    """The sum of a row of 32-bit floats, as torch computes it on a CPU with vectors of eight.

    The last bit of a sum of eight values or more depends on the CPU.
    """
    if len(values) < _LANES:
        return _strided_sum(values)
    whole = len(values) // _LANES * _LANES
    total = 0.0
    for value in values[whole:]:
        total = round32(total + value)
    for lane in range(_LANES):
        total = round32(total + _strided_sum(values[lane:whole:_LANES]))
    return total


def std32(values: Sequence[float]) -> float:
    """The unbiased standard deviation of 32-bit floats, computed in 64 bits as torch does; NaN for fewer than two."""
    if len(values) < 2:
        return math.nan
    mean = math.fsum(values) / len(values) if all(map(math.isfinite, values)) else math.nan
    return round32(math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1)))
