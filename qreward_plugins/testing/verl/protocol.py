"""verl's `DataProto`, as far as reward code uses it: tensors by row, columns of objects, and data about the batch."""

from __future__ import annotations

from collections.abc import Iterator
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

    def union(self, other: VerlDataProto) -> VerlDataProto:
        """The columns of both."""
        batch = TensorColumns({**(self.batch or {}), **(other.batch or {})}, len(self))
        columns = {**self.non_tensor_batch, **other.non_tensor_batch}
        return VerlDataProto(batch, columns, {**self.meta_info, **other.meta_info})
