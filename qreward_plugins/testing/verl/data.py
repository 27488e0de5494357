"""verl's data set and data loader (utils/dataset/rl_dataset.py): rows as reward managers meet their columns."""

from __future__ import annotations

import copy
import io
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..tensors import Tensor, objects, tensor

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping as in verl's parquet files: `prompt` (messages, or a question), `data_source`,
`reward_model` with its `ground_truth` (or `ground_truth` itself), `extra_info`, `images` for the places `<image>` of
the prompt, and any other column."""

_PLACE = re.compile("(<image>|<video>|<audio>)")

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
        name: tensor(values) if isinstance(values[0], Tensor) else objects(values) for name, values in columns.items()
    }


def build_messages(messages: list[Any], images: Sequence[Any]) -> list[Any]:
    """Put the images of a row into its prompt, in place, as `RLHFDataset._build_messages` does.

    An image is a Pillow image, a mapping with `bytes` or `image`, or a path. Raises `AssertionError` if the prompt has
    another number of places, and `TypeError` for another image.
    """
    if not images:
        return messages
    left = list(images)
    for message in messages:
        if not isinstance(message["content"], str):
            continue
        segments = [segment for segment in _PLACE.split(message["content"]) if segment]
        message["content"] = [
            _image_part(left, len(images)) if segment == "<image>" else {"type": "text", "text": segment}
            for segment in segments
        ]
    assert not left, f"image_offset {len(images) - len(left)} != len(images) {len(images)}"
    return messages


def _image_part(left: list[Any], count: int) -> dict[str, Any]:
    assert left, f"image_offset {count} >= len(images) {count}"
    image = left.pop(0)
    if isinstance(image, Mapping):
        if "bytes" not in image:
            return {"type": "image", **image}
        from PIL import Image

        return {"type": "image", **image, "image": Image.open(io.BytesIO(image["bytes"]))}
    if isinstance(image, (str, os.PathLike)):
        return {"type": "image", "image": os.fspath(image)}
    if not hasattr(image, "convert"):
        raise TypeError(f"image must be dict, PIL.Image, or path-like, unsupported image type: {type(image)}")
    return {"type": "image", "image": image.convert("RGB")}


class VerlDataset:
    """Rows; each access gives a row anew."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = [row_of(row, number) for number, row in enumerate(rows)]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = copy.deepcopy(self._rows[number])
        row["raw_prompt"] = build_messages(row["prompt"], row.pop("images", None) or [])
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
