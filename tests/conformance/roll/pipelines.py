"""ROLL's real schedulers, and its whole RLVR pipeline with its own driver, clusters and scheduler actors.

`DynamicSamplingScheduler` is an actor in the pipeline; `play` runs it in the driver, which saves a process a scenario.
`train_batch` is the part of `RLVRPipeline.run` between the rollout and the training step, in its order. In `run`, a
whole run, only what needs a device is stood in for: a node without any counts as one with none, and nothing copies
weights.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import numpy as np
import ray
import torch
from omegaconf import OmegaConf
from roll.datasets.collator import DataCollatorWithPaddingForPaddedKeys
from roll.distributed.scheduler.generate_scheduler import DynamicSamplingScheduler
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline import base_pipeline
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.platforms.cpu import CpuPlatform
from roll.utils.constants import RAY_NAMESPACE
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
from .scenarios import TRAIN_ITEMS, VAL_ITEMS, describe, item_row
from .workers import RECORD, texts_of

SHUTDOWN_S = 30.0
_DEVICES = [0]


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


# Whole runs


class _NoModelUpdate:
    """ROLL's own needs the devices of both sides, to pass weights between them."""

    def __init__(self, *, src_cluster: Any, tgt_cluster: Any, pipeline_config: Any, frequency: int = 1) -> None:
        self.tgt_cluster = tgt_cluster

    def model_update(self, step: int | None = None) -> dict[str, Any]:
        return {}


def run(
    make_config: Callable[[Mapping[str, Any]], Any],
    keys: Mapping[str, Any],
    resources: Any,
    folder: Path,
    tags: Mapping[str, str],
    val_tags: Mapping[str, str],
) -> dict[str, Any]:
    """Run the pipeline to its end.

    Args:
        resources: the resource manager of the Ray that is there; it has taken all of it, so there cannot be another.
        tags, val_tags: domain by tag of the data sets for training and validation; no validation without any.

    Returns what was trained, what was logged, and the error that ended it, if one did; it says whether that was while
    the pipeline was set up or while it ran.
    """
    output = folder / "output"
    trained = _write(folder / "train.jsonl", tags, 0, TRAIN_ITEMS // len(tags))
    more: dict[str, Any] = {"output_dir": str(output), "actor_train": {"data_args": {"file_name": [str(trained)]}}}
    if val_tags:
        validated = _write(folder / "val.jsonl", val_tags, TRAIN_ITEMS, VAL_ITEMS)
        more["validation"] = {"data_args": {"file_name": [str(validated)]}}
    output.mkdir()
    told: dict[str, Any] = {"stage": "set-up", "logged": [], "error": None, "text": ""}
    with _on_a_cpu(resources):
        before = _actors()
        pipeline = None
        try:
            pipeline = RLVRPipeline(make_config(OmegaConf.merge(dict(keys), more)))
            # ROLL counts devices for its throughput.
            pipeline.actor_train.worker_config.device_mapping = _DEVICES
            pipeline.actor_infer.worker_config.device_mapping = _DEVICES
            told["stage"] = "run"
            pipeline.run()
            told["stage"] = "done"
        except Exception as error:
            cause = getattr(error, "cause", None) or error
            told["error"], told["text"] = type(cause).__name__, str(cause)
        finally:
            if pipeline is not None:
                told["logged"] = [json.loads(json.dumps(each, default=float)) for each in pipeline.state.log_history]
            for name in _actors() - before:
                # Some go by themselves with the pipeline.
                with suppress(ValueError):
                    ray.kill(ray.get_actor(name, namespace=RAY_NAMESPACE))
    record = output / RECORD
    told["trained"] = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    return told


def _actors() -> set[str]:
    return {actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)}


def _write(path: Path, tags: Mapping[str, str], first: int, count: int) -> Path:
    """Every tag has items of its own, because the inference worker counts the drafts of an item."""
    rows = (
        item_row(first + place * count + item, domain, tag)
        for place, (tag, domain) in enumerate(tags.items())
        for item in range(count)
    )
    path.write_text("".join(json.dumps({**row, "messages": json.dumps(row["messages"])}) + "\n" for row in rows))
    return path


@contextmanager
def _on_a_cpu(resources: Any) -> Iterator[None]:
    with (
        mock.patch.object(base_pipeline, "ResourceManager", return_value=resources),
        mock.patch.object(resources, "num_gpus", len(_DEVICES)),
        mock.patch.object(CpuPlatform, "device_count", staticmethod(lambda: 0), create=True),
        mock.patch.object(base_pipeline, "ModelUpdateGroup", _NoModelUpdate),
        # ROLL keeps these in the class, as there is one pipeline in a process.
        mock.patch.object(base_pipeline.BasePipeline, "model_update_groups", []),
        mock.patch.object(base_pipeline.BasePipeline, "checkpoint_clusters", []),
        mock.patch.object(RLVRPipeline, "do_checkpoint"),
    ):
        yield
