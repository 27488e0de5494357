"""The process in which ROLL plays: it reads one JSON request a line, and answers each with one JSON line.

One small Ray serves all scenarios, because starting it, and every worker on it, costs seconds. Reward workers are kept
under a key until they are let go; the inference worker serves all.

    python -m conformance.roll.player FOLDER RAY_FOLDER   (with ROLL, this project and its tests on PYTHONPATH)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from . import vllm_stand_in

vllm_stand_in.install()
# ROLL prints, from its import on; the answers must not stand between its lines.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import ray  # noqa: E402
from roll.distributed.executor.cluster import Cluster  # noqa: E402
from roll.distributed.scheduler import transfer_backend  # noqa: E402
from roll.distributed.scheduler.resource_manager import ResourceManager  # noqa: E402
from roll.models.model_providers import default_tokenizer_provider  # noqa: E402
from roll.utils.constants import RAY_NAMESPACE  # noqa: E402

from . import agentic, calls, pipelines, rollouts  # noqa: E402
from .job import make_config, make_tokenizer, strict_config  # noqa: E402
from .logs import Logs  # noqa: E402
from .scenarios import DOMAIN, TAG  # noqa: E402


class Player:
    """Every public method is a request; its arguments and its result are JSON-able."""

    def __init__(self, folder: Path, session: Path) -> None:
        self.folder = folder
        self.tokenizer_path = make_tokenizer(folder / "tokenizer")
        ray.init(
            num_cpus=2,
            namespace=RAY_NAMESPACE,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(session),
            object_store_memory=200_000_000,
            runtime_env={"worker_process_setup_hook": vllm_stand_in.install},
        )
        transfer_backend.init_transfer_backend(None)
        # Ray ends an actor with its first handle, and a pipeline puts its own in the place of this one.
        self._storage = transfer_backend._shared_storage
        self.logs = Logs(session)
        self._resources = ResourceManager(0, 1)
        self._infer: Cluster | None = None
        self._hired: dict[str, dict[str, Cluster]] = {}
        self._numbers = itertools.count()

    def hire(self, parties: Mapping[str, Mapping[str, Any]]) -> dict[str, str | None]:
        """Start the reward workers of several configurations at once, by key. Returns what went wrong with each."""
        # Hydra has one configuration at a time.
        configs = {key: self._config(keys) for key, keys in parties.items()}
        with ThreadPoolExecutor(2) as threads:
            return dict(zip(configs, threads.map(self._hire, configs, configs.values()), strict=True))

    def _hire(self, key: str, config: Any) -> str | None:
        clusters: dict[str, Cluster] = {}
        try:
            for domain, worker in config.rewards.items():
                clusters[domain] = Cluster(
                    name=f"reward-{domain}-{next(self._numbers)}",
                    worker_cls=worker.worker_cls,
                    resource_manager=self._resources,
                    worker_config=worker,
                )
                clusters[domain].initialize(pipeline_config=config, blocking=True)
        except Exception as error:
            _let_go(clusters)
            return f"{type(error).__name__}: {error}"
        self._hired[key] = clusters
        return None

    def let_go(self, key: str) -> None:
        _let_go(self._hired.pop(key, {}))

    def play(self, key: str, keys: Mapping[str, Any], steps: int, validation: bool, items: int) -> list[Any]:
        config = self._config(keys)
        infer = self._inference(config)
        ray.get([worker.forget.remote() for worker in infer.workers])
        data = rollouts.data_set(default_tokenizer_provider(config.actor_train.model_args), items, DOMAIN, TAG)
        return asyncio.run(rollouts.play(config, infer, self._hired[key], data, steps=steps, validation=validation))

    def score(self, key: str, requests: list[Any]) -> list[Any]:
        """Ask a reward worker directly, all requests at once."""
        (cluster,) = self._hired[key].values()
        return calls.score(cluster, requests, self.tokenizer_path)

    def pipeline(self, keys: Mapping[str, Any], tags: Mapping[str, str], val_tags: Mapping[str, str]) -> Any:
        """A whole run of ROLL's pipeline, from its configuration to its last step."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return pipelines.run(self._config, keys, self._resources, Path(folder), tags, val_tags)

    def trajectories(self, keys: Mapping[str, Any], episodes: int) -> list[Any]:
        """Play a group of environments with the mixin."""
        return agentic.play(make_config(keys, self.tokenizer_path, self.folder / "output", agentic=True), episodes)

    def strict(self, path: str, environment: Mapping[str, str]) -> str:
        """Compose a recipe with Hydra and read it into ROLL's dataclasses, no key left over."""
        with mock.patch.dict(os.environ, environment):
            return strict_config(Path(path))

    def data_set(self, path: str, tags: Mapping[str, str], template: str) -> list[dict[str, Any]]:
        """The rows that ROLL's pipeline makes of a file: with domains, and prompts as text."""
        from roll.configs.data_args import DataArguments
        from roll.datasets.dataset import get_dataset
        from roll.pipeline.rlvr.rlvr_pipeline import get_encode_function, update_dataset_domain

        texts: list[str] = []

        class Words:
            def apply_chat_template(self, messages: list[Any], *_: Any, **__: Any) -> str:
                return " | ".join(f"{message['role']}: {message['content']}" for message in messages)

            def __call__(self, batch: list[str]) -> dict[str, Any]:
                texts.extend(batch)
                return {"input_ids": [[0]] * len(batch)}

        # As in the recipes: ROLL has no default for the column of the messages.
        arguments = DataArguments(template=template, file_name=[path], messages="messages", preprocessing_num_workers=1)
        rows = get_dataset(arguments).to_list()
        encode = get_encode_function(template, Words(), arguments)
        encode({name: [row[name] for row in rows] for name in rows[0]})
        made = [update_dataset_domain(tags, row) for row in rows]
        kept = ("domain", "ground_truth", "id")
        return [{"text": text, **{name: row[name] for name in kept}} for text, row in zip(texts, made, strict=True)]

    def _config(self, keys: Mapping[str, Any]) -> Any:
        return make_config(keys, self.tokenizer_path, self.folder / "output")

    def _inference(self, config: Any) -> Cluster:
        if self._infer is None:
            self._infer = Cluster(
                name="infer",
                worker_cls=config.actor_infer.worker_cls,
                resource_manager=self._resources,
                worker_config=config.actor_infer,
            )
            self._infer.initialize(pipeline_config=config, blocking=True)
        return self._infer

    def close(self) -> None:
        ray.shutdown()


def _let_go(clusters: Mapping[str, Cluster]) -> None:
    for cluster in clusters.values():
        for worker in cluster.workers:
            ray.kill(worker)


def serve(player: Player) -> None:
    for line in sys.stdin:
        request = json.loads(line)
        told: dict[str, Any] = {}
        try:
            told["result"] = getattr(player, request.pop("do"))(**request)
        except BaseException as error:
            traceback.print_exc()
            cause = getattr(error, "cause", None) or error
            told["error"], told["text"] = type(cause).__name__, f"{cause}\n{error}"
        told.update(player.logs.take())
        _ANSWERS.write(json.dumps(told) + "\n")
        _ANSWERS.flush()


def main() -> None:
    player = Player(*map(Path, sys.argv[1:]))
    try:
        serve(player)
    finally:
        player.close()


if __name__ == "__main__":
    main()
