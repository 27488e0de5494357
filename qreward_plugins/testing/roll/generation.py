"""The data set of a domain, encoded and shuffled as ROLL does (rlvr_pipeline.py, collator.py), and a fake inference
engine, which writes responses at once unless the test holds them.

ROLL's requests do not number the responses of a group, so the engine counts them for each prompt.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from ..data_proto import RollDataProto, load_torch, padded
from ..generation import Engine

torch: Any = load_torch()

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping with `messages` (a list, or its JSON) or a `prompt` that is tokenized unchanged, and with
`ground_truth`, `id`, `tag` and any other column. If one row has `images` (Pillow images), all have them, perhaps an
empty list, as in a pipeline for vision models."""


def encode_row(row: Row, number: int, *, domain: str, tokenizer: Any, prompt_length: int) -> dict[str, Any]:
    """A row with its `input_ids` and all columns of ROLL's data sets. Raises `ValueError` if it has no prompt, too long
    a prompt, or another domain.
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
    known = {"id": str(number), "ground_truth": None, "domain": domain, "tag": domain, **own}
    if known["domain"] != domain:
        raise ValueError(f"a row is of the domain {known['domain']!r}, for which there is no reward")
    return {**known, "input_ids": ids}


def collate(
    items: Sequence[Mapping[str, Any]], meta_info: dict[str, Any], *, pad_token_id: int, length: int
) -> RollDataProto:
    """A batch of rows: prompts padded on the left to `length`, other columns as arrays of objects."""
    rows = [item["input_ids"] for item in items]
    mask = padded([[1] * len(ids) for ids in rows], width=length, left=True)
    ids = padded(rows, width=length, fill=pad_token_id, left=True)
    names = dict.fromkeys(name for item in items for name in item if name != "input_ids")
    tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": positions(mask)}
    return RollDataProto.from_dict(
        {name: torch.tensor(np.asarray(values)) for name, values in tensors.items()},
        {name: [item[name] for item in items] for name in names},
        meta_info,
    )


def positions(mask: Any) -> Any:
    """`position_ids` of an attention mask."""
    return np.maximum(np.cumsum(mask, -1) - 1, 0)


def shuffled(items: Iterable[Mapping[str, Any]], seed: int) -> Iterator[Mapping[str, Any]]:
    """Rows in ROLL's order, for ever: shuffled for every epoch, from the seed."""
    order = list(items)
    for epoch in itertools.count():
        random.Random(seed + epoch).shuffle(order)
        yield from list(order)


@dataclass(frozen=True)
class RollDraft:
    """A response to write: the `number`-th (from 0) of its prompt.

    `columns` is the row of the data set, `prompt` its text as tokenized. `prompt_id` counts the prompts that a domain's
    scheduler has started (in the batch path: the row of the batch).
    """

    domain: str
    columns: Mapping[str, Any]
    prompt: str
    prompt_id: int
    number: int
    is_val: bool
    global_step: int

    @property
    def ground_truth(self) -> Any:
        return self.columns.get("ground_truth")


Respond: TypeAlias = Callable[[RollDraft, random.Random], "str | Awaitable[str]"]
Hold: TypeAlias = Callable[[RollDraft], bool]


class RollEngine(Engine[RollDraft]):
    """Writes the responses of all schedulers. A generation for which `hold` is true is held after its text is
    written.
    """

    def __init__(self, respond: Respond, hold: Hold | None, tokenizer: Any, seed: int) -> None:
        super().__init__(respond, hold, seed)
        self.tokenizer = tokenizer
        self._asked: Counter[object] = Counter()

    async def generate(self, req: RollDataProto, row: int, *, scope: object, prompt_id: int, is_val: bool) -> list[int]:
        """The tokens of another response to this row of a request. `scope` identifies the scheduler and step. Raises
        the errors of `respond`.
        """
        number = self._asked[scope, prompt_id]
        self._asked[scope, prompt_id] += 1
        columns = {name: values[row] for name, values in req.non_tensor_batch.items()}
        draft = RollDraft(
            domain=columns["domain"],
            columns=columns,
            prompt=self.tokenizer.decode(req.batch["input_ids"][row][req.batch["attention_mask"][row].bool()]),
            prompt_id=prompt_id,
            number=number,
            is_val=is_val,
            global_step=int(req.meta_info["global_step"]),
        )
        text = await self.released(draft, scope, prompt_id, number)
        tokens: list[int] = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        return tokens[: int(req.meta_info["generation_config"]["max_new_tokens"])]
