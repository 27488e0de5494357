"""`RollDataProto`: the data that ROLL's schedulers and workers exchange, without Ray and TensorDict.

It has the rules that reward code meets: columns have the length of the batch, a union refuses different values, a
concatenation collects the metrics and keeps the first part's other meta information, and slices share theirs. Its
tensors are torch's, or numpy arrays with their methods where torch is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..rows import Columns, Rows
from ..tensors import load_torch, objects

torch: Any = load_torch()


class TensorColumns(Columns):
    """The `batch` of a `RollDataProto`. Raises `AssertionError` for what is no tensor, or of another length."""

    def __setitem__(self, name: str, values: Any) -> None:
        assert isinstance(values, torch.Tensor), f"column {name!r} is a {type(values).__name__}"
        size = self.batch_size[0]
        assert len(values) == size, f"column {name!r} has {len(values)} rows, the batch has {size}"
        super().__setitem__(name, values)


class RollDataProto(Rows):
    """ROLL's `DataProto` (scheduler/protocol.py) with the methods that reward workers and rollout loops use. Raises
    `AssertionError` as ROLL does.
    """

    columns = TensorColumns

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Any],
        non_tensors: Mapping[str, Any] | None = None,
        meta_info: dict[str, Any] | None = None,
    ) -> RollDataProto:
        assert tensors, "tensors must not be empty"
        batch = TensorColumns(tensors, len(next(iter(tensors.values()))))
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
            self.batch = self.batch if self.batch is not None else TensorColumns({}, len(other))
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
        tensors = {name: torch.cat([part.batch[name] for part in data]) for name in data[0].batch}
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
