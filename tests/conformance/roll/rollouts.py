"""A step on ROLL's real schedulers, and what its pipeline makes of the batch before it trains.

`DynamicSamplingScheduler` is an actor in the pipeline; here it runs in the driver, which saves a process a scenario.
`train_batch` is the part of `RLVRPipeline.run` between the rollout and the training step, in its order.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import datasets
import numpy as np
import torch
from roll.datasets.collator import DataCollatorWithPaddingForPaddedKeys
from roll.distributed.scheduler.generate_scheduler import DynamicSamplingScheduler
from roll.distributed.scheduler.protocol import DataProto
from roll.utils.functionals import (
    RunningMoments,
    compute_advantage,
    compute_token_reward,
    get_sample_level_mask,
    reduce_metrics,
    reward_postprocess,
)
from roll.utils.kl_controller import get_kl_controller

from ..judges import prompt_of
from .describe import describe
from .scenarios import item_row
from .workers import texts_of

SHUTDOWN_S = 30.0


def data_set(tokenizer: Any, count: int) -> datasets.Dataset:
    rows = map(item_row, range(count))
    return datasets.Dataset.from_list([{**row, **tokenizer(prompt_of(int(row["id"])))} for row in rows])


async def play(
    config: Any, infer: Any, rewards: dict[str, Any], data: datasets.Dataset, *, steps: int, validation: bool
) -> list[dict[str, Any]]:
    """Play steps with a scheduler of their own, and describe what would train. Raises what ended the run."""
    scheduler = DynamicSamplingScheduler(
        pipeline_config=config,
        actor_cluster=infer,
        reward_clusters=rewards,
        dataset=data,
        collect_fn_cls=DataCollatorWithPaddingForPaddedKeys,
        collect_fn_kwargs={"max_length": config.prompt_length, "padding": "max_length"},
        is_val=validation,
    )
    await scheduler.initialize()
    described = []
    try:
        async for batch in _batches(scheduler, config, len(data) if validation else config.rollout_batch_size, steps):
            metrics = reduce_metrics(batch.meta_info.pop("metrics", {}))
            raw = batch.batch["response_level_rewards"].tolist()
            if not validation:
                batch, trained = train_batch(batch, config)
                assert all(np.isfinite(number) for number in trained.values()), trained
            described.append({**describe(batch, texts_of(batch), raw), "metrics": metrics})
    finally:
        await _leave(scheduler)
    return described


async def _batches(scheduler: Any, config: Any, size: int, steps: int) -> AsyncIterator[DataProto]:
    arguments = config.validation.generating_args if scheduler.is_val else config.actor_infer.generating_args
    for step in range(steps):
        # RLVRPipeline's own, in training and in validation.
        meta = {"global_step": step, "generation_config": arguments.to_dict()}
        if scheduler.is_val:
            meta["is_offload_states"] = False
        else:
            meta["collect_unfinished"] = False
        batch = await scheduler.get_batch(data=DataProto(meta_info=meta), global_step=step, batch_size=size)
        batch.meta_info.pop("is_offload_states", None)
        yield batch


async def _leave(scheduler: Any) -> None:
    # What ended the run ends this too.
    with suppress(Exception):
        await asyncio.wait_for(scheduler.shutdown(), SHUTDOWN_S)
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def train_batch(batch: DataProto, config: Any) -> tuple[DataProto, dict[str, Any]]:
    """Masks, normalised rewards and advantages, as RLVRPipeline.run computes them, of a policy, a reference and a
    critic that say zero everywhere. Returns the batch in its order, and the metrics by domain.
    """
    batch.batch["prompt_id"] = torch.arange(len(batch))
    rows, length = batch.batch["input_ids"].shape
    for name in ("old_log_probs", "ref_log_probs", "values")[: 3 if config.adv_estimator == "gae" else 2]:
        batch.batch[name] = torch.zeros(rows, length - 1)
    control = get_kl_controller(
        init_kl_coef=config.init_kl_coef, target_kl=config.target_kl, kl_horizon=config.kl_horizon
    )
    metrics: dict[str, Any] = {}
    prepared = []
    for domain, part in batch.group_by("domain").items():
        part, masked = get_sample_level_mask(part, config)
        part, normalised = reward_postprocess(part, config, {"domain": RunningMoments()})
        part, spread = compute_token_reward(part, config, control)
        part = compute_advantage(
            data=part,
            gamma=config.gamma,
            lambd=config.lambd,
            adv_estimator=config.adv_estimator,
            advantage_clip=config.advantage_clip,
            whiten_advantages=config.whiten_advantages,
            whiten_rewards=config.whiten_rewards,
            response_mask=part.batch["final_response_mask"].clone(),
            pipeline_config=config,
        )
        reduced = reduce_metrics(part.meta_info.pop("metrics", {}))
        told = {**masked, **normalised, **spread, **reduced}
        metrics |= {f"{domain}/{name}": value for name, value in told.items()}
        prepared.append(part)
    whole = DataProto.concat(prepared)
    whole.reorder(indices=torch.argsort(whole.batch["prompt_id"]))
    return whole, metrics
