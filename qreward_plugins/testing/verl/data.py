"""verl's `DataProto`, as far as reward code uses it, and its data loader (utils/dataset/rl_dataset.py)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from ..rows import Columns, Rows
from ..tensors import Tensor, objects

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping as in verl's parquet files: `prompt` (messages, or a question; images are parts of a
message's content), `data_source`, `reward_model` with its `ground_truth` (or `ground_truth` itself), `extra_info`, and
any other column."""


def row_of(row: Row, number: int) -> dict[str, Any]:
    """All columns of a row. Raises `KeyError` for one without a prompt."""
    own: dict[str, Any] = {"prompt": row} if isinstance(row, str) else dict(row)
    if isinstance(own["prompt"], str):
        own["prompt"] = [{"role": "user", "content": own["prompt"]}]
    truth = own.pop("ground_truth", None)
    own.setdefault("data_source", "fake/data")
    own.setdefault("reward_model", {"style": "rule", "ground_truth": truth})
    own.setdefault("extra_info", {"index": number})
    return own


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One column of objects for each key."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: objects(row[name] for row in rows if name in row) for name in names}


class VerlDataLoader:
    """Batches of rows. `shuffle` gives their order, which is not torch's; None: the order of `rows`."""

    def __init__(
        self, rows: Sequence[Row], batch_size: int, *, shuffle: random.Random | None = None, drop_last: bool = False
    ) -> None:
        self.dataset = [row_of(row, number) for number, row in enumerate(rows)]
        self.collate_fn: Callable[[Any], dict[str, Any]] = collate
        self._batch_size, self._shuffle, self._drop_last = batch_size, shuffle, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(len(self.dataset)))
        if self._shuffle is not None:
            self._shuffle.shuffle(order)
        for batch in range(len(self)):
            chosen = copy.deepcopy([self.dataset[row] for row in order[batch * self._batch_size :][: self._batch_size]])
            yield self.collate_fn([{**row, "raw_prompt": row["prompt"]} for row in chosen])


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
