"""The process in which ROLL plays: it reads one JSON request a line, and answers each with one JSON line.

One small Ray serves all scenarios, because starting it, and every worker on it, costs seconds. Reward workers are kept
under a key until they are let go; the inference worker serves all.

    python -m conformance.roll.player FOLDER RAY_FOLDER   (with ROLL, this project and its tests on PYTHONPATH)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..processes import serve
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

from . import agentic, pipelines, rollouts  # noqa: E402
from .job import make_config, make_tokenizer  # noqa: E402
from .logs import Logs  # noqa: E402


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

    def hire(self, key: str, keys: Mapping[str, Any]) -> None:
        """Start the reward workers of a configuration."""
        config = self._config(keys)
        clusters = self._hired[key] = {}
        for domain, worker in config.rewards.items():
            clusters[domain] = Cluster(
                name=f"reward-{domain}-{next(self._numbers)}",
                worker_cls=worker.worker_cls,
                resource_manager=self._resources,
                worker_config=worker,
            )
            clusters[domain].initialize(pipeline_config=config, blocking=True)

    def let_go(self, key: str) -> None:
        for cluster in self._hired.pop(key).values():
            for worker in cluster.workers:
                ray.kill(worker)

    def play(self, key: str, keys: Mapping[str, Any], steps: int, validation: bool, items: int) -> list[Any]:
        config = self._config(keys)
        infer = self._inference(config)
        ray.get([worker.forget.remote() for worker in infer.workers])
        data = rollouts.data_set(default_tokenizer_provider(config.actor_train.model_args), items)
        return asyncio.run(rollouts.play(config, infer, self._hired[key], data, steps=steps, validation=validation))

    def pipeline(self, keys: Mapping[str, Any], tags: Mapping[str, str], val_tags: Mapping[str, str]) -> Any:
        """A whole run of ROLL's pipeline, from its configuration to its last step."""
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            return pipelines.run(self._config, keys, self._resources, Path(folder), tags, val_tags)

    def trajectories(self, keys: Mapping[str, Any], episodes: int) -> list[Any]:
        """Play a group of environments with the mixin."""
        return agentic.play(make_config(keys, self.tokenizer_path, self.folder / "output", agentic=True), episodes)

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


def main() -> None:
    player = Player(*map(Path, sys.argv[1:]))
    try:
        serve(player, _ANSWERS, player.logs.take)
    finally:
        player.close()


if __name__ == "__main__":
    main()
