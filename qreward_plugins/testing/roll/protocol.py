"""`RollDataProto`: the data that ROLL's schedulers and workers exchange, without Ray and TensorDict.

It has the rules that reward code meets: columns have the length of the batch, a union refuses different values, a
concatenation collects the metrics and keeps the first part's other meta information, and slices share theirs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .columns import RollColumns, objects


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


class RollDataProto:
    """ROLL's `DataProto` (scheduler/protocol.py) with the methods that reward workers and rollout loops use.

    `batch` may be given as a TensorDict or as the `batch` of another; `non_tensor_batch` is a dict of numpy arrays of
    objects. Raises `AssertionError` as ROLL does.
    """

    def __init__(
        self,
        batch: Any = None,
        non_tensor_batch: dict[str, Any] | None = None,
        remote_batch: None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> None:
        _check(remote_batch is None, "the stand-in knows no remote batch")
        self._tensors: dict[str, torch.Tensor] | None = None
        self._size = 0
        if batch is not None:
            self._take(batch)
        self._objects: dict[str, Any] = non_tensor_batch if non_tensor_batch is not None else {}
        self.meta_info: dict[str, Any] = meta_info if meta_info is not None else {}
        self.check_consistency()

    def _take(self, batch: Any) -> None:
        _check(hasattr(batch, "batch_size"), "batch must be a TensorDict or the batch of another DataProto")
        _check(len(batch.batch_size) == 1, "a batch has one batch dimension")
        self._tensors = dict(batch.items())
        self._size = int(batch.batch_size[0])

    @classmethod
    def _of(
        cls, tensors: dict[str, torch.Tensor] | None, size: int, others: dict[str, Any], meta_info: dict[str, Any]
    ) -> RollDataProto:
        made = cls.__new__(cls)
        made._tensors, made._size, made._objects, made.meta_info = tensors, size, others, meta_info
        made.check_consistency()
        return made

    @property
    def batch(self) -> RollColumns:
        return RollColumns(self._tensors, self._size, tensors=True)

    @batch.setter
    def batch(self, value: Any) -> None:
        self._take(value)
        self.check_consistency()

    @property
    def non_tensor_batch(self) -> RollColumns:
        return RollColumns(self._objects, len(self), tensors=False)

    @non_tensor_batch.setter
    def non_tensor_batch(self, value: Any) -> None:
        _check(isinstance(value, (dict, RollColumns)), f"non_tensor_batch is a {type(value).__name__}")
        self._objects = dict(value.items())
        self.check_consistency()

    def __repr__(self) -> str:
        return f"DataProto(batch={self._tensors}, non_tensor_batch={self._objects}, meta_info={self.meta_info})"

    def __len__(self) -> int:
        if self._tensors is None and self._objects:
            return len(next(iter(self._objects.values())))
        return self._size

    def __getitem__(self, item: Any) -> Any:
        if isinstance(item, slice):
            return self.slice(item.start, item.stop, item.step)
        if isinstance(item, (list, np.ndarray, torch.Tensor)):
            return self.select_idxs(item)
        if isinstance(item, (int, np.integer)):
            return self.slice(int(item), int(item) + 1)
        if isinstance(item, str):
            return self._tensors[item] if self._tensors is not None and item in self._tensors else self._objects[item]
        raise TypeError(f"a DataProto cannot be indexed with {type(item).__name__}")

    def __setitem__(self, key: str, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self._objects.pop(key, None)
            self.batch[key] = value
        elif isinstance(value, np.ndarray):
            if self._tensors is not None:
                self._tensors.pop(key, None)
            self._objects[key] = value
        else:
            raise TypeError(f"column {key!r} cannot be a {type(value).__name__}")

    def __delitem__(self, key: str) -> None:
        del (self.batch if key in self.batch else self.non_tensor_batch)[key]

    def check_consistency(self) -> None:
        """Raise `AssertionError` if columns differ in length, or one is in both batches."""
        for key, tensor in (self._tensors or {}).items():
            _check(len(tensor) == self._size, f"tensor {key} has {len(tensor)} rows, the batch has {self._size}")
        if not self._objects:
            return
        _check(self._tensors is not None, "a non_tensor_batch needs a batch")
        both = set(self._objects) & set(self._tensors or ())
        _check(not both, f"batch and non_tensor_batch cannot have overlapping keys: {', '.join(sorted(both))}")
        for key, value in self._objects.items():
            fits = isinstance(value, np.ndarray) and value.dtype == object
            _check(fits, f"{key} of the non_tensor_batch must be a numpy array of dtype object")
            _check(len(value) == self._size, f"{key} has {len(value)} rows, the batch has {self._size}")

    @classmethod
    def from_single_dict(cls, data: Mapping[str, Any], meta_info: dict[str, Any] | None = None) -> RollDataProto:
        for key, value in data.items():
            if not isinstance(value, (torch.Tensor, np.ndarray)):
                raise ValueError(f"column {key!r} cannot be a {type(value).__name__}")
        tensors = {key: value for key, value in data.items() if isinstance(value, torch.Tensor)}
        return cls.from_dict(tensors, {key: data[key] for key in data if key not in tensors}, meta_info)

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, torch.Tensor],
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
        num_batch_dims: int = 1,
    ) -> RollDataProto:
        _check(len(tensors) > 0, "tensors must not be empty")
        _check(num_batch_dims == 1, "the stand-in has one batch dimension")
        sizes = {key: len(tensor) for key, tensor in tensors.items()}
        _check(len(set(sizes.values())) == 1, f"not all tensors have the same batch size: {sizes}")
        others = {key: objects(value) for key, value in (non_tensors or {}).items()}
        return cls._of(dict(tensors), next(iter(sizes.values())), others, meta_info if meta_info is not None else {})

    def to(self, device: Any) -> RollDataProto:
        if self._tensors is not None:
            self._tensors = {key: tensor.to(device) for key, tensor in self._tensors.items()}
        return self

    def clone(self) -> RollDataProto:
        return copy.deepcopy(self)

    def select_idxs(self, idxs: Any) -> RollDataProto:
        """The rows with these numbers, or for booleans the rows that are true, as copies."""
        chosen = torch.as_tensor(np.asarray(idxs) if isinstance(idxs, list) else idxs)
        places = chosen.nonzero().flatten() if chosen.dtype == torch.bool else chosen.long()
        tensors = None if self._tensors is None else {key: value[places] for key, value in self._tensors.items()}
        others = {key: value[places.numpy()] for key, value in self._objects.items()}
        return self._of(tensors, len(places), others, self.meta_info)

    def slice(self, start: int | None = None, end: int | None = None, step: int | None = None) -> RollDataProto:
        """These rows, as views; the meta information is the same object."""
        rows = slice(start, end, step)
        tensors = None if self._tensors is None else {key: value[rows] for key, value in self._tensors.items()}
        others = {key: value[rows] for key, value in self._objects.items()}
        return self._of(tensors, len(range(len(self))[rows]) if tensors is not None else 0, others, self.meta_info)

    def select(
        self,
        batch_keys: Iterable[str],
        non_tensor_batch_keys: Iterable[str],
        meta_info_keys: Iterable[str] | None = None,
        deepcopy: bool = False,
    ) -> RollDataProto:
        wanted, others = list(batch_keys), set(non_tensor_batch_keys)
        meta = self.meta_info
        if meta_info_keys is not None:
            meta = {key: meta[key] for key in meta_info_keys if key in meta}
        kept = {key: value for key, value in self._objects.items() if key in others}
        chosen = self._of({key: self.batch[key] for key in wanted}, self._size, kept, meta)
        return chosen.clone() if deepcopy else chosen

    def pop(
        self, batch_keys: Any = None, non_tensor_batch_keys: Any = None, meta_info_keys: Any = None
    ) -> RollDataProto:
        """Remove columns, and return them as a DataProto."""
        _check(batch_keys is not None, "pop needs batch_keys")
        tensors = {key: self.batch.pop(key) for key in _names(batch_keys)}
        others = {key: self.non_tensor_batch.pop(key) for key in _names(non_tensor_batch_keys)}
        meta = {key: self.meta_info.pop(key) for key in _names(meta_info_keys)}
        return self._of(tensors, len(self), others, meta)

    def rename(self, old_keys: Any = None, new_keys: Any = None) -> RollDataProto:
        old, new = _names(old_keys), _names(new_keys)
        if len(old) != len(new):
            raise ValueError(f"{len(old)} keys cannot get {len(new)} names")
        for before, after in zip(old, new, strict=True):
            self.batch[after] = self.batch.pop(before)
        self.check_consistency()
        return self

    def union(self, other: RollDataProto) -> RollDataProto:
        """Add the columns and the meta information of another. Values in both must be equal (a NaN is not)."""
        if other.batch.keys() or other._tensors is not None:
            if self._tensors is None:
                self._take(other.batch)
            assert self._tensors is not None
            assert other._tensors is not None
            _check(self._size == other._size, f"two batches of {self._size} and {other._size} rows have no union")
            for key, tensor in other._tensors.items():
                _check(
                    key not in self._tensors or self._tensors[key].equal(tensor),
                    f"{key} in tensor_dict1 and tensor_dict2 are not the same",
                )
                self._tensors.setdefault(key, tensor)
        for key, value in other._objects.items():
            same = key not in self._objects or bool(np.all(value == self._objects[key]))
            _check(same, f"{key} in tensor_dict1 and tensor_dict2 are not the same object")
            self._objects[key] = value
        for key, value in other.meta_info.items():
            same = key not in self.meta_info or bool(value == self.meta_info[key])
            _check(same, f"{key} in meta_dict1 and meta_dict2 are not the same object")
            self.meta_info[key] = value
        self.check_consistency()
        return self

    def chunk(self, chunks: int) -> list[RollDataProto]:
        """`chunks` parts of as equal size as possible, in order. Raises `AssertionError` if there are fewer rows."""
        _check(not len(self) or len(self) >= chunks, f"batch_size {len(self)} < chunks {chunks}")
        parts = []
        for places in np.array_split(np.arange(len(self)), chunks):
            start = int(places[0]) if len(places) else 0
            part = self.slice(start, start + len(places))
            if part._tensors is not None:
                part._tensors = {key: value.clone() for key, value in part._tensors.items()}
            parts.append(part)
        return parts

    @staticmethod
    def concat(data: Sequence[RollDataProto], *, global_keys: set[str] | None = None) -> RollDataProto:
        """The rows of all parts. `metrics` (or `global_keys`) of the meta information are collected, with a list for
        each key of any part; the rest is the first part's. Raises `KeyError` if not all have the same tensors.
        """
        if len(data) == 1:
            return data[0]
        with_tensors = [part for part in data if part._tensors is not None]
        tensors = _joined(with_tensors) if with_tensors else None
        names = dict.fromkeys(key for part in data for key in part._objects)
        others = {
            key: objects(value for part in data if key in part._objects for value in part._objects[key])
            for key in names
        }
        meta = dict(data[0].meta_info)
        for key in {"metrics"} if global_keys is None else global_keys:
            values = [part.meta_info.get(key) for part in data]
            first = next((value for value in values if value is not None), None)
            if first is not None:
                meta[key] = _collected(values) if isinstance(first, dict) else values
        return RollDataProto._of(tensors, sum(part._size for part in with_tensors), others, meta)

    def reorder(self, indices: torch.Tensor) -> None:
        """Put the rows into this order, in place."""
        ordered = self.select_idxs(indices.reshape(-1))
        self._tensors, self._size, self._objects = ordered._tensors, ordered._size, ordered._objects

    def group_by(self, keys: Any) -> dict[str, RollDataProto]:
        """Parts by the values of these columns as text (of several joined by `|`), in the order of their first rows."""
        columns = [
            [str(value.numpy() if isinstance(value, torch.Tensor) else value) for value in self[key]]
            for key in _names(keys)
        ]
        places: dict[str, list[int]] = {}
        for row, values in enumerate(zip(*columns, strict=True)):
            places.setdefault("|".join(values), []).append(row)
        return {name: self.select_idxs(rows) for name, rows in places.items()}

    def repeat(self, repeat_times: int = 2, interleave: bool = True) -> RollDataProto:
        """Every row `repeat_times` times: one after the other, or with `interleave=False` the whole batch again."""
        rows = torch.arange(len(self))
        return self.select_idxs(rows.repeat_interleave(repeat_times) if interleave else rows.repeat(repeat_times))


def _names(keys: Any) -> list[str]:
    if keys is None:
        return []
    if not isinstance(keys, (str, list)):
        raise TypeError(f"keys must be a list or a str, not a {type(keys).__name__}")
    return [keys] if isinstance(keys, str) else keys


def _joined(parts: Sequence[RollDataProto]) -> dict[str, torch.Tensor]:
    wanted = parts[0].batch.keys()
    for part in parts[1:]:
        if part.batch.keys() != wanted:
            odd = ", ".join(sorted(part.batch.keys() ^ wanted))
            raise KeyError(f"these tensors are in some parts of a batch only: {odd}. ROLL cannot concatenate them")
    return {key: torch.cat([part.batch[key] for part in parts]) for key in parts[0]._tensors or ()}


def _collected(values: Sequence[Any]) -> dict[str, Any]:
    collected: dict[str, Any] = {}
    for metrics_of_one in values:
        if metrics_of_one is None:
            continue
        if not isinstance(metrics_of_one, dict):
            raise TypeError(f"metrics are a dict, not a {type(metrics_of_one).__name__}: {metrics_of_one!r:.100}")
        for key, value in metrics_of_one.items():
            collected.setdefault(key, []).append(value)
    for key, several in collected.items():
        try:
            flat = np.array(several) if np.isscalar(several[0]) else np.concatenate(several, axis=0)
            collected[key] = flat.tolist()
        except Exception:
            continue  # what numpy cannot join stays a list, as in ROLL
    return collected
