"""ROLL's replay buffer: which prompts run, and in which step they count (generate_scheduler.py, `ReplayBuffer`).

Synchronous training is asynchronous training with a ratio of 0: prompts of a step are used in that step or discarded.
With a ratio of 1, as many prompts again are sampled ahead.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

from .protocol import RollDataProto


@dataclass(frozen=True)
class RollItem:
    """A finished response, with its prompt and step."""

    prompt_id: int
    domain: str
    sampling_start_step: int
    data: RollDataProto


@dataclass
class _StepItems:
    """The prompts started in one step."""

    running: set[int] = field(default_factory=set)
    finished: deque[list[RollItem]] = field(default_factory=deque)

    @property
    def samples(self) -> int:
        return sum(map(len, self.finished))

    def take(self, wanted: int) -> list[list[RollItem]]:
        taken: list[list[RollItem]] = []
        while self.finished and sum(map(len, taken)) < wanted:
            taken.append(self.finished.popleft())
        return taken


class ReplayBuffer:
    """`ratio` is `async_generation_ratio`; `additional` prompts may run beyond the batch. For one event loop."""

    def __init__(self, ratio: float, additional: int) -> None:
        self.step: int | None = None
        self._ratio = ratio
        self._additional = additional
        self._wanted = 0
        self._running = 0
        self._extra = 0
        self._completed = 0
        self._next_prompt = 0
        self._steps: dict[int, _StepItems] = {}
        self._begun: dict[int, int | None] = {}
        self._waiting: list[asyncio.Future[None]] = []
        self.full = False
        """Whether no prompt may start now."""

    def advance_step(self, step: int, prompts: int) -> None:
        """Start a step that needs `prompts` more."""
        assert self.step is None or step > self.step, f"step {step} after step {self.step}"
        if not self._wanted:
            self._wanted = math.ceil(prompts * self._ratio)
        self.step = step
        self._steps[step] = _StepItems()
        self._wanted += prompts
        self._tell()

    async def poll(self) -> int:
        """The number of a prompt that may start now."""
        number = self._next_prompt
        self._next_prompt += 1
        while not self._may_begin():
            self.full = True
            await self._change()
        self.full = False
        self._begun[number] = None
        return number

    def _may_begin(self) -> bool:
        if self._running + self._completed < self._wanted:
            self._running += 1
            return True
        if self._wanted and self._running + self._extra < self._additional:
            self._extra += 1
            return True
        return False

    async def begin(self, prompt_id: int) -> int:
        """Bind a prompt to the current step. Raises `CancelledError` if it was aborted meanwhile."""
        while self.step not in self._steps:
            await self._change()
        if prompt_id not in self._begun:
            raise asyncio.CancelledError
        assert self._begun[prompt_id] is None, f"prompt {prompt_id} was begun before"
        self._begun[prompt_id] = self.step
        self._steps[self.step].running.add(prompt_id)
        return self.step

    def commit(self, prompt_id: int, items: list[RollItem]) -> None:
        """Add the responses of a prompt. Raises `CancelledError` if it was aborted meanwhile."""
        if prompt_id not in self._begun:
            raise asyncio.CancelledError
        step = self._begun.pop(prompt_id)
        if step is None:
            raise RuntimeError("Prompt has not been bind to step, cannot commit: use do_generate_and_reward")
        self._steps[step].running.remove(prompt_id)
        self._steps[step].finished.append(items)
        if self._running:
            self._completed += 1
        self._end_one()
        self._tell()

    def abort(self, prompt_id: int) -> None:
        """Remove a prompt, so that another one starts in its place. Does nothing if it is removed already."""
        if prompt_id not in self._begun:
            return
        step = self._begun.pop(prompt_id)
        if step is not None:
            self._steps[step].running.remove(prompt_id)
        self._end_one()
        self._tell()

    def _end_one(self) -> None:
        if self._running:
            self._running -= 1
        else:
            self._extra -= 1

    async def get_batch(self, samples: int) -> list[RollItem]:
        """At least this many responses, oldest steps first; whole prompts only."""
        assert self.step is not None
        oldest = self.step - math.ceil(self._ratio)
        taken: list[list[RollItem]] = []
        for step in [step for step in self._steps if oldest <= step < self.step]:
            missing = samples - sum(map(len, taken))
            share = self._ratio % 1 if step == oldest else 0
            taken += await self._take(self._steps[step], int(samples * share) if share else missing)
            if sum(map(len, taken)) >= samples:
                break
        while (missing := samples - sum(map(len, taken))) > 0:
            await asyncio.sleep(0)  # the prompts of this step may not have started
            taken += await self._take(self._steps[self.step], missing)
        return [item for items in taken for item in items]

    async def _take(self, group: _StepItems, wanted: int) -> list[list[RollItem]]:
        while group.samples < wanted and group.running:
            await self._change()
        return group.take(wanted)

    def gc(self) -> tuple[list[int], list[list[RollItem]]]:
        """Remove steps that are too old, with their running prompts and unused responses."""
        if self.step is None:
            return [], []
        newest = self.step - math.ceil(self._ratio)
        aborted: list[int] = []
        surplus: list[list[RollItem]] = []
        for step in [step for step in self._steps if step <= newest]:
            for prompt_id in sorted(self._steps[step].running):
                self.abort(prompt_id)
                aborted.append(prompt_id)
            surplus += self._steps.pop(step).finished
        return aborted, surplus

    async def _change(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        await future

    def _tell(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
