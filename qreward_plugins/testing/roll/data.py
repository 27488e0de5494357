"""The data set of a domain: encodes, shuffles and collates rows as ROLL does (rlvr_pipeline.py, collator.py)."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from .columns import objects

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping with `messages` (a list, or its JSON) or a `prompt` that is tokenized unchanged, and with
`ground_truth`, `id`, `tag` and any other column. If one row has `images` (Pillow images), all have them, perhaps an
empty list, as in a pipeline for vision models."""

DEFAULT_ROWS: tuple[dict[str, str], ...] = tuple(
    {"prompt": f"What is {number} + {number + 1}?", "ground_truth": str(2 * number + 1)} for number in range(1, 17)
)


def encode_row(row: Row, number: int, *, domain: str, tag: str, tokenizer: Any, prompt_length: int) -> dict[str, Any]:
    """A row with its `input_ids` and all columns of ROLL's data sets. Raises `ValueError` if it has no prompt, or too
    long a prompt.
    """
    own: dict[str, Any] = {"messages": [{"role": "user", "content": row}]} if isinstance(row, str) else dict(row)
    if "messages" in own:
        turns = json.loads(own["messages"]) if isinstance(own["messages"], str) else own["messages"]
        text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    elif "prompt" in own:
        text = own["prompt"]
    else:
        raise ValueError(f"a row needs 'messages' or a 'prompt': {own!r:.200}")
    ids = list(tokenizer(text)["input_ids"])
    if len(ids) > prompt_length:
        raise ValueError(f"a prompt has {len(ids)} tokens: ROLL leaves out what is longer than prompt_length")
    if "images" in own:
        # What ROLL sends to the inference engine (collator.py: DataCollatorWithPaddingForMM).
        images = list(own.pop("images") or ())
        seen: dict[str, Any] = {"multi_modal_data": {"image": images}, "mm_processor_kwargs": {}} if images else {}
        own["multi_modal_data"] = {"prompt_token_ids": ids, **seen}
    known = {"id": str(number), "ground_truth": None, "domain": domain, "tag": tag}
    return {**known, **own, "input_ids": ids}


def collate(items: Sequence[Mapping[str, Any]], *, pad_token_id: int, length: int) -> dict[str, Any]:
    """A batch of rows: prompts padded on the left to `length`, other columns as arrays of objects."""
    ids = torch.full((len(items), length), pad_token_id)
    mask = torch.zeros((len(items), length), dtype=torch.long)
    for place, item in enumerate(items):
        tokens = item["input_ids"]
        if tokens:
            ids[place, -len(tokens) :] = torch.tensor(tokens)
            mask[place, -len(tokens) :] = 1
    columns = dict.fromkeys(name for item in items for name in item if name != "input_ids")
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        **{name: objects(item[name] for item in items) for name in columns},
    }


class RollDataset:
    """Rows in ROLL's order: shuffled for every epoch, from the seed."""

    def __init__(self, items: Iterable[Mapping[str, Any]], seed: int) -> None:
        self._items = list(items)
        self._seed = seed
        self._epoch = 0
        self._order = list(range(len(self._items)))
        self._left: list[int] = []
        self._shuffle()

    def __len__(self) -> int:
        return len(self._items)

    def next(self) -> Mapping[str, Any]:
        """The next row; after the last one the next epoch starts."""
        if not self._left:
            self._epoch += 1
            self._shuffle()
        return self._items[self._left.pop()]

    def _shuffle(self) -> None:
        random.Random(self._seed + self._epoch).shuffle(self._order)
        self._left = self._order[::-1]
