"""The process in which ROLL plays: it reads one JSON request a line, and answers each with one JSON line.

One small Ray and one inference worker serve all scenarios, because starting them costs seconds.

    python -m conformance.roll.player FOLDER RAY_FOLDER   (with ROLL, this project and its tests on PYTHONPATH)
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..processes import serve
from . import stand_in_for_vllm

stand_in_for_vllm()
# ROLL prints, from its import on; the answers must not stand between its lines.
_ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

import ray  # noqa: E402
from dacite import Config, from_dict  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from roll.distributed.executor.cluster import Cluster  # noqa: E402
from roll.distributed.scheduler import transfer_backend  # noqa: E402
from roll.distributed.scheduler.resource_manager import ResourceManager  # noqa: E402
from roll.models.model_providers import default_tokenizer_provider  # noqa: E402
from roll.pipeline.agentic.agentic_config import AgenticConfig  # noqa: E402
from roll.pipeline.rlvr.rlvr_config import RLVRConfig  # noqa: E402
from roll.utils.constants import RAY_NAMESPACE  # noqa: E402

from ..judges import make_tokenizer  # noqa: E402
from . import agentic, pipelines  # noqa: E402

CONFIGS = Path(__file__).parent / "config"

_SAID = re.compile(r"^(?:WARNING|ERROR):roll_adapter[\w.]*:(.*)$|^(.*\broll_adapter\b.*\[?WARNING.*)$", re.MULTILINE)
_WRONG = re.compile(
    r"^.*(?:was never awaited|exception was never retrieved|was destroyed but it is pending|Unclosed client session"
    r"|Unclosed connection|Exception ignored in|Fatal Python error|Exception in callback).*$",
    re.MULTILINE,
)
"""What counts as wrong is what only the interpreter says; ROLL logs much else that looks like an error."""


class Logs:
    """Reads what is new in the logs of Ray's processes each time it is asked: the warnings of the adapter, and what
    Python finds wrong.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}

    def take(self) -> dict[str, list[str]]:
        said: list[str] = []
        complaints: list[str] = []
        for path in sorted(self._folder.glob("session_2*/logs/worker-*.err")):
            with path.open(errors="replace") as log:
                log.seek(self._read.get(path, 0))
                text = log.read()
                self._read[path] = log.tell()
            said += [first or second for first, second in _SAID.findall(text)]
            complaints += _WRONG.findall(text)
        return {"said": said, "complaints": complaints}


def make_config(keys: Mapping[str, Any], tokenizer: Path, output: Path, *, agentic: bool = False) -> Any:
    """The smallest run, with a scenario's keys laid over it. Raises what ROLL raises."""
    output.mkdir(parents=True, exist_ok=True)
    with initialize_config_dir(str(CONFIGS.resolve()), version_base=None):
        base = compose("agentic" if agentic else "rlvr")
    OmegaConf.set_struct(base, False)  # dacite finds the keys that ROLL does not have
    whole = OmegaConf.merge(base, {"pretrain": str(tokenizer), "output_dir": str(output)}, keys)
    kind = AgenticConfig if agentic else RLVRConfig
    return from_dict(kind, OmegaConf.to_container(whole, resolve=True), Config(strict=True))


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
            runtime_env={"worker_process_setup_hook": stand_in_for_vllm},
        )
        transfer_backend.init_transfer_backend(None)
        # Ray ends an actor with its first handle, and a pipeline puts its own in the place of this one.
        self._storage = transfer_backend._shared_storage
        self.logs = Logs(session)
        self._resources = ResourceManager(0, 1)
        self._infer: Cluster | None = None
        self._numbers = itertools.count()

    def play(self, keys: Mapping[str, Any], steps: int, validation: bool, items: int) -> list[Any]:
        """Steps on ROLL's scheduler, with reward workers of their own."""
        config = self._config(keys)
        infer = self._inference(config)
        ray.get([worker.forget.remote() for worker in infer.workers])
        data = pipelines.data_set(default_tokenizer_provider(config.actor_train.model_args), items)
        rewards: dict[str, Cluster] = {}
        try:
            for domain, worker in config.rewards.items():
                rewards[domain] = Cluster(
                    name=f"reward-{domain}-{next(self._numbers)}",
                    worker_cls=worker.worker_cls,
                    resource_manager=self._resources,
                    worker_config=worker,
                )
                rewards[domain].initialize(pipeline_config=config, blocking=True)
            return asyncio.run(pipelines.play(config, infer, rewards, data, steps=steps, validation=validation))
        finally:
            for cluster in rewards.values():
                for actor in cluster.workers:
                    ray.kill(actor)

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
