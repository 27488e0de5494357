"""verl's data set and data loader (utils/dataset/rl_dataset.py): rows as reward managers meet their columns."""

from __future__ import annotations

import copy
import io
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from ..tensors import objects

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping as in verl's parquet files: `prompt` (messages, or a question), `data_source`,
`reward_model` with its `ground_truth` (or `ground_truth` itself), `extra_info`, `images` for the places `<image>` of
the prompt, and any other column."""

_PLACE = re.compile("(<image>)")


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


def with_images(messages: list[Any], images: Sequence[Any]) -> list[Any]:
    """The messages of a prompt with the images of its row at their places. An image is a Pillow image, or a mapping
    with its `bytes`. Raises `AssertionError` if the prompt has another number of places.
    """
    texts = [message for message in messages if isinstance(message["content"], str)] if images else []
    places = sum(message["content"].count("<image>") for message in texts)
    assert places == len(images), f"the prompt has {places} places for {len(images)} images"
    left = iter(images)
    for message in texts:
        parts = filter(None, _PLACE.split(message["content"]))
        message["content"] = [
            {"type": "image", "image": _opened(next(left))} if part == "<image>" else {"type": "text", "text": part}
            for part in parts
        ]
    return messages


def _opened(image: Any) -> Any:
    if not isinstance(image, Mapping):
        return image
    from PIL import Image

    return Image.open(io.BytesIO(image["bytes"]))


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
            chosen = order[batch * self._batch_size : (batch + 1) * self._batch_size]
            yield self.collate_fn([self._columns(number) for number in chosen])

    def _columns(self, number: int) -> dict[str, Any]:
        row = copy.deepcopy(self.dataset[number])
        row["raw_prompt"] = with_images(row["prompt"], row.pop("images", None) or [])
        row["extra_info"] = row["extra_info"] if row["extra_info"] is not None else {}
        return row
