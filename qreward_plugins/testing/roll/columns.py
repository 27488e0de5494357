"""The columns of a `DataProto`: tensors, or numpy arrays of objects, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

_NOTHING = object()


def objects(values: Iterable[Any]) -> np.ndarray[Any, Any]:
    """A one-dimensional numpy array of objects, one for each value."""
    items = list(values)
    array = np.empty(len(items), dtype=object)
    for place, item in enumerate(items):
        array[place] = item
    return array


class RollColumns:
    """Columns by name: `data.batch` or `data.non_tensor_batch`. As in ROLL, they cannot be iterated over, and only
    tensors have a `batch_size`.
    """

    def __init__(self, columns: dict[str, Any] | None, size: int, *, tensors: bool) -> None:
        self._columns = columns
        self._size = size
        self._tensors = tensors

    def __repr__(self) -> str:
        return f"RollColumns({self._columns!r})"

    def __getitem__(self, key: str) -> Any:
        if key not in self:
            raise KeyError(f"there is no column {key!r}; there are {', '.join(sorted(self._columns or ())) or 'none'}")
        assert self._columns is not None
        return self._columns[key]

    def __setitem__(self, key: str, value: Any) -> None:
        assert isinstance(value, (torch.Tensor, np.ndarray)), f"column {key!r} is a {type(value).__name__}"
        if self._columns is None:
            raise RuntimeError("this DataProto has no batch: it cannot take a column")
        assert len(value) == self._size, f"column {key!r} has {len(value)} rows, the batch has {self._size}"
        self._columns[key] = value

    def __delitem__(self, key: str) -> None:
        self[key]
        assert self._columns is not None
        del self._columns[key]

    def __contains__(self, key: str) -> bool:
        return self._columns is not None and key in self._columns

    def keys(self) -> set[str]:
        return set(self._columns or ())

    def items(self) -> Iterator[tuple[str, Any]]:
        yield from (self._columns or {}).items()

    def get(self, key: str, default: Any = None) -> Any:
        return (self._columns or {}).get(key, default)

    def pop(self, key: str, default: Any = _NOTHING) -> Any:
        if key not in self and default is not _NOTHING:
            return default
        value = self[key]
        del self[key]
        return value

    def update(self, other: Mapping[str, Any]) -> None:
        for key, value in other.items():
            self[key] = value

    def copy(self) -> RollColumns:
        columns = None if self._columns is None else dict(self._columns)
        return RollColumns(columns, self._size, tensors=self._tensors)

    @property
    def batch_size(self) -> torch.Size:
        if not self._tensors or self._columns is None:
            raise AttributeError("only a batch of tensors has a batch_size")
        return torch.Size([self._size])

    shape = batch_size

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")
