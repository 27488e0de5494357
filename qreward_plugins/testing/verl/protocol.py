"""verl's `DataProto`, as far as reward code uses it: tensors by row, columns of objects, and data about the batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..tensors import Tensor


class TensorColumns(dict[str, Tensor]):
    """A `TensorDict` with one batch dimension."""

    def __init__(self, columns: Mapping[str, Any], batch_size: int) -> None:
        super().__init__({name: np.asarray(values).view(Tensor) for name, values in columns.items()})
        self.batch_size = (batch_size,)

    def __len__(self) -> int:
        return self.batch_size[0]

    def __bool__(self) -> bool:
        return True

    def __setitem__(self, name: str, values: Any) -> None:
        super().__setitem__(name, np.asarray(values).view(Tensor))


@dataclass
class VerlDataProtoItem:
    """One row of a batch."""

    batch: dict[str, Any]
    non_tensor_batch: dict[str, Any] = field(default_factory=dict)
    meta_info: dict[str, Any] = field(default_factory=dict)


class VerlDataProto:
    """`DataProto` without torch. `batch` may be None, as in verl."""

    def __init__(
        self,
        batch: TensorColumns | None = None,
        non_tensor_batch: dict[str, np.ndarray[Any, Any]] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch: Any = batch
        self.non_tensor_batch = non_tensor_batch if non_tensor_batch is not None else {}
        self.meta_info = meta_info if meta_info is not None else {}
        for name, values in self.non_tensor_batch.items():
            if len(values) != len(self):
                raise AssertionError(f"key {name} length {len(values)} is not equal to batch size {len(self)}")

    def __len__(self) -> int:
        if self.batch is not None:
            return len(self.batch)
        return len(next(iter(self.non_tensor_batch.values()), ()))

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, (int, np.integer)):
            columns = {name: values[which] for name, values in self.non_tensor_batch.items()}
            tensors = {name: values[which] for name, values in (self.batch or {}).items()}
            return VerlDataProtoItem(tensors, columns, self.meta_info)
        return self.select_idxs(which)

    def __iter__(self) -> Iterator[VerlDataProtoItem]:
        return (self[index] for index in range(len(self)))

    def select_idxs(self, which: Any) -> VerlDataProto:
        """The rows of these indices, of a slice, or those where a mask is true."""
        rows = np.arange(len(self))[which if isinstance(which, slice) else np.asarray(which)]
        batch = None
        if self.batch is not None:
            batch = TensorColumns({name: values[rows] for name, values in self.batch.items()}, len(rows))
        columns = {name: values[rows] for name, values in self.non_tensor_batch.items()}
        return VerlDataProto(batch, columns, self.meta_info)

    def slice(self, start: int | None, end: int | None) -> VerlDataProto:
        return self.select_idxs(slice(start, end))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> VerlDataProto:
        """Each row as many times: beside each other, or all after all."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))

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
