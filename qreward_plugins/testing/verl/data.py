"""verl's data set and data loader (utils/dataset/rl_dataset.py): rows as reward managers meet their columns."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from .tensors import VerlTensor, objects, tensor

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping as in verl's parquet files: `prompt` (messages, or a question), `data_source`,
`reward_model` with its `ground_truth` (or `ground_truth` itself), `extra_info` and any other column."""

DEFAULT_ROWS: tuple[dict[str, Any], ...] = tuple(
    {"prompt": f"What is {number} + {number + 1}?", "ground_truth": str(2 * number + 1)} for number in range(1, 17)
)


def row_of(row: Row, number: int) -> dict[str, Any]:
    """All columns of a row. Raises `ValueError` for one without a prompt."""
    own: dict[str, Any] = {"prompt": row} if isinstance(row, str) else dict(row)
    if "prompt" not in own:
        raise ValueError(f"a row needs a 'prompt': {row!r:.200}")
    if isinstance(own["prompt"], str):
        own["prompt"] = [{"role": "user", "content": own["prompt"]}]
    truth = own.pop("ground_truth", None)
    own.setdefault("data_source", "fake/data")
    own.setdefault("reward_model", {"style": "rule", "ground_truth": truth})
    own.setdefault("extra_info", {"index": number})
    return own


def collate(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One column for each key: tensors stacked, everything else as objects."""
    columns: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)
    return {
        name: tensor(values) if isinstance(values[0], VerlTensor) else objects(values)
        for name, values in columns.items()
    }


class VerlDataset:
    """Rows; each access gives a row anew."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row_of(row, number) for number, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = copy.deepcopy(self._rows[number])
        row["raw_prompt"] = row["prompt"]
        row["dummy_tensor"] = tensor([0], "uint8")
        info = row["extra_info"] = row["extra_info"] if row.get("extra_info") is not None else {}
        row["index"] = info.get("index", 0)
        row["tools_kwargs"] = info.get("tools_kwargs", {})
        row["interaction_kwargs"] = info.get("interaction_kwargs", {})
        return row


class VerlDataLoader:
    """Batches of rows. Shuffled rows come in another order than torch's, the same for the same seed."""

    def __init__(
        self, dataset: VerlDataset, batch_size: int, *, shuffle: bool, drop_last: bool, rng: random.Random
    ) -> None:
        self.dataset = dataset
        self.collate_fn: Callable[[Any], dict[str, Any]] = collate
        self._batch_size, self._shuffle, self._drop_last, self._rng = batch_size, shuffle, drop_last, rng

    def __len__(self) -> int:
        whole, rest = divmod(len(self.dataset), self._batch_size)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        order = list(range(len(self.dataset)))
        if self._shuffle:
            self._rng.shuffle(order)
        for start in range(0, len(order), self._batch_size):
            chosen = order[start : start + self._batch_size]
            if len(chosen) == self._batch_size or not self._drop_last:
                yield self.collate_fn([self.dataset[number] for number in chosen])
