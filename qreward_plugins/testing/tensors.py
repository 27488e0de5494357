"""Tensors without torch: numpy arrays with the methods that reward code calls on a row of a batch, and the functions of
torch that it calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np


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


def padded(rows: Sequence[Sequence[Any]], *, dtype: Any = np.int64, width: int = 0) -> Tensor:
    """Rows of different lengths as one tensor, padded on the right with zeros."""
    width = max([width, *map(len, rows)])
    out = np.zeros((len(rows), width), dtype=dtype)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row
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


def load_torch() -> Any:
    """torch, or an object with the names of `TORCH` if it is not installed."""
    return import_module("torch") if find_spec("torch") is not None else SimpleNamespace(**TORCH)
