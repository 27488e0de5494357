"""verl's `DataProto`, as far as reward code uses it: tensors by row, columns of objects, and data about the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..rows import Columns, Rows
from ..tensors import Tensor


class TensorColumns(Columns):
    """The `batch`: any arrays are taken as tensors."""

    def __setitem__(self, name: str, values: Any) -> None:
        super().__setitem__(name, np.asarray(values).view(Tensor))


@dataclass
class VerlDataProtoItem:
    """One row of a batch."""

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class VerlDataProto(Rows):
    """`DataProto` without torch."""

    columns = TensorColumns

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, (int, np.integer)):
            columns = {name: values[which] for name, values in self.non_tensor_batch.items()}
            tensors = {name: values[which] for name, values in (self.batch or {}).items()}
            return VerlDataProtoItem(tensors, columns, self.meta_info)
        return self.select_idxs(which)

    def __iter__(self) -> Iterator[VerlDataProtoItem]:
        return (self[index] for index in range(len(self)))

    def slice(self, start: int | None, end: int | None) -> VerlDataProto:
        return self.select_idxs(slice(start, end))

    def chunk(self, chunks: int) -> list[VerlDataProto]:
        """Parts of the same size. Raises `AssertionError` where that is not possible."""
        assert len(self) % chunks == 0, (
            f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}."
        )
        size = len(self) // chunks
        return [self.slice(place * size, (place + 1) * size) for place in range(chunks)]

    def union(self, other: VerlDataProto) -> VerlDataProto:
        """The columns of both."""
        batch = TensorColumns({**(self.batch or {}), **(other.batch or {})}, len(self))
        columns = {**self.non_tensor_batch, **other.non_tensor_batch}
        return VerlDataProto(batch, columns, {**self.meta_info, **other.meta_info})

    @staticmethod
    def concat(parts: Sequence[VerlDataProto]) -> VerlDataProto:
        """All rows. Parts with other tensors, columns or meta information than the first are an error, as in verl."""
        first = parts[0]
        for part in parts:
            mine, theirs = ({*(each.batch or ()), *each.non_tensor_batch} for each in (first, part))
            if mine != theirs:
                raise KeyError(f"got keys {sorted(mine)} and {sorted(theirs)} which are incompatible")
            assert part.meta_info == first.meta_info, f"Conflicting values for meta_info: {part.meta_info}"

        def joined(columns: Sequence[Any]) -> dict[str, Any]:
            return {name: np.concatenate([each[name] for each in columns]) for name in columns[0]}

        batch = None
        if first.batch is not None:
            batch = TensorColumns(joined([part.batch for part in parts]), sum(map(len, parts)))
        return VerlDataProto(batch, joined([part.non_tensor_batch for part in parts]), first.meta_info)


def pad_to_divisor(data: VerlDataProto, divisor: int) -> tuple[VerlDataProto, int]:
    """With its first rows again until its length can be divided; and how many those are."""
    missing = -len(data) % divisor
    if not missing or not len(data):
        return data, 0
    return data.select_idxs(np.arange(len(data) + missing) % len(data)), missing
