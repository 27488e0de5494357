"""slime's data source, with its buffer of unfinished groups.

At the end of an epoch it behaves as slime's does: prompts of the next epoch fill up the request, but a data set smaller
than a request wraps only once, so fewer groups come.
"""

from __future__ import annotations

import copy
import random
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from ..flags import refuse_unknown
from .hooks import HookLoader
from .samples import SlimeSample

Row: TypeAlias = "str | list[dict[str, Any]] | Mapping[str, Any] | SlimeSample"
"""A prompt, a conversation, `{"prompt": ..., "label": ..., "metadata": {...}, "images": [...]}`, or a sample. Images
are Pillow images, as slime has them after it has read a row."""

DEFAULT_PROMPTS: tuple[dict[str, str], ...] = tuple(
    {"prompt": f"What is {number} + {number + 1}?", "label": str(2 * number + 1)} for number in range(1, 17)
)


def prompt_of(row: Row) -> SlimeSample:
    """Turn a row of a data set into a sample. Raises `TypeError` for a key that a row does not have."""
    if isinstance(row, SlimeSample):
        return copy.deepcopy(row)
    if isinstance(row, str | list):
        return SlimeSample(prompt=copy.deepcopy(row))
    refuse_unknown(row, ("prompt", "label", "metadata", "images"), "a row of prompts")
    if "prompt" not in row:
        raise TypeError(f"a row of prompts needs a 'prompt': {dict(row)!r:.200}")
    own = copy.deepcopy(dict(row))
    # What slime keeps of a row if there is a processor (slime/utils/processing_utils.py: `process_vision_info`).
    inputs = {"images": own["images"] or None, "videos": None} if "images" in own else None
    return SlimeSample(
        prompt=own["prompt"], label=own.get("label"), metadata=own.get("metadata") or {}, multimodal_inputs=inputs
    )


class SlimeDataSource:
    """Groups of `n_samples_per_prompt` samples: first those put back, then new ones from the prompts, round and round.

    `buffer` holds the groups that were put back. It is what slime's hooks get as `data_source`.
    """

    def __init__(self, args: Namespace, loader: HookLoader, rows: Iterable[Row]) -> None:
        self.args = args
        self.buffer: list[list[SlimeSample]] = []
        self.metadata: dict[str, Any] = {}
        self.epoch_id = 0
        self.sample_offset = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self._take = _take_first if args.buffer_filter_path is None else loader.load(args.buffer_filter_path)
        self._prompts = [prompt_of(row) for row in rows]
        if not self._prompts:
            raise ValueError("prompts is empty: slime would wait for ever for a batch")
        self._order = list(self._prompts)
        if args.rollout_shuffle:
            self._shuffle()

    def __len__(self) -> int:
        return len(self._prompts)

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        """`num_samples` groups (fewer only at the end of an epoch of a small data set)."""
        groups = list(self._take(self.args, None, self.buffer, num_samples)) if self.buffer and num_samples else []
        missing = num_samples - len(groups)
        return groups + [self._group_of(prompt) for prompt in self._next_prompts(missing)] if missing else groups

    def add_samples(self, samples: list[list[SlimeSample]]) -> None:
        """Put groups back. Raises `AssertionError` for anything that is not a list of whole groups."""
        if not samples:
            return
        assert isinstance(samples, list), f"groups must come in a list, not in a {type(samples)}"
        assert isinstance(samples[0], list), f"a group must be a list, not a {type(samples[0])}"
        size = self.args.n_samples_per_prompt
        for group in samples:
            assert len(group) == size, f"a group must have n_samples_per_prompt = {size} samples, not {len(group)}"
            self.buffer.append(group)

    def get_buffer_length(self) -> int:
        """How many groups wait in the buffer."""
        return len(self.buffer)

    def _next_prompts(self, count: int) -> list[SlimeSample]:
        end = self.sample_offset + count
        chosen = self._order[self.sample_offset : end]
        if end <= len(self._order):
            self.sample_offset = end
            return chosen
        missing = count - len(chosen)
        self.epoch_id += 1
        if self.args.rollout_shuffle:
            self._shuffle()
        self.sample_offset = missing
        return chosen + self._order[:missing]

    def _shuffle(self) -> None:
        self._order = list(self._prompts)
        random.Random(self.args.rollout_seed + self.epoch_id).shuffle(self._order)

    def _group_of(self, prompt: SlimeSample) -> list[SlimeSample]:
        group = []
        for _ in range(self.args.n_samples_per_prompt):
            sample = copy.deepcopy(prompt)
            sample.group_index = self.sample_group_index
            sample.index = self.sample_index
            self.sample_index += 1
            group.append(sample)
        self.sample_group_index += 1
        return group


def _take_first(
    args: Namespace, rollout_id: int | None, buffer: list[list[SlimeSample]], num_samples: int
) -> list[list[SlimeSample]]:
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken
