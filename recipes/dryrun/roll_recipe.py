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
from .judging import Step, judge_devices, judge_lines, sleeping_lines
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

        from roll_adapter.settings import trees_of

        for domain, worker in tree["rewards"].items():
            # The error of ROLL's reader names neither the key nor the remedy.
            trees_of(worker.get("reward_manager_config"), f"rewards.{domain}.reward_manager_config")
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
        judged = _judged(config.rewards)
    lines += share_lines(tree, list(config.rewards))
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
    found_tags = {task.source for report in reports for task in report.tasks}
    if reports and not any(line.status == "FAIL" for line in data):
        lines += rowless_lines(tree, {name: set(its.tag_included) for name, its in config.rewards.items()}, found_tags)
    from roll_adapter.settings import phases_problem

    settings, mistakes = _settings_of(judged, config.rpc_timeout)
    # Before the judges: a variable that they lack must not hide that there are too few GPUs.
    needed = 1 + max((max(map(int, devices)) for devices in _devices(config)), default=-1)
    taken = {device for each in settings.values() for device in judge_devices(each)}
    lines.append(gpu_line(1, needed, judge_devices=taken))
    if not judged:
        lines.append(Line("judges", "FAIL", "no domain has a worker of roll_adapter", "see docs/roll.md"))
    lines += mistakes
    for domain, its in settings.items():
        worker = judged[domain]
        share = config.actor_infer.strategy_args.strategy_config.get("gpu_memory_utilization")
        key = "actor_infer's gpu_memory_utilization"
        lines += sleeping_lines(its, phases_problem(config), engine_share=share, key=key)
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
        file = _file_of(worker)
        lines += judge_lines(its, Path(file) if file else None, task, step, ask=ask)
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


def _judged(rewards: dict[str, Any]) -> dict[str, Any]:
    """The domains whose workers are `QRewardWorker`s or of a subclass."""
    named = {domain: worker for domain, worker in rewards.items() if str(worker.worker_cls).startswith("roll_adapter")}
    try:
        from roll_adapter.worker import is_ours

        return {domain: worker for domain, worker in rewards.items() if domain in named or is_ours(worker)}
    except ImportError:
        return named  # the line about the classes says what is missing


def _settings_of(judged: dict[str, Any], rpc_timeout_s: float) -> tuple[dict[str, Any], list[Line]]:
    """The settings of each domain, and a line for each that has none because of mistakes."""
    from qreward_plugins.errors import ConfigurationError
    from roll_adapter.settings import load_settings

    settings: dict[str, Any] = {}
    lines: list[Line] = []
    for domain, worker in judged.items():
        try:
            settings[domain] = load_settings(worker, domain=domain, rpc_timeout_s=rpc_timeout_s)
        except ConfigurationError as error:
            file = _file_of(worker)
            remedy = f"then: qreward check {file}" if file else ""
            lines.append(Line("judges", "FAIL", str(error), remedy))
    return settings, lines


def _file_of(worker: Any) -> str | None:
    trees = worker.reward_manager_config or [{}]
    return trees[0].get("config") or os.environ.get("QREWARD_CONFIG")


def share_lines(tree: dict[str, Any], domains: list[str]) -> list[Line]:
    """Whether the shares of the domains fit the domains. ROLL fails on others minutes after its start, and trains on no
    row of a domain without a share.
    """
    shares = tree["actor_train"]["data_args"].get("domain_interleave_probs") or {}
    key = "actor_train.data_args.domain_interleave_probs"
    lines = []
    unknown = sorted(set(shares) - set(domains))
    if unknown or not shares:
        problem = f"{', '.join(unknown)} is no domain of rewards" if unknown else "is not set"
        remedy = f"write {key}: {{{', '.join(f'{name}: {1 / len(domains):.2g}' for name in domains)}}}"
        lines.append(Line("domains", "FAIL", f"{key}: {problem}", remedy))
    untrained = [name for name in domains if name not in shares]
    if untrained and shares:
        problem = f"{', '.join(untrained)}: not in {key}, so ROLL trains on none of its rows"
        lines.append(Line("domains", "note", problem, "add it, unless it is for the validation only"))
    return lines or [Line("domains", "ok", ", ".join(f"{name} {share:g}" for name, share in shares.items()))]


def rowless_lines(tree: dict[str, Any], tags: dict[str, set[str]], found: set[str]) -> list[Line]:
    """A line for each domain that has a share of the batch, but no row. `found` are the tags of the data."""
    shares = tree["actor_train"]["data_args"].get("domain_interleave_probs") or {}
    return [
        Line(
            "domains",
            "FAIL",
            f"{name}: no training row has one of its tags ({', '.join(sorted(tags[name])) or 'none'}); the data has "
            f"{', '.join(sorted(found))}",
            f"correct rewards.{name}.tag_included, or add a file with such rows to actor_train.data_args.file_name",
        )
        for name in shares
        if name in tags and not tags[name] & found
    ]


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
