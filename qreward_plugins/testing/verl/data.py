"""verl's data set and data loader (utils/dataset/rl_dataset.py): rows as reward managers meet their columns."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..tensors import objects

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
