"""verl's `DataProto`, as far as reward code uses it: tensors by row, columns of objects, and data about the batch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..tensors import Tensor


class TensorColumns(dict[str, Tensor]):
    """A `TensorDict` with one batch dimension: its length is that of its columns."""

    def __init__(self, columns: Mapping[str, Any] | None = None, batch_size: int | None = None) -> None:
        super().__init__({name: np.asarray(values).view(Tensor) for name, values in (columns or {}).items()})
        first = next(iter(self.values()), None)
        self._rows = batch_size if batch_size is not None else 0 if first is None else int(first.shape[0])

    @property
    def batch_size(self) -> tuple[int, ...]:
        return (self._rows,)

    def __len__(self) -> int:
        return self._rows

    def __bool__(self) -> bool:
        return True

    def __setitem__(self, name: str, values: Any) -> None:
        super().__setitem__(name, np.asarray(values).view(Tensor))

    def rows(self, which: Any) -> TensorColumns:
        """The chosen rows."""
        count = len(np.arange(self._rows)[which])
        return TensorColumns({name: values[which] for name, values in self.items()}, batch_size=count)


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
            batch = {} if self.batch is None else {name: values[which] for name, values in self.batch.items()}
            columns = {name: values[which] for name, values in self.non_tensor_batch.items()}
            return VerlDataProtoItem(batch, columns, self.meta_info)
        return self.select_idxs(which)

    def __iter__(self) -> Iterator[VerlDataProtoItem]:
        return (self[index] for index in range(len(self)))

    def select_idxs(self, which: Any) -> VerlDataProto:
        """The rows of these indices, or those where a mask is true."""
        which = which if isinstance(which, slice) else np.asarray(which)
        batch = None if self.batch is None else self.batch.rows(which)
        columns = {name: values[which] for name, values in self.non_tensor_batch.items()}
        return VerlDataProto(batch, columns, self.meta_info)

    def slice(self, start: int | None, end: int | None) -> VerlDataProto:
        return self.select_idxs(slice(start, end))

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> VerlDataProto:
        """Each row as many times: beside each other, or all after all."""
        count = len(self)
        which = np.repeat(np.arange(count), repeat_times) if interleave else np.tile(np.arange(count), repeat_times)
        return self.select_idxs(which)

    def chunk(self, chunks: int) -> list[VerlDataProto]:
        """Parts of the same size. Raises `AssertionError` where that is not possible."""
        assert len(self) % chunks == 0, (
            f"only support equal chunk. Got size of DataProto {len(self)} and chunk {chunks}."
        )
        size = len(self) // chunks
        return [self.slice(place * size, (place + 1) * size) for place in range(chunks)]

    def union(self, other: VerlDataProto) -> VerlDataProto:
        """The columns of both."""
        mine, theirs = self.batch or {}, other.batch or {}
        batch = TensorColumns({**mine, **theirs}, batch_size=len(self))
        columns = {**self.non_tensor_batch, **other.non_tensor_batch}
        return VerlDataProto(batch, columns, {**self.meta_info, **other.meta_info})

    @staticmethod
    def concat(parts: Sequence[VerlDataProto]) -> VerlDataProto:
        """All rows. The first part's columns are taken for all of them: a key too many, or one that is missing, is an
        error, as in verl.
        """
        batch = None
        if parts[0].batch is not None:
            names = list(parts[0].batch)
            for part in parts:
                if set(part.batch) != set(names):
                    raise KeyError(f"got keys {sorted(names)} and {set(part.batch)} which are incompatible")
            batch = TensorColumns({name: np.concatenate([part.batch[name] for part in parts]) for name in names})
        columns = _lists_of([part.non_tensor_batch for part in parts])
        meta: dict[str, Any] = {}
        metrics: list[Mapping[str, Any]] = []
        for part in parts:
            for name, value in part.meta_info.items():
                if name == "metrics":
                    metrics.extend(value if isinstance(value, list) else [value])
                elif name in meta:
                    assert meta[name] == value, f"Conflicting values for meta_info key '{name}'"
                else:
                    meta[name] = value
        if metrics:
            meta["metrics"] = _lists_of(metrics)
        return VerlDataProto(batch, {name: np.concatenate(each) for name, each in columns.items()}, meta)


def _lists_of(mappings: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    listed = list(mappings)
    lists: dict[str, list[Any]] = {name: [] for name in listed[0]} if listed else {}
    for mapping in listed:
        for name, value in mapping.items():
            assert name in lists, f"Key '{name}' is not present in the keys of the first dictionary in the list."
            lists[name].append(value)
    return lists


def pad_to_divisor(data: VerlDataProto, divisor: int) -> tuple[VerlDataProto, int]:
    """With its first rows again until its length can be divided; and how many those are."""
    missing = -len(data) % divisor
    if not missing or not len(data):
        return data, 0
    return data.select_idxs(np.arange(len(data) + missing) % len(data)), missing
