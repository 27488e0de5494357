"""The rows of a batch: what the `DataProto` of verl and that of ROLL, which descends from it, have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self


class Columns(dict[str, Any]):
    """A `TensorDict` with one batch dimension: tensors of one length by name."""

    def __init__(self, columns: Mapping[str, Any], size: int) -> None:
        self.batch_size = (size,)
        for name, values in columns.items():
            self[name] = values

    def __len__(self) -> int:
        return self.batch_size[0]

    def __bool__(self) -> bool:
        return True


class Rows:
    """Tensors by row, columns of objects, and data about the batch. `batch` is None without tensors. Raises
    `AssertionError` for a column of another length.
    """

    columns: ClassVar[type[Columns]] = Columns

    def __init__(
        self,
        batch: Columns | None = None,
        non_tensor_batch: dict[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        self.batch: Any = batch
        self.non_tensor_batch: dict[str, Any] = non_tensor_batch if non_tensor_batch is not None else {}
        self.meta_info: dict[str, Any] = meta_info if meta_info is not None else {}
        for name, values in self.non_tensor_batch.items():
            assert len(values) == len(self), f"{name} has {len(values)} rows, the batch has {len(self)}"

    def __len__(self) -> int:
        return len(self.batch if self.batch is not None else next(iter(self.non_tensor_batch.values()), ()))

    def select_idxs(self, which: Any) -> Self:
        """The rows of these numbers, of a slice, or where a mask is true. The meta information is the same object."""
        rows = np.arange(len(self))[which if isinstance(which, slice) else np.asarray(which) if len(which) else []]
        batch = None
        if self.batch is not None:
            batch = self.columns({name: values[rows] for name, values in self.batch.items()}, len(rows))
        others = {name: values[rows] for name, values in self.non_tensor_batch.items()}
        return type(self)(batch, others, self.meta_info)

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> Self:
        """Every row `repeat_times` times: one after the other, or with `interleave=False` the whole batch again."""
        rows = np.arange(len(self))
        return self.select_idxs(np.repeat(rows, repeat_times) if interleave else np.tile(rows, repeat_times))
