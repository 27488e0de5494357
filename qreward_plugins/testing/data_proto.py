"""The `DataProto` of verl and that of ROLL, which descends from it, without torch, TensorDict and Ray.

Their tensors are numpy arrays with the methods that reward code calls on a row of a batch; ROLL's are torch's where
torch is installed. Both have the rules that reward code meets: columns have the length of the batch, and slices share
the meta information. ROLL's union refuses different values, and its concatenation collects the metrics and keeps the
first part's other meta information.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
from typing_extensions import Self


class _Size(int):
    """The number of elements as numpy has it (`a.size`), and the shape as torch has it (`a.size()`, `a.size(0)`)."""

    shape: tuple[int, ...]

    def __call__(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]


class Tensor(np.ndarray):
    """A numpy array that answers to the methods of a torch tensor on the CPU: `sum(dim=)`, `bool()`, `long()`,
    `size(0)`, `detach().cpu().numpy()` and so on. Slices are views, as in torch. A single element is a numpy scalar.
    """

    device = "cpu"

    def sum(self, axis: Any = None, dtype: Any = None, out: Any = None, **kwargs: Any) -> Any:
        axis = kwargs.pop("dim", axis)
        return np.ndarray.sum(self, axis=axis, dtype=dtype, out=out, **kwargs)

    @property
    def size(self) -> Any:
        size = _Size(int(np.prod(self.shape, dtype=np.int64)))
        size.shape = self.shape
        return size

    def bool(self) -> Any:
        return self.astype(np.bool_)

    def long(self) -> Any:
        return self.astype(np.int64)

    def float(self) -> Any:
        return self.astype(np.float32)

    def cpu(self) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def clone(self) -> Any:
        return self.copy()

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.view(np.ndarray)

    def zero_(self) -> Tensor:
        self.fill(0)
        return self

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: Any = False) -> Any:
        return array[()] if not array.shape else array.view(Tensor)


def tensor(values: Any, dtype: Any = None) -> Tensor:
    """A tensor of these values."""
    return np.asarray(values, dtype=dtype).view(Tensor)


def zeros(*shape: int, dtype: Any = np.float32) -> Tensor:
    """A tensor of zeros."""
    return np.zeros(shape, dtype=dtype).view(Tensor)


def padded(
    rows: Sequence[Sequence[Any]], *, dtype: Any = np.int64, width: int = 0, fill: int = 0, left: bool = False
) -> Tensor:
    """Rows of different lengths as one tensor of at least this width, padded on the right, or on the `left`."""
    width = max([width, *map(len, rows)])
    out = np.full((len(rows), width), fill, dtype=dtype)
    for place, row in enumerate(rows):
        out[place, width - len(row) if left else 0 :][: len(row)] = row
    return out.view(Tensor)


def as_float32(value: Any, *, may_overflow: bool = False) -> Any:
    """A score as an element of a float32 tensor. Raises torch's errors for what is no number, or too large for one."""
    if not hasattr(value, "__float__"):
        raise TypeError(f"must be real number, not {type(value).__name__}")
    with np.errstate(over="ignore"):
        number = np.float32(float(value))
    if np.isinf(number) and not np.isinf(float(value)) and not may_overflow:
        raise RuntimeError("value cannot be converted to type float without overflow")
    return number


def objects(values: Iterable[Any]) -> np.ndarray[Any, Any]:
    """A column of objects, whatever they are."""
    listed = list(values)
    column = np.empty(len(listed), dtype=object)
    column[:] = listed
    return column


def _torch_tensor(values: Any, dtype: Any = None) -> Tensor:
    made = np.array(values, dtype=dtype)
    if dtype is None and made.dtype == np.float64 and not isinstance(values, np.ndarray):
        made = made.astype(np.float32)  # torch's default for numbers of Python
    return made.view(Tensor)


TORCH: dict[str, Any] = {
    "Tensor": Tensor,
    "arange": lambda *bounds: tensor(np.arange(*bounds)),
    "bool": np.dtype(np.bool_),
    "cat": lambda tensors, dim=0: tensor(np.concatenate(tensors, axis=dim)),
    "float32": np.dtype(np.float32),
    "full_like": np.full_like,
    "long": np.dtype(np.int64),
    "ones": lambda *shape, dtype=np.float32: tensor(np.ones(shape, dtype)),
    "ones_like": np.ones_like,
    "tensor": _torch_tensor,
    "zeros": zeros,
    "zeros_like": np.zeros_like,
}
"""torch's names, on numpy."""


@functools.cache
def load_torch() -> Any:
    """torch, or an object with the names of `TORCH` if it is not installed."""
    return import_module("torch") if find_spec("torch") is not None else SimpleNamespace(**TORCH)


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


class RollColumns(Columns):
    """The `batch` of a `RollDataProto`. Raises `AssertionError` for what is no tensor, or of another length."""

    def __setitem__(self, name: str, values: Any) -> None:
        assert isinstance(values, load_torch().Tensor), f"column {name!r} is a {type(values).__name__}"
        size = self.batch_size[0]
        assert len(values) == size, f"column {name!r} has {len(values)} rows, the batch has {size}"
        super().__setitem__(name, values)


class RollDataProto(Rows):
    """ROLL's `DataProto` (scheduler/protocol.py) with the methods that reward workers and rollout loops use. Raises
    `AssertionError` as ROLL does.
    """

    columns = RollColumns

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any],
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> RollDataProto:
        assert tensors, "tensors must not be empty"
        batch = RollColumns(tensors, len(next(iter(tensors.values()))))
        return cls(batch, {name: objects(values) for name, values in (non_tensors or {}).items()}, meta_info)

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, str):
            return self.batch[item] if item in (self.batch or ()) else self.non_tensor_batch[item]
        return self.select_idxs(slice(int(item), int(item) + 1) if isinstance(item, (int, np.integer)) else item)

    def to(self, device: Any) -> RollDataProto:
        return self

    def union(self, other: RollDataProto) -> RollDataProto:
        """Add the columns and the meta information of another. Values in both must be equal (a NaN is not)."""
        if other.batch is not None:
            self.batch = self.batch if self.batch is not None else RollColumns({}, len(other))
            _add(self.batch, other.batch)
        _add(self.non_tensor_batch, other.non_tensor_batch)
        _add(self.meta_info, other.meta_info)
        return self

    @staticmethod
    def concat(data: Sequence[RollDataProto]) -> RollDataProto:
        """The rows of all parts. `metrics` of the meta information are collected, with a list for each key of any part;
        the rest is the first part's. Raises `KeyError` if not all have the same tensors.
        """
        if len(data) == 1:
            return data[0]
        wanted = set(data[0].batch)
        for part in data[1:]:
            if odd := set(part.batch) ^ wanted:
                raise KeyError(f"these tensors are in some parts of a batch only: {', '.join(sorted(odd))}")
        tensors = {name: load_torch().cat([part.batch[name] for part in data]) for name in data[0].batch}
        names = dict.fromkeys(name for part in data for name in part.non_tensor_batch)
        others = {name: [value for part in data for value in part.non_tensor_batch.get(name, ())] for name in names}
        meta = dict(data[0].meta_info)
        if metrics := [part.meta_info["metrics"] for part in data if part.meta_info.get("metrics") is not None]:
            meta["metrics"] = _collected(metrics)
        return RollDataProto.from_dict(tensors, others, meta)

    def group_by(self, key: str) -> dict[str, RollDataProto]:
        """Parts by the values of a column as text, in the order of their first rows."""
        places: dict[str, list[int]] = {}
        for row, value in enumerate(np.asarray(self[key])):
            places.setdefault(str(value), []).append(row)
        return {name: self.select_idxs(rows) for name, rows in places.items()}


def _add(mine: Any, theirs: Mapping[str, Any]) -> None:
    for name, value in theirs.items():
        same = name not in mine or bool(np.all(np.asarray(value == mine[name])))
        assert same, f"{name} in tensor_dict1 and tensor_dict2 are not the same"
        mine[name] = value


def _collected(metrics: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for of_part in metrics:
        for name, value in of_part.items():
            collected.setdefault(name, []).extend(value if isinstance(value, list) else [value])
    return collected


class VerlColumns(Columns):
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

    columns = VerlColumns

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
        batch = VerlColumns({**(self.batch or {}), **(other.batch or {})}, len(self))
        columns = {**self.non_tensor_batch, **other.non_tensor_batch}
        return VerlDataProto(batch, columns, {**self.meta_info, **other.meta_info})
