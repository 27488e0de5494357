"""verl's data loader (utils/dataset/rl_dataset.py), and a stand-in for the inference engine.

The engine writes responses at once, unless the test holds them back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..data_proto import objects
from ..generation import Engine

Row: TypeAlias = "str | Mapping[str, Any]"
"""A question, or a mapping as in verl's parquet files: `prompt` (messages, or a question; images are parts of a
message's content), `data_source`, `reward_model` with its `ground_truth` (or `ground_truth` itself), `extra_info`, and
any other column."""


def row_of(row: Row, number: int) -> dict[str, Any]:
    """All columns of a row. Raises `ValueError` for one without a prompt."""
    own: dict[str, Any] = {"prompt": row} if isinstance(row, str) else dict(row)
    if "prompt" not in own:
        raise ValueError(f"a row needs a 'prompt': {own!r:.200}")
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


@dataclass(frozen=True)
class VerlDraft:
    """A response that is to be written: the `number`-th (from 0) of its prompt in this step. `columns` is its row."""

    columns: Mapping[str, Any]
    prompt: str
    uid: str
    number: int
    validate: bool
    global_step: int

    @property
    def ground_truth(self) -> Any:
        return (self.columns.get("reward_model") or {}).get("ground_truth")


@dataclass(frozen=True)
class VerlOutput:
    """What an agent loop returns. `parts`: what the model wrote, what a tool answered, what the model wrote, and so on;
    only the model's tokens are trained. An output with a `reward_score` is not scored by the reward manager.
    `extra_fields` reach it as `tool_extra_fields`.
    """

    parts: Sequence[str] = ()
    num_turns: int | None = None
    reward_score: float | None = None
    extra_fields: Mapping[str, Any] = field(default_factory=dict)


Written: TypeAlias = "str | VerlOutput | Sequence[VerlOutput]"
Respond: TypeAlias = Callable[[VerlDraft, random.Random], "Written | Awaitable[Written]"]
Hold: TypeAlias = Callable[[VerlDraft], bool]


@dataclass
class AgentOutput:
    """One output of a trajectory, in tokens."""

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    num_turns: int
    reward_score: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class VerlEngine(Engine[VerlDraft]):
    """Writes the responses."""

    def __init__(self, respond: Respond, hold: Hold | None, tokenizer: Any, seed: int) -> None:
        super().__init__(respond, hold, seed)
        self.tokenizer = tokenizer

    async def run(
        self, columns: Mapping[str, Any], number: int, *, validate: bool, global_step: int, response_length: int
    ) -> list[AgentOutput]:
        """The outputs of one trajectory. Raises whatever `respond` raises."""
        prompt = self.tokenizer.apply_chat_template(
            list(columns["raw_prompt"]), tokenize=False, add_generation_prompt=True
        )
        draft = VerlDraft(columns, prompt, str(columns["uid"]), number, validate, global_step)
        written = await self.released(draft, draft.uid, number)
        if isinstance(written, (str, VerlOutput)):
            written = [VerlOutput([written], num_turns=2) if isinstance(written, str) else written]
        return [self._tokens(output, prompt, response_length) for output in written]

    def _tokens(self, output: VerlOutput, prompt: str, limit: int) -> AgentOutput:
        ids: list[int] = []
        mask: list[int] = []
        for place, part in enumerate(output.parts):
            tokens = list(self.tokenizer(part)["input_ids"])
            if place == len(output.parts) - 1 and part:
                tokens.append(self.tokenizer.eos_token_id)
            ids += tokens
            mask += [1 - place % 2] * len(tokens)
        return AgentOutput(
            prompt_ids=list(self.tokenizer(prompt)["input_ids"]),
            response_ids=ids[:limit],
            response_mask=mask[:limit],
            num_turns=output.num_turns if output.num_turns is not None else len(output.parts) + 1,
            reward_score=output.reward_score,
            extra_fields=dict(output.extra_fields),
        )
