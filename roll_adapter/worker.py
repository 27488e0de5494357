"""`QRewardWorker`: ROLL's reward worker.

ROLL lets an actor with any async method serve a thousand calls at once on one event loop (executor/cluster.py). So one
worker carries a whole batch that is streamed to it sample by sample, and nothing here may block that loop. An exception
of a worker ends the training, and so does a NaN some steps later. So a failed sample gets a finite number, and its
cause goes to the rollout loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.utils.import_utils import safe_import_class

from qreward_plugins import BatchReport, ConfigurationError, Failed, Outcome, RewardEngine, Sample
from qreward_plugins.adapters import RunningMeans, compares_siblings, number_of, refuse_parts, without_colocated

from .advantages import record_advantages
from .rewards import DETAIL, FAILED, GROUPS, Validations, metrics_of, tensors
from .rollouts import is_streamed, is_validation, prompt_of, to_samples
from .settings import domain_of, groups_problem, load_settings, phases_problem

_log = logging.getLogger("roll_adapter")

LOOP_KEY = "user_defined_rollout_loop_cls"
LOOP = "roll_adapter.QRewardRolloutLoop"

_INSTEAD = "Give the judge devices of its own, and remove the key."
_NO_PARTS = "this pipeline of ROLL trains on one reward of a response, and puts it at its last token."
_NO_LOOP = (
    "A sample of the domain %s has no reward; it trains on the mean of its group. "
    f"Set {LOOP_KEY}: {LOOP}, and generate_opt_level: 1, to keep such samples out of the loss and of their group."
)
_FAILED_VALIDATION = (
    "A sample of the domain %s has no reward in this validation, and ROLL counts it as wrong. qreward/val/failed_rate "
    f"of the next training step gives the share. {LOOP} leaves it out of the means of the tags."
)
_NO_THRESHOLD = (
    "val_correct counts the scores of the domain %s that are exactly 1, and no judge says from which reward on a "
    "response is correct. Set correct_at in the judge, for example to 0.6."
)


class QRewardWorker(Worker):  # type: ignore[misc]
    """ROLL's reward worker `roll_adapter.QRewardWorker`."""

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self._means = RunningMeans()
        self._validations = Validations()
        self._reported: BatchReport | None = None
        self._warned: set[str] = set()
        self._scoring: set[asyncio.Task[tuple[list[Sample], list[Outcome]]]] = set()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    def initialize(self, pipeline_config: Any) -> None:
        """ROLL's call before training. Raises `ConfigurationError` with all mistakes in the configuration."""
        super().initialize(pipeline_config)
        rewards = pipeline_config.rewards
        self._domain = domain_of(self.cluster_name, rewards)
        settings = load_settings(
            self.worker_config, domain=self._domain, rpc_timeout_s=getattr(pipeline_config, "rpc_timeout", None)
        )
        if problem := phases_problem(pipeline_config):
            settings = without_colocated(settings, problem, remedy=_INSTEAD)
        refuse_parts(settings, turns="a response of this pipeline of ROLL is one turn.", dense=_NO_PARTS)
        self._loop_is_ours = getattr(pipeline_config, LOOP_KEY, None) == LOOP
        if compares_siblings(settings) and (mistake := groups_problem(pipeline_config, self.worker_config)):
            raise ConfigurationError([mistake], origin=f"rewards.{self._domain}")
        try:
            self.engine = RewardEngine(settings, processes=processes_of(rewards))
        except ConfigurationError as error:
            raise ConfigurationError(error.mistakes, origin=f"rewards.{self._domain}") from None
        self._tokenizer = default_tokenizer_provider(pipeline_config.actor_train.model_args)
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qreward-decode")
        self._facts = self.engine.facts()

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE, clear_cache=False)  # type: ignore[untyped-decorator]
    async def compute_rewards(self, data: DataProto) -> DataProto:
        """Score a batch of any size: `token_level_rewards` (B, R), `response_level_rewards` (B,) and `scores` (B,).

        All numbers are finite. A failed sample gets the mean of its prompt's samples that this worker has scored so
        far (0.0 if there are none). `meta_info["qreward_failed"]` has its cause, by which `QRewardRolloutLoop` masks
        it. Raises `RewardMissing` with `on_failure: raise`, and `CancelledError` if ROLL offloads the worker meanwhile
        and the judge is on its GPUs.
        """
        scoring = asyncio.ensure_future(self._score(data))
        self._scoring.add(scoring)
        scoring.add_done_callback(self._scoring.discard)
        samples, outcomes = await scoring
        streamed, validation = is_streamed(data), is_validation(data)
        facts = [self._facts.of(outcome, one.data_source) for outcome, one in zip(outcomes, samples, strict=True)]
        metrics = metrics_of(facts, self.engine.config.sources, streamed=streamed) | self._waited()
        numbers = [number_of(outcome, self.engine.config.on_failure) for outcome in outcomes]
        causes = [str(fact["cause"]) if number is None else "" for fact, number in zip(facts, numbers, strict=True)]
        if validation:
            # `on_failure` does not apply, because nothing trains on a validation.
            causes = [outcome.label if isinstance(outcome, Failed) else "" for outcome in outcomes]
            self._validations.add(data.meta_info.get("global_step"), facts)
            if any(causes):
                self._warn_once(_FAILED_VALIDATION)
            partly = any(outcome.reward not in (None, 0.0, 1.0) for outcome in outcomes)
            if partly and not self._facts.defines_correct:
                self._warn_once(_NO_THRESHOLD)
        else:
            metrics |= self._validations.metrics()
            if any(causes) and not (self._loop_is_ours and streamed):
                self._warn_once(_NO_LOOP)
        return DataProto.from_dict(
            tensors=tensors(
                data.batch["responses"].shape[-1],
                self._rewards(data, numbers),
                outcomes,
                right_or_wrong=self._facts.defines_correct or validation,
            ),
            meta_info={
                "metrics": metrics,
                FAILED: causes,
                DETAIL: next((each.detail for each in outcomes if isinstance(each, Failed) and not each.screened), ""),
                GROUPS: self.engine.config.groups.model_dump(),
            },
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    async def load_states(self, *_: Any, **__: Any) -> None:
        """ROLL's call before the rollouts of a step; it waits for all workers. Wakes judges on the trainer's GPUs.

        Raises what `RewardEngine.begin_rewards` raises, which ends the training.
        """
        await self.engine.begin_rewards()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # type: ignore[untyped-decorator]
    async def offload_states(self, *_: Any, **__: Any) -> None:
        """ROLL's call after the rollouts of a step, before anything trains; it waits for all workers. Lets judges on
        the trainer's GPUs sleep. Raises what `RewardEngine.end_rewards` raises, which ends the training.

        ROLL has all its rewards by then. What is still judged are responses that it asked for and does not need
        (`is_use_additional_prompts`). They are cancelled, because the training would wait for the slowest of them.
        """
        if self.engine.colocated:
            for scoring in self._scoring:
                scoring.cancel()
        await self.engine.end_rewards()

    async def close(self) -> None:
        """Close the engine and its thread. ROLL never does; tests and other callers should."""
        await self.engine.aclose()
        self._decoder.shutdown()

    async def _score(self, data: DataProto) -> tuple[list[Sample], list[Outcome]]:
        loop = asyncio.get_running_loop()
        samples = await loop.run_in_executor(self._decoder, partial(to_samples, data, self._tokenizer))
        if len(samples) == 1:
            return samples, [await self.engine.score(samples[0])]
        return samples, await self.engine.score_all(samples)

    def _rewards(self, data: Any, numbers: list[float | None]) -> list[float]:
        """The number of every sample; for one without, the mean of its prompt so far."""
        step = data.meta_info.get("global_step")
        of_prompts = [((step, prompt_of(data, row)), number) for row, number in enumerate(numbers)]
        for key, number in of_prompts:
            if number is not None:
                self._means.add(key, number)
        return [self._means.mean(key) if number is None else number for key, number in of_prompts]

    def _waited(self) -> dict[str, float]:
        """What the batch that ended last waited for, in seconds by source and part; empty if it was reported before.

        A worker does not know when a step ends, so ROLL reduces over the batches of a step: it keeps the largest number
        (`_max`). Samples that come one by one and are under way together are one batch (`RewardEngine.last_batch`), so
        a step that waits for its judge is one batch.
        """
        before, self._reported = self._reported, self.engine.last_batch()
        if self._reported is None or self._reported is before:
            return {}
        return {f"qreward/{name}_max": seconds for name, seconds in self._reported.metrics().items()}

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            _log.warning(text, self._domain)


def is_ours(config: Any) -> bool:
    """Whether the workers of a domain are `QRewardWorker`s or of a subclass."""
    path = getattr(config, "worker_cls", None)
    found = safe_import_class(path) if isinstance(path, str) else path
    # ROLL wraps workers as Ray actors in its driver only.
    return isinstance(found, type) and issubclass(found, QRewardWorker)


def processes_of(rewards: Mapping[str, Any]) -> int:
    """The number of workers that share limits where no keeper counts for them: those of all domains that are ours."""
    return max(1, sum(int(getattr(config, "world_size", None) or 1) for config in rewards.values() if is_ours(config)))


record_advantages(is_ours)
