"""Whole runs of ROLL's RLVR pipeline: its own driver, clusters and scheduler actors on the Ray that is there.

Only what needs a device is stood in for: a node without any counts as one with none, and nothing copies weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import ray
from roll.pipeline import base_pipeline
from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline
from roll.platforms.cpu import CpuPlatform
from roll.utils.constants import RAY_NAMESPACE

from .scenarios import TRAIN_ITEMS, VAL_ITEMS, item_row
from .workers import RECORD

_DEVICES = [0]


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
    files = {"actor_train": {"data_args": {"file_name": [str(trained)]}}}
    more: dict[str, Any] = {"output_dir": str(output), **files}
    if val_tags:
        arguments = {"data_args": {"file_name": [str(_write(folder / "val.jsonl", val_tags, TRAIN_ITEMS, VAL_ITEMS))]}}
        more["validation"] = arguments
    output.mkdir()
    told: dict[str, Any] = {"stage": "set-up", "logged": [], "error": None, "text": ""}
    with _on_a_cpu(resources):
        before = _actors()
        pipeline = None
        try:
            pipeline = RLVRPipeline(make_config(_merged(keys, more)))
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


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(one)
    for name, value in other.items():
        nested = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if nested else value
    return merged


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
