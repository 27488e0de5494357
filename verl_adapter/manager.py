"""`QRewardManager`: verl's reward manager with one async call per trajectory (verl >= 0.7).

verl starts `reward.num_workers` processes, each with one manager, and calls `run_single` on the process's event loop
while the rollout still runs. The constructor makes the engine, so that mistakes in the configuration end the run before
the first rollout. The engine binds to the loop with the first call.

The siblings of a sample are scored in other processes. So every outcome is reported to the group barrier of the job
(`qreward_plugins.engine`), where a failed sample waits for the mean of its group. In validation nothing waits:
`trainer_hooks` leaves failed samples out of the means. A row that cannot be read is a failed sample.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

from omegaconf import DictConfig
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from qreward_plugins import BatchReport, Cause, Failed, Outcome, RewardEngine, RewardMissing, Sample
from qreward_plugins.adapters import GroupBarrier, Report, number_of, without_colocated

from . import phases, trainer_hooks
from .functions import ComputeScore, open_reward_function, reward_secrets
from .policy import failure_policy, samples_per_prompt, takes_any_keys, warn_of_short_waiting
from .rewards import ExtraInfo, KeysRead
from .rollouts import is_padding, looks_like_validation, response_ids, session_of, to_sample, unreadable
from .settings import load_settings, processes_of, reward_function_sources, with_reward_model
from .startup import check_columns, refuse_impossible, warn_of_ignored_settings
from .trainers import trainer_of

UNUSED = 0.0
"""The score of a failed sample in validation, which is left out of every mean. verl needs a number."""

_NOT_JUDGED = Failed(Cause.INFRA, "padding", "the row only fills up a batch, and verl drops its score")


class QRewardManager(RewardManagerBase):  # type: ignore[misc]
    """verl's reward manager `qreward`.

    The arguments are verl's (trainer/ppo/reward.py). Raises `ConfigurationError` with all mistakes in the
    configuration.
    """

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
        self._trainer = trainer_of(config)
        refuse_impossible(config, self._trainer)
        warn_of_ignored_settings(config, self._trainer)
        settings = with_reward_model(load_settings(config), reward_router_address)
        if not self._trainer.tells_phases:
            settings = without_colocated(settings, phases.UNKNOWN, remedy=phases.REMEDY)
        self._policy = failure_policy(settings, config)
        self._scored_at_once = self._trainer.leaves_out and not takes_any_keys(config)
        router = (
            {"reward_router_address": reward_router_address, "reward_model_tokenizer": reward_model_tokenizer}
            if reward_router_address is not None
            else {}
        )
        sources = {
            name: open_reward_function(
                name, node, trainer=config, compute_score=compute_score, kwargs=router, processes=processes_of(config)
            )
            for name, node in reward_function_sources(settings)
        }
        self.engine = RewardEngine(settings, processes=processes_of(config), sources=sources)
        self._barrier = GroupBarrier(wait_s=settings.groups.wait_s)
        self._group_size = samples_per_prompt(config)
        self._told: BatchReport | None = None
        """The last batch that the barrier was told of."""
        if self._policy == "neutral":
            warn_of_short_waiting(config, processes_of(config))
        self._extra_info = ExtraInfo(
            self.engine,
            any_keys=takes_any_keys(config),
            reads=KeysRead.of(config, settings),
            secrets=reward_secrets(config, compute_score),
        )
        self._decoder = ThreadPoolExecutor(max_workers=1, thread_name_prefix="qreward-decode")

    async def run_single(self, data: DataProto) -> dict[str, Any]:
        """Score one trajectory: `{"reward_score": float, "reward_extra_info": {...}}`.

        If one trajectory has several outputs, the last one is judged, as in verl. For a failed sample, `on_failure`
        decides: `neutral` waits for its siblings, at most `groups.wait_s`, and returns their mean; `exclude` and
        `raise` raise `RewardMissing`; `{constant: x}` returns x. In validation it returns a number that no mean
        counts, and `qreward/missing` is 1.0. A row that only fills up a batch is not judged.
        """
        item = data[-1:][0]
        if self._scored_at_once:
            check_columns(self.engine.config, self._extra_info.functions, item.non_tensor_batch)
        if is_padding(item):
            info = self._extra_info.of(_NOT_JUDGED, imputed=False, reward=UNUSED)
            return {"reward_score": UNUSED, "reward_extra_info": info}
        sample, outcome = await self._scored(item)
        if sample.split == "val":
            reward = await self._validated(outcome)
            return {"reward_score": reward, "reward_extra_info": self._extra_info.of(outcome, imputed=False)}
        reward, imputed = await self._trained(outcome, sample, item)
        info = self._extra_info.of(outcome, imputed=imputed, reward=reward)
        return {"reward_score": reward, "reward_extra_info": info}

    async def begin_rewards(self) -> None:
        """See `RewardEngine.begin_rewards`. Called before the trainer asks for rewards, if a judge uses its GPUs."""
        await self.engine.begin_rewards()

    async def settle_rewards(self) -> None:
        """See `RewardEngine.settle_rewards`."""
        await self.engine.settle_rewards()

    async def end_rewards(self) -> None:
        """See `RewardEngine.end_rewards`. Called before it trains, after all managers have settled."""
        await self.engine.end_rewards()

    async def aclose(self) -> None:
        """Close the engine and its threads. verl never does; tests and other callers should."""
        await self.engine.aclose()
        await self._barrier.aclose()
        self._decoder.shutdown()

    async def _scored(self, item: Any) -> tuple[Sample, Outcome]:
        try:
            sample = await asyncio.get_running_loop().run_in_executor(self._decoder, self._sample, item)
        except Exception as error:
            # In most of verl's trainers an exception would end the run.
            return unreadable(item, error)
        return sample, self._extra_info.checked(await self.engine.score(sample))

    async def _validated(self, outcome: Outcome) -> float:
        self._waited()  # of which the metrics of a training step have nothing
        await self._barrier.settle(_report(outcome, "val"))
        if self._policy == "raise":
            number_of(outcome, self._policy)
        return UNUSED if outcome.reward is None else float(outcome.reward)

    async def _trained(self, outcome: Outcome, sample: Sample, item: Any) -> tuple[float, bool]:
        """The number that a sample trains on, and whether it is the mean of its group."""
        # A data set may call its training rows "test", so a row's own split counts only if the trainer marks no rows.
        seems_validation = self._trainer.marks_validation is False and looks_like_validation(item)
        leaves_out = seems_validation and self._trainer.leaves_out
        neutral = self._policy == "neutral" and sample.group_id is not None and not leaves_out
        report = _report(outcome, "val" if seems_validation else "train")._replace(waited=self._waited())
        if neutral:
            key = (str(sample.group_id), "" if sample.step is None else str(sample.step))
            session, generation = session_of(item)
            report = report._replace(key=key, sample=session, generation=generation, size=self._group_size)
        mean = await self._barrier.settle(report, wait=not seems_validation)
        if mean is not None:
            return mean, True
        number = number_of(outcome, self._policy)
        if number is None:
            assert isinstance(outcome, Failed)
            raise RewardMissing(outcome)
        return number, False

    def _waited(self) -> tuple[tuple[str, float], ...]:
        """What the batch waited for that ended last, in seconds by name; empty if it was asked for before."""
        batch = self.engine.last_batch()
        if batch is None or batch is self._told:
            return ()
        self._told = batch
        return tuple(batch.metrics().items())

    def _sample(self, item: Any) -> Sample:
        return to_sample(item, self._decode(response_ids(item)), self._decode)

    def _decode(self, ids: Any) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _report(outcome: Outcome, split: Literal["train", "val"]) -> Report:
    if isinstance(outcome, Failed):
        return Report(None, "", None, None, split, outcome.cause.value)
    verdict = outcome.verdict
    return Report(None, "", verdict.score, None, split, cut=verdict.cut, floor=verdict.basis == "floor")


# The trainer's process makes no manager, but it imports this module to look the class up.
trainer_hooks.install()
