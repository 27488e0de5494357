"""A fake inference engine, which writes responses at once unless the test holds them.

ROLL's requests do not number the responses of a group, so they are counted for each prompt. Slow generations are held
until an event, so a test chooses the slow ones and every run is the same.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..held import HeldGenerations
from .protocol import RollDataProto


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


def answer_by_chance(draft: RollDraft, rng: random.Random) -> str:
    """The default response: the ground truth or, with equal chance, another answer."""
    right = rng.random() < 0.5
    return f"The answer is {draft.ground_truth if right else rng.randrange(100, 1000)}"


class RollEngine:
    """Writes the responses of all schedulers on one event loop; `release` and `wait_until_held` are thread-safe.

    A generation for which `hold` is true is held after its text is written. An abort keeps the first half of its
    tokens; another request continues from there.
    """

    def __init__(self, respond: Respond, hold: Hold | None, tokenizer: Any, seed: int) -> None:
        self.tokenizer = tokenizer
        self._respond = respond
        self._hold = hold
        self._seed = seed
        self._asked: Counter[object] = Counter()
        self._unfinished: dict[object, list[tuple[RollDraft, list[int], int]]] = {}
        self.held: HeldGenerations[tuple[RollDraft, object]] = HeldGenerations()
        """Generations that wait for the test to release them, with their scopes."""

    async def generate(
        self, req: RollDataProto, row: int, *, scope: object, domain: str, prompt_id: int, is_val: bool
    ) -> tuple[list[int], str]:
        """The tokens of another response to this row of a request, and why they end: stop, length or abort.

        `scope` identifies the scheduler and step. Raises the errors of `respond`.
        """
        key = (scope, prompt_id)
        done = req.meta_info.get("pre_output_token_ids", [[]])[0]
        resumed = self._resumed(key, done)
        if resumed is None:
            draft = self._next_draft(req, row, key, domain, prompt_id, is_val)
            tokens = await self._write(draft, scope, self._limit(req))
        else:
            draft, tokens = resumed
        if (
            self._hold is not None
            and resumed is None
            and self._hold(draft)
            and not await self.held.wait((draft, scope))
        ):
            half = max(1, len(tokens) // 2)
            self._unfinished.setdefault(key, []).append((draft, tokens, half))
            return tokens[:half], "abort"
        ended = tokens[-1:] == [self.tokenizer.eos_token_id]
        return tokens[len(done) :], "stop" if ended else "length"

    def _limit(self, req: RollDataProto) -> int:
        return int(req.meta_info["generation_config"]["max_new_tokens"])

    def _resumed(self, key: object, done: list[int]) -> tuple[RollDraft, list[int]] | None:
        for place, (draft, tokens, half) in enumerate(self._unfinished.get(key, ())):
            if done and tokens[:half] == done:
                del self._unfinished[key][place]
                return draft, tokens
        return None

    def _next_draft(
        self, req: RollDataProto, row: int, key: object, domain: str, prompt_id: int, is_val: bool
    ) -> RollDraft:
        number = self._asked[key]
        self._asked[key] += 1
        there = req.batch["attention_mask"][row].bool()
        return RollDraft(
            domain=domain,
            columns={name: values[row] for name, values in req.non_tensor_batch.items()},
            prompt=self.tokenizer.decode(req.batch["input_ids"][row][there]),
            prompt_id=prompt_id,
            number=number,
            is_val=is_val,
            global_step=int(req.meta_info["global_step"]),
        )

    async def _write(self, draft: RollDraft, scope: object, limit: int) -> list[int]:
        rng = random.Random(f"{self._seed}/{scope}/{draft.prompt_id}/{draft.number}")
        written = self._respond(draft, rng)
        text = await written if inspect.isawaitable(written) else written
        tokens = [*self.tokenizer(text)["input_ids"], self.tokenizer.eos_token_id]
        return tokens[:limit]

    def release(self, which: Hold | None = None) -> int:
        """Release held generations for which `which` is true; return their number."""
        return self.held.release(None if which is None else lambda held: which(held[0]))

    def abort(self, scope: object, prompt_id: int | None = None) -> None:
        """Abort the held generations of a scheduler, or of one of its prompts."""
        self.held.abort(lambda held: held[1] == scope and prompt_id in (None, held[0].prompt_id))
