"""slime's data source with its buffer of unfinished groups, and a fake inference engine.

The engine writes responses at once unless the test holds them. So a test chooses which generations are slow, and every
run is the same.
"""

from __future__ import annotations

import copy
import itertools
import random
import zlib
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeAlias

from ..generation import DEFAULT_ROWS, Engine
from .samples import Group, Row, SlimeSample, prompt_of

Respond: TypeAlias = Callable[[SlimeSample, random.Random], "str | Awaitable[str | None] | None"]
Hold: TypeAlias = Callable[[SlimeSample], bool]

DEFAULT_PROMPTS = tuple({"prompt": row["prompt"], "label": row["ground_truth"]} for row in DEFAULT_ROWS)
END_TOKEN = 0


class SlimeDataSource:
    """Groups of `n_samples_per_prompt` samples: first those put back, then new ones from the prompts, round and round.

    `buffer` holds the groups that were put back. It is what slime's hooks get as `data_source`.
    """

    def __init__(self, args: Namespace, rows: Iterable[Row]) -> None:
        self.args = args
        self.buffer: list[Group] = []
        self._prompts = [prompt_of(row) for row in rows]
        if not self._prompts:
            raise ValueError("prompts is empty: slime would wait for ever for a batch")
        self._new = enumerate(itertools.cycle(self._prompts))
        self._index = itertools.count()

    def get_samples(self, num_samples: int) -> list[Group]:
        """`num_samples` groups."""
        taken, self.buffer = self.buffer[:num_samples], self.buffer[num_samples:]
        return taken + [self._group() for _ in range(num_samples - len(taken))]

    def add_samples(self, samples: list[Group]) -> None:
        """Put groups back. Raises `AssertionError` for one that is not whole."""
        size = self.args.n_samples_per_prompt
        for group in samples:
            assert len(group) == size, f"a group must have n_samples_per_prompt = {size} samples, not {len(group)}"
            self.buffer.append(group)

    def _group(self) -> Group:
        number, prompt = next(self._new)
        group = [copy.deepcopy(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for sample in group:
            sample.group_index, sample.index = number, next(self._index)
        return group


def tokens_of(text: str) -> list[int]:
    """One token a word, stable between processes; never `END_TOKEN`."""
    return [1 + zlib.crc32(word.encode()) % 50_000 for word in text.split()]


class SlimeEngine(Engine[SlimeSample]):
    """Plays `/generate` with seeded responses, and aborts.

    `respond` returns the text of a generation, or None if the engine aborted it; it may be async. A generation for
    which `hold` is true is held after its text is written.
    """

    def __init__(self, respond: Respond, hold: Hold | None, seed: int) -> None:
        super().__init__(respond, hold, seed)
        self.aborted = False
        """Set when the batch is full: held generations keep the first half of their words."""

    async def generate(self, sample: SlimeSample, rollout_id: int) -> SlimeSample:
        """Append to the response of `sample`. Raises `AssertionError` if it is finished."""
        assert sample.status in (SlimeSample.Status.PENDING, SlimeSample.Status.ABORTED), f"status {sample.status}"
        text = await self.written(sample, rollout_id, sample.group_index, sample.index, sample.prompt)
        sample.tokens = sample.tokens or tokens_of(str(sample.prompt)) or [END_TOKEN]
        reason, text = ("abort", "") if text is None else ("stop", text)
        held = reason == "stop" and self.holds(sample)
        if held and (self.aborted or not await self.held.wait(sample)):
            words = text.split()
            reason, text = "abort", " ".join(words[: len(words) // 2])
        tokens = tokens_of(text) + [END_TOKEN] * (reason == "stop")
        sample.append_response_tokens(
            tokens=tokens,
            log_probs=[0.0] * len(tokens),
            text=" " * bool(sample.response and text) + text,
            meta_info={"finish_reason": {"type": reason}},
        )
        return sample

    def abort(self) -> None:
        """End held generations, and hold no further one."""
        self.aborted = True
        self.held.abort()
