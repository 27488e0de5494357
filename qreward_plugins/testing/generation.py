"""What the fake inference engines share: default questions and responses, held generations, and a tokenizer without a
file.

A word with the space before it is a token, and decoding restores the exact text. Tokens like `<|im_start|>` are
special, so that a prompt in ChatML can be decoded with and without its turns.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SPECIAL = re.compile(r"(<\|\w+\|>)")
_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
_WORD = re.compile(r"\s?\S+|\s")


DEFAULT_ROWS: tuple[dict[str, str], ...] = tuple(
    {"prompt": f"What is {number} + {number + 1}?", "ground_truth": str(2 * number + 1)} for number in range(1, 17)
)


def answer_by_chance(draft: Any, rng: random.Random) -> str:
    """The default response: the ground truth (slime's label) or, with equal chance, another answer."""
    truth = draft.label if hasattr(draft, "label") else draft.ground_truth
    return f"The answer is {truth if rng.random() < 0.5 else rng.randrange(100, 1000)}"


class HeldGenerations(Generic[T]):
    """The held generations. `wait` belongs to one event loop; all other methods are thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[int, tuple[T, asyncio.Future[bool]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    async def wait(self, item: T) -> bool:
        """Wait until `item` is released (True) or aborted (False)."""
        ticket: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        with self._changed:
            self._held[id(ticket)] = (item, ticket)
            self._changed.notify_all()
        try:
            return await ticket
        finally:
            with self._changed:
                self._held.pop(id(ticket), None)
                self._changed.notify_all()

    def release(self, which: Callable[[T], bool] | None = None) -> int:
        """Release those for which `which` is true (default: all); return their number."""
        with self._changed:
            chosen = [ticket for item, ticket in self._held.values() if which is None or which(item)]
            for ticket in chosen:
                ticket.get_loop().call_soon_threadsafe(_settle, ticket, True)
                del self._held[id(ticket)]
            self._changed.notify_all()
        return len(chosen)

    def abort(self) -> None:
        """Abort all. Call it from their event loop."""
        with self._changed:
            for _, ticket in self._held.values():
                _settle(ticket, False)

    def wait_until(self, count: int, timeout_s: float) -> None:
        """Block until at least `count` are held. Raises `TimeoutError`."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._held) >= count, timeout_s):
                raise TimeoutError(f"{len(self._held)} generations were held after {timeout_s} s, not {count}")


def _settle(ticket: asyncio.Future[bool], released: bool) -> None:
    if not ticket.done():
        ticket.set_result(released)


class Engine(Generic[T]):
    """Asks a test for responses: `respond(draft, rng)` may be async, and `hold(draft)` true holds one. It lives on one
    event loop; `held` may be released from any thread.
    """

    def __init__(self, respond: Callable[[T, random.Random], Any], hold: Callable[[T], bool] | None, seed: int) -> None:
        self.held: HeldGenerations[T] = HeldGenerations()
        self._respond, self._hold, self._seed = respond, hold, seed

    async def written(self, draft: T, *scope: object) -> Any:
        """What `respond` returns, with random numbers of the seed and `scope`. Raises whatever `respond` raises."""
        written = self._respond(draft, random.Random("/".join(map(str, (self._seed, *scope)))))
        return await written if inspect.isawaitable(written) else written

    async def released(self, draft: T, *scope: object) -> Any:
        """The same, after its release if it is held."""
        written = await self.written(draft, *scope)
        if self.holds(draft):
            await self.held.wait(draft)
        return written

    def holds(self, draft: T) -> bool:
        return self._hold is not None and self._hold(draft)


class WordTokenizer:
    """The parts of a `transformers` tokenizer that reward code uses. Words get ids in the order of first use."""

    pad_token, pad_token_id = "<|endoftext|>", 0
    eos_token, eos_token_id = "<|im_end|>", 1
    padding_side = "left"

    def __init__(self) -> None:
        self._texts = [self.pad_token, self.eos_token]
        self._ids = {text: number for number, text in enumerate(self._texts)}

    def __call__(self, text: Any, **_: Any) -> dict[str, Any]:
        ids = self.encode(text)
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def encode(self, text: str, **_: Any) -> list[int]:
        """The ids of a text, without added tokens."""
        pieces = [
            piece
            for part in _SPECIAL.split(text)
            for piece in ([part] if _SPECIAL.fullmatch(part) else _WORD.findall(part))
        ]
        for piece in pieces:
            if piece not in self._ids:
                self._ids[piece] = len(self._texts)
                self._texts.append(piece)
        return [self._ids[piece] for piece in pieces]

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """The text of ids, which may be a tensor. Raises `IndexError` for an unknown id."""
        texts = [self._texts[int(number)] for number in _flat(token_ids)]
        return "".join(text for text in texts if not (skip_special_tokens and _SPECIAL.fullmatch(text)))

    def batch_decode(self, sequences: Iterable[Any], skip_special_tokens: bool = False, **_: Any) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **_: Any,
    ) -> Any:
        """ChatML. An image is written as in the template of Qwen-VL."""
        text = "".join(f"<|im_start|>{turn['role']}\n{_written(turn['content'])}<|im_end|>\n" for turn in conversation)
        text += "<|im_start|>assistant\n" if add_generation_prompt else ""
        return self.encode(text) if tokenize else text


def _written(content: Any) -> str:
    if not isinstance(content, (list, tuple)):
        return str(content)
    return "".join(str(part.get("text", _IMAGE)) for part in content)


def _flat(token_ids: Any) -> list[Any]:
    listed = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
    return listed if isinstance(listed, list) else [listed]
