"""The dry run of a ROLL recipe: Hydra composes it as ROLL's start script does; ROLL's dataclasses read it strictly."""

from __future__ import annotations

import importlib
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from .data_lines import data_lines, tokenizer_of
from .judging import Step, judge_devices, judge_lines
from .lines import Line, check
from .machine import folder_line, gpu_line, has_module, model_line, packages_line, path_line

_ENGINES = {"vllm": "vllm", "sglang": "sglang"}


def roll_lines(folder: Path, name: str, roll: Path, *, ask: bool) -> list[Line]:
    """Check the recipe `name` of `folder`. `roll` is the checkout of ROLL, at which relative paths start."""
    folder, roll = folder.resolve(), roll.resolve()
    start = roll / "examples" / "start_rlvr_pipeline.py"
    lines = [path_line("ROLL", start, "set ROLL_DIR to a checkout of ROLL")]
    trees: list[dict[str, Any]] = []

    def compose_it() -> str:
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(folder), version_base=None):
            composed = compose(name)
        trees.append(OmegaConf.to_container(composed, resolve=True, throw_on_missing=True))  # type: ignore[arg-type]
        return f"{name}.yaml composes, and every value is set"

    lines.append(check("configuration", compose_it, "correct the recipe, or set the variable"))
    if not trees:
        return lines
    tree = trees[0]
    if not has_module("roll.pipeline"):
        lines.append(Line("known keys", "FAIL", "the package roll is not importable here",
                          "run this in ROLL's environment, with ROLL_DIR on PYTHONPATH"))  # fmt: skip
        return lines
    configs: list[Any] = []

    def read_strictly() -> str:
        from dacite import Config, from_dict
        from roll.pipeline.rlvr.rlvr_config import RLVRConfig

        # ROLL reads it without `strict`, and drops unknown keys without a word.
        # It makes the folder of its logs at once, so this is one of `_elsewhere`.
        configs.append(from_dict(RLVRConfig, {**tree, "logging_dir": "./logs"}, Config(strict=True)))
        return "RLVRConfig takes every key, and its own checks passed"

    with _elsewhere():
        lines.append(check("known keys", read_strictly, "correct the key, or write it as ROLL's configs do"))
        if not configs:
            return lines
        lines.append(_workers(tree))
    config = configs[0]
    lines.append(model_line("model", str(config.pretrain)))
    lines.append(folder_line("results", roll / str(tree["output_dir"])))
    engine = str(config.actor_infer.strategy_args.strategy_name)
    lines.append(
        packages_line("rollout engine", [_ENGINES[engine]] if engine in _ENGINES else [], "see ROLL's install")
    )
    lines.append(packages_line("logger", ["tensorboard"] if config.track_with == "tensorboard" else [],
                               "pip install tensorboard"))  # fmt: skip
    data, reports = data_lines(
        "roll",
        [roll / path for path in _files(tree["actor_train"])],
        [roll / path for path in _files(tree.get("validation"))],
        tokenizer=tokenizer_of(str(config.pretrain)),
        max_tokens=int(tree["prompt_length"]),
        tags=frozenset(tag for domain in config.rewards.values() for tag in domain.tag_included),
    )
    lines += data
    from qreward_plugins.errors import ConfigurationError
    from roll_adapter.settings import load_settings

    judged = {domain: worker for domain, worker in config.rewards.items()
              if str(worker.worker_cls).startswith("roll_adapter")}  # fmt: skip
    needed = 1 + max((max(map(int, devices)) for devices in _devices(config)), default=-1)
    if not judged:
        lines.append(Line("judges", "FAIL", "no domain has a worker of roll_adapter", "see docs/roll.md"))
    for domain, worker in judged.items():
        try:
            settings = load_settings(worker, domain=domain, rpc_timeout_s=config.rpc_timeout, warn=False)
        except ConfigurationError as error:
            lines.append(Line("judges", "FAIL", str(error), "qreward check FILE says it with line numbers"))
            continue
        lines.append(gpu_line(1, needed, judge_devices=judge_devices(settings)))
        tags = set(worker.tag_included)
        task = next((task for report in reports for task in report.tasks if task.source in tags), None)
        shares = tree["actor_train"]["data_args"].get("domain_interleave_probs") or {domain: 1.0}
        samples = int(config.rollout_batch_size) * int(config.num_return_sequences_in_group)
        step = Step(
            samples=max(1, round(samples * float(shares.get(domain, 1.0)))),
            steps=int(config.max_steps),
            most_response_tokens=int(tree["response_length"]),
            prompt_tokens=reports[0].mean_tokens if reports else None,
        )
        file = (worker.reward_manager_config or [{}])[0].get("config") or os.environ.get("QREWARD_CONFIG")
        lines += judge_lines(settings, Path(file) if file else None, task, step, ask=ask)
    return lines


@contextmanager
def _elsewhere() -> Iterator[None]:
    """Keep what ROLL prints and the folders of logs that it makes when it is imported and configured out of the way."""
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(before)


def _workers(tree: dict[str, Any]) -> Line:
    names = [worker["worker_cls"] for worker in tree["rewards"].values()]
    if "user_defined_rollout_loop_cls" in tree:
        names.append(tree["user_defined_rollout_loop_cls"])

    def found() -> str:
        for name in names:
            module, _, attribute = name.rpartition(".")
            getattr(importlib.import_module(module), attribute)
        return ", ".join(name.rpartition(".")[2] for name in names)

    return check("classes", found, "correct the dotted path, or install what it needs")


def _files(role: dict[str, Any] | None) -> list[str]:
    named = role["data_args"]["file_name"] if role else []
    return [named] if isinstance(named, str) else list(named)


def _devices(config: Any) -> list[list[int]]:
    roles = [config.actor_train, config.actor_infer, config.reference]
    if config.adv_estimator == "gae":
        roles.append(config.critic)
    return [list(role.device_mapping) for role in roles if role.device_mapping]
