"""A fake inference engine, which writes responses at once unless the test holds them.

Tests of oversampling and aborts need slow generations. Here a generation is held until an event instead of for some
time, so that a test chooses the slow ones and every run is the same.
"""

from __future__ import annotations

import asyncio
import inspect
import random
import zlib
from argparse import Namespace
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from ..held import HeldGenerations
from .samples import SlimeSample

Respond: TypeAlias = Callable[[SlimeSample, random.Random], "str | Awaitable[str | None] | None"]
Hold: TypeAlias = Callable[[SlimeSample], bool]

END_TOKEN = 0


def tokens_of(text: str) -> list[int]:
    """One token a word, stable between processes; never `END_TOKEN`."""
    return [1 + zlib.crc32(word.encode()) % 50_000 for word in text.split()]


def answer_by_chance(sample: SlimeSample, rng: random.Random) -> str:
    """The default response: the label or, with equal chance, another answer."""
    right = rng.random() < 0.5
    return f"The answer is {sample.label if right else rng.randrange(100, 1000)}"


class SlimeEngine:
    """Plays `/generate` with seeded responses, and aborts.

    `respond` returns the text of a generation, or None if the engine aborted it; it may be async. A generation for
    which `hold` is true is held after its text is written.
    """

    def __init__(self, respond: Respond, hold: Hold | None, seed: int) -> None:
        self._respond = respond
        self._hold = hold
        self._seed = seed
        self.held: HeldGenerations[SlimeSample] = HeldGenerations()
        """Generations that wait for the test to release them."""
        self._aborted = asyncio.Event()

    def rng(self, *scope: object) -> random.Random:
        """A random number generator that depends only on the seed and `scope`."""
        return random.Random("/".join(str(part) for part in (self._seed, *scope)))

    async def generate(
        self, args: Namespace, sample: SlimeSample, sampling_params: dict[str, Any], rollout_id: int
    ) -> SlimeSample:
        """Append to the response of `sample`. Raises `AssertionError` if it is finished."""
        assert sample.status in (SlimeSample.Status.PENDING, SlimeSample.Status.ABORTED), f"status {sample.status}"
        limit = sampling_params.get("max_new_tokens")
        if limit is not None:
            limit -= sample.response_length
            assert limit >= 0, f"{sample.response_length} tokens are more than max_new_tokens"
            if limit == 0:
                sample.status = SlimeSample.Status.TRUNCATED
                return sample
        rng = self.rng(rollout_id, sample.group_index, sample.index, sample.prompt)
        text = await self._text_of(sample, rng)
        if not sample.tokens:
            sample.tokens = tokens_of(str(sample.prompt)) or [END_TOKEN]
        words = [] if text is None else text.split()
        reason = "abort" if text is None else "stop"
        tokens = tokens_of(text or "") + ([END_TOKEN] if reason == "stop" else [])
        if limit is not None and len(tokens) > limit:
            words = words[:limit]
            reason, tokens, text = "length", tokens[:limit], " ".join(words)
        if text is not None and self._hold is not None and self._hold(sample) and not await self._released(sample):
            done = len(words) // 2
            reason, tokens, text = "abort", tokens[:done], " ".join(words[:done])
        joint = " " if sample.response and text else ""
        sample.append_response_tokens(
            args,
            tokens=tokens,
            log_probs=[0.0] * len(tokens),
            text=joint + (text or ""),
            meta_info={"finish_reason": {"type": reason}},
        )
        return sample

    async def _text_of(self, sample: SlimeSample, rng: random.Random) -> str | None:
        written = self._respond(sample, rng)
        if not inspect.isawaitable(written):
            return written
        writing = asyncio.ensure_future(written)
        aborting = asyncio.ensure_future(self._aborted.wait())
        try:
            await asyncio.wait((writing, aborting), return_when=asyncio.FIRST_COMPLETED)
            return writing.result() if writing.done() else None
        finally:
            for task in (writing, aborting):
                task.cancel()
            await asyncio.gather(writing, aborting, return_exceptions=True)

    async def _released(self, sample: SlimeSample) -> bool:
        return not self._aborted.is_set() and await self.held.wait(sample)

    def abort(self) -> None:
        """Abort running generations: a held one keeps the first half of its words."""
        self._aborted.set()
        self.held.abort()

    def reset(self) -> None:
        """Generate again."""
        self._aborted.clear()

    async def until_aborted(self) -> None:
        """Return once generation has been aborted."""
        await self._aborted.wait()
