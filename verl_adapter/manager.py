"""`QRewardManager`: verl's reward manager with one async call per trajectory (verl >= 0.7).

verl starts `reward.num_workers` processes, each with one manager, and calls `run_single` on the process's event loop
while the rollout still runs. The constructor makes the engine, so that mistakes in the configuration end the run before
the first rollout. The engine binds to the loop with the first call.

A worker does not know the siblings of a sample. So a failed sample returns at once, with a mark, and the hooks in the
trainer's process (`advantages`, `metrics`) compute as if it had never been sampled. A row that cannot be read is a
failed sample.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from qreward_plugins import BudgetSpent, Cause, Failed, Outcome, RewardEngine, Sample, Scored
from qreward_plugins.adapters import ENDS_RUN, RunningMeans, compares_siblings, in_ray_actor, number_of

from . import trainer_hooks
from .metrics import warn_once
from .rewards import ExtraInfo
from .rollouts import ResponseTokens, to_sample, unreadable
from .settings import ComputeScore, load_settings, open_reward_functions, with_reward_model
from .siblings import PENDING, HandOver
from .startup import check_columns, refuse_unserved
from .trainers import is_scored_at_once, processes_of, trainer_of

_SLICE_S = 0.005
"""Seconds for which rows are read before other work of the event loop goes on."""

_Read: TypeAlias = "tuple[ResponseTokens, Sample | None] | BaseException"
"""The tokens of a row, and its sample; None if that has to be made in a thread. Or why it cannot be read."""


class QRewardManager(RewardManagerBase):  # type: ignore[misc]
    """verl's reward manager `qreward`.

    The arguments are verl's (trainer/ppo/reward.py). Raises `ConfigurationError` with all mistakes in the
    configuration.
    """

    needs_trainer_hooks = True
    """By this, `trainer_hooks` knows a run of ours or of a subclass."""

    def __init__(
        self,
        config: DictConfig,
        tokenizer: Any,
        compute_score: ComputeScore | None = None,
        reward_router_address: str | None = None,
        reward_model_tokenizer: Any = None,
    ) -> None:
        # Not super().__init__: it takes two arguments in verl 0.7.0 and three later. All that it sets is set here.
        self.config = config
        self.tokenizer = tokenizer
        self.compute_score = compute_score
        trainer = trainer_of(config)
        settings = with_reward_model(load_settings(config), reward_router_address)
        refuse_unserved(settings, config, trainer)
        self._hooked = trainer is not None
        self._lacks_columns = trainer == "v1" and is_scored_at_once(config)
        router = {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
        sources = open_reward_functions(
            settings,
            trainer=config,
            compute_score=compute_score,
            kwargs={} if reward_router_address is None else router,
            processes=processes_of(config),
        )
        # The actor that compares siblings has an engine, too.
        shared_by = processes_of(config) + compares_siblings(settings)
        self.engine = RewardEngine(settings, processes=shared_by, sources=sources)
        self._siblings = HandOver(type(self), config, reward_router_address)
        self._means = RunningMeans()
        self._extra_info = ExtraInfo(self.engine, trainer=config)
        self._unread: deque[tuple[Any, asyncio.Future[_Read]]] = deque()
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qreward-decode")
        if in_ray_actor():
            # Full collections need not look at the 470,000 objects of torch and transformers: 0.2 ms a sample.
            gc.collect()
            gc.freeze()

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one trajectory: `{"reward_score": float, "reward_extra_info": {...}}`.

        If one trajectory has several outputs, the last one is judged, as in verl. The score of a failed sample is the
        constant of `on_failure`, or the mean of what this process has scored in the step so far (0.0 without any), from
        which nothing is learned; `qreward/missing` is 1.0. With `on_failure: raise` it raises `RewardMissing`.
        """
        item = data[-1]
        if self._lacks_columns:
            check_columns(self.engine.config, self._extra_info.functions, item.non_tensor_batch)
        return self.told(*await self._scored(item))

    def told(self, sample: Sample, outcome: Outcome, dense: str = "") -> dict[str, Any]:
        """What verl is told of a sample: what `run_single` returns. `dense`: what its steps add to tokens."""
        if outcome is PENDING:
            # Its reward is added to this one.
            return {"reward_score": 0.0, "reward_extra_info": self._extra_info.of(outcome, sample, reward=0.0)}
        ends = outcome.failure is not None and outcome.failure.reason == ENDS_RUN
        number = None if ends else number_of(outcome, self.engine.config.on_failure)
        step = (sample.split, sample.step)
        if outcome.reward is not None:
            self._means.add(step, outcome.reward)
        reward = self._means.mean(step) if number is None else number
        info = self._extra_info.of(outcome, sample, reward=None if sample.split == "val" else reward, dense=dense)
        return {"reward_score": reward, "reward_extra_info": info}

    async def aclose(self) -> None:
        """Close the engine and its threads. verl never does; tests and other callers should."""
        await self.engine.aclose()
        self._decoder.shutdown()

    async def _scored(self, item: Any) -> tuple[Sample, Outcome, str]:
        loop = asyncio.get_running_loop()
        try:
            read = await self._read(item)
            if isinstance(read, tuple) and read[1] is None:
                read = await loop.run_in_executor(self._decoder, self._tried, item, read[0])
            if isinstance(read, BaseException):
                return *unreadable(item, read), ""
            tokens, sample = read
            assert sample is not None
        except Exception as error:
            # In most of verl's trainers an exception would end the run.
            return *unreadable(item, error), ""
        try:
            if self.engine.compares(sample):
                return sample, await self._siblings.add(sample), ""
            outcome = self._extra_info.checked(await self.engine.score(sample))
        except BudgetSpent as error:
            if not self._hooked:
                raise
            # verl's V1 goes on without a row whose reward raises. Our hook in the trainer's process ends the run.
            warn_once(str(error))
            return sample, Failed(Cause.INFRA, ENDS_RUN, str(error)), ""
        if not self.engine.config.dense or not isinstance(outcome, Scored):
            return sample, outcome, ""
        verdict = outcome.verdict
        placed = await loop.run_in_executor(self._decoder, tokens.placed, verdict.dense, verdict.score)
        return sample, outcome, json.dumps(placed) if placed else ""

    def _read(self, item: Any) -> asyncio.Future[_Read]:
        """Read a row. A batch is read in slices, so that requests are sent meanwhile."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_Read] = loop.create_future()
        self._unread.append((item, future))
        if len(self._unread) == 1 or self._unread[0][1].get_loop() is not loop:
            loop.call_soon(self._read_slice, loop)
        return future

    def _read_slice(self, loop: asyncio.AbstractEventLoop) -> None:
        until = loop.time() + _SLICE_S
        if self._unread:
            loop.call_soon(self._read_slice, loop)  # first, whatever a row raises
        while self._unread and loop.time() < until:
            item, future = self._unread.popleft()
            if not future.done():
                future.set_result(self._tried(item))

    def _tried(self, item: Any, tokens: ResponseTokens | None = None) -> _Read:
        """Read a row: here if it is short, in a thread with its `tokens`. An error is returned: a panic of a tokenizer
        in Rust is no `Exception`, and no future holds a StopIteration.
        """
        try:
            found = ResponseTokens(item, self.tokenizer) if tokens is None else tokens
            return found, to_sample(item, found) if tokens is not None or found.few else None
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            return error


# The trainer's process makes no manager, but it imports this module to look the class up.
trainer_hooks.install()
