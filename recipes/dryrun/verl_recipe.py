"""The dry run of a verl recipe (verl 0.9.1): verl's own entry point composes it, and verl's own checks read it."""

from __future__ import annotations

import importlib.metadata
import io
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from omegaconf import DictConfig, ListConfig, OmegaConf

from .data_lines import data_lines, tokenizer_of
from .judging import Step, judge_devices, judge_lines, sleeping_lines
from .lines import Line, check
from .machine import folder_line, gpu_line, local_model, model_line, packages_line

TESTED = "0.9.1"
OURS = {"qreward", "hydra", "defaults"}
_LOGGERS = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow", "swanlab": "swanlab"}
_ENGINES = {"vllm": "vllm", "sglang": "sglang"}


def verl_lines(folder: Path, name: str, overrides: Sequence[str], *, ask: bool) -> list[Line]:
    """Check the recipe `name` of `folder` with these Hydra overrides."""
    version = check("verl", _version, "pip install verl")
    if version.status == "FAIL":
        return [version]
    lines = [
        version,
        check("known keys", lambda: _known(folder, name, overrides), "correct the key, or write it as verl does"),
    ]
    composed: list[DictConfig] = []

    def compose_it() -> str:
        composed.append(compose(folder, name, overrides))
        return f"{name}.yaml and {len(overrides)} overrides compose over verl's ppo_trainer"

    lines.append(check("configuration", compose_it, "correct the recipe or the override"))
    if not composed:
        return lines
    config = composed[0]
    lines.append(check("verl's checks", lambda: _validated(config), "change what the message names"))
    lines += _machine_lines(config)
    model = str(config.actor_rollout_ref.model.path)
    data, reports = data_lines(
        "verl",
        _paths(config.data.train_files),
        _paths(config.data.val_files),
        tokenizer=tokenizer_of(model),
        max_tokens=int(config.data.max_prompt_length),
    )
    lines += data
    from qreward_plugins.errors import ConfigurationError
    from verl_adapter.settings import load_settings

    try:
        settings = load_settings(config)
    except ConfigurationError as error:
        lines += [_gpus(config, ()), Line("judges", "FAIL", str(error), "mend the file, then: qreward check FILE")]
        return lines
    lines.append(_gpus(config, judge_devices(settings)))
    lines += _sleeping(config, settings)
    lines.append(check("reward manager", lambda: _manager(config, settings), "see docs/verl.md"))
    rows = sum(len(report.tasks) for report in reports)
    batch = int(config.data.train_batch_size)
    steps = config.trainer.total_training_steps or (rows // batch) * int(config.trainer.total_epochs)
    mini = int(config.actor_rollout_ref.actor.ppo_mini_batch_size)
    if reports and rows < batch:
        lines.append(Line("batches", "FAIL", f"{rows} rows are fewer than data.train_batch_size={batch}",
                          "lower it, or add data; verl drops the last, partial batch"))  # fmt: skip
    elif batch % mini:
        # verl checks this only where use_dynamic_bsz is off.
        problem = f"data.train_batch_size={batch} is no multiple of actor.ppo_mini_batch_size={mini}"
        lines.append(Line("batches", "FAIL", problem, "change one of them"))
    task = next((report.tasks[0] for report in reports if report.tasks), None)
    step = Step(
        samples=batch * int(config.actor_rollout_ref.rollout.n),
        steps=int(steps) or None,
        most_response_tokens=int(config.data.max_response_length),
        prompt_tokens=reports[0].mean_tokens if reports else None,
    )
    file = os.environ.get("QREWARD_CONFIG")
    return lines + judge_lines(settings, Path(file) if file else None, task, step, ask=ask)


def compose(folder: Path, name: str, overrides: Sequence[str]) -> DictConfig:
    """The resolved configuration with which verl's entry point would train. Raises what Hydra raises."""
    from verl.trainer import main_ppo

    command = ["main_ppo", "--config-dir", str(folder.resolve()), "--config-name", name, *overrides]
    printed = io.StringIO()
    # `--cfg` prints what the run would get, and ends.
    with (
        mock.patch.object(sys, "argv", [*command, "--cfg", "job", "--resolve"]),
        mock.patch.dict(os.environ, {"HYDRA_FULL_ERROR": "1"}),
        redirect_stdout(printed),
    ):
        main_ppo.main()
    made = OmegaConf.create(printed.getvalue())
    if not isinstance(made, DictConfig):
        raise ValueError("Hydra printed no configuration")
    return made


def _version() -> str | Line:
    found = importlib.metadata.version("verl")
    if found == TESTED:
        return f"{found}, with which the recipes are tested"
    return Line("verl", "note", f"{found}; the recipes are tested with {TESTED}")


def _known(folder: Path, name: str, overrides: Sequence[str] = ()) -> str | Line:
    """Every key of the recipe's files is one of verl's. Hydra itself lets a recipe add keys that nobody reads.

    A key that an override adds may be one that verl hands on, so it is only noted.
    """
    base = _verls_own()
    number = 0
    unknown = []
    for file in _chain(folder, name):
        for key in leaves(OmegaConf.to_container(OmegaConf.load(file), resolve=False)):
            number += 1
            if key.split(".")[0] not in OURS and not _in(base, key):
                near = get_close_matches(key, list(leaves(base)), 1)
                unknown.append(f"{file.name}: {key}" + (f" (did you mean {near[0]}?)" if near else ""))
    if unknown:
        raise ValueError(f"verl does not know {'; '.join(unknown)}")
    added = [text.lstrip("+").partition("=")[0] for text in overrides if text.startswith("+")]
    new = [key for key in added if "/" not in key and key.split(".")[0] not in OURS and not _in(base, key)]
    if new:
        near = [get_close_matches(key, list(leaves(base)), 1) for key in new]
        listed = [key + (f" (did you mean {meant[0]}?)" if meant else "") for key, meant in zip(new, near, strict=True)]
        return Line("known keys", "note", f"verl's own configuration has no {'; no '.join(listed)}",
                    "without the +, Hydra refuses a key that does not exist")  # fmt: skip
    return f"all {number} keys of the recipe are verl's or qreward's"


@cache
def _verls_own() -> Mapping[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_module
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    with initialize_config_module("verl.trainer.config", version_base=None):
        base = OmegaConf.to_container(hydra_compose("ppo_trainer"), resolve=False)
    assert isinstance(base, dict)
    return {str(key): value for key, value in base.items()}


def _chain(folder: Path, name: str) -> Iterator[Path]:
    """The recipe's file, and those beside it that its defaults name."""
    file = folder / f"{name}.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    yield file
    for entry in OmegaConf.load(file).get("defaults", []):
        if isinstance(entry, str) and entry != "_self_" and (folder / f"{entry}.yaml").is_file():
            yield from _chain(folder, entry)


def leaves(tree: Any, path: str = "") -> Iterator[str]:
    """The dotted names of all values that are no mappings."""
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here


def _in(base: Any, key: str) -> bool:
    """Whether verl has this key, or a mapping above it that is empty because it takes any key."""
    for part in key.split("."):
        if not isinstance(base, Mapping):
            return False
        if not base:
            return True
        if part not in base:
            return False
        base = base[part]
    return True


def _validated(config: DictConfig) -> str | Line:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    critic, reference = need_critic(config), need_reference_policy(config)
    estimator = str(config.algorithm.adv_estimator)
    if estimator not in ADV_ESTIMATOR_REGISTRY:
        # verl looks for it after the first rollouts.
        raise ValueError(f"algorithm.adv_estimator={estimator} is none of {', '.join(ADV_ESTIMATOR_REGISTRY)}")
    # verl reads the critic's model here, and would download it.
    local = local_model(str(config.critic.model.path)) is not None if critic else True
    with redirect_stdout(io.StringIO()):
        validate_config(config=config, use_reference_policy=reference, use_critic=critic and local)
    if not local:
        problem = "validate_config passed, but for the critic, whose model is not on this machine"
        return Line("verl's checks", "note", problem)
    return f"validate_config passed ({estimator}, critic: {critic}, reference: {reference})"


def _machine_lines(config: DictConfig) -> list[Line]:
    models = {"model": str(config.actor_rollout_ref.model.path)}
    if config.reward.reward_model.enable:
        models["judge's model"] = str(config.reward.reward_model.model_path)
    loggers = [_LOGGERS[name] for name in config.trainer.logger if name in _LOGGERS]
    engine = str(config.actor_rollout_ref.rollout.name)
    return [
        *(model_line(what, name) for what, name in models.items()),
        folder_line("checkpoints", str(config.trainer.default_local_dir)),
        packages_line("rollout engine", [_ENGINES[engine]] if engine in _ENGINES else [], f"pip install {engine}"),
        packages_line("logger", loggers, f"pip install {' '.join(loggers)}, or set trainer.logger=[console]"),
    ]


def _gpus(config: DictConfig, devices: Any) -> Line:
    per_node, nodes = int(config.trainer.n_gpus_per_node), int(config.trainer.nnodes)
    judge = config.reward.reward_model
    if judge.enable and judge.enable_resource_pool:
        nodes, per_node = nodes + int(judge.nnodes), max(per_node, int(judge.n_gpus_per_node))
    return gpu_line(nodes, per_node, judge_devices=devices)


def _sleeping(config: DictConfig, settings: Any) -> Iterator[Line]:
    from verl_adapter.trainers import problem_of_phases

    problem = problem_of_phases(config, _trainer(config))
    key = "actor_rollout_ref.rollout.gpu_memory_utilization"
    share = float(config.actor_rollout_ref.rollout.gpu_memory_utilization)
    # With verl's own reward model on the same GPUs, rewards come while the inference engine sleeps.
    apart = config.reward.reward_model.enable and not config.reward.reward_model.enable_resource_pool
    actor = config.actor_rollout_ref.actor
    state = actor.get("fsdp_config") or actor.get("megatron") or {}
    lines = list(sleeping_lines(settings, problem, engine_share=None if apart else share, key=key))
    if lines and not (state.get("param_offload") and state.get("optimizer_offload")):
        yield Line("training state", "note", "param_offload and optimizer_offload are not both on, so the policy keeps "
                   "memory that the judge may need", "set them below actor_rollout_ref.actor.fsdp_config")  # fmt: skip
    yield from lines


def _manager(config: DictConfig, settings: Any) -> str:
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls

    from verl_adapter.startup import refuse_impossible, refuse_unserved
    from verl_adapter.trainers import processes_of

    name = str(config.reward.reward_manager.name)
    if name != "qreward":
        raise ValueError(f"reward.reward_manager.name is {name!r}, so qreward would not be asked")
    get_reward_manager_cls(name)
    refuse_impossible(config, _trainer(config))
    refuse_unserved(settings, config, _trainer(config))
    return f"registered with verl; {processes_of(config)} reward workers; on_failure: {settings.on_failure}"


def _trainer(config: DictConfig) -> Any:
    """The trainer of verl.trainer.main_ppo."""
    return "v1" if config.trainer.use_v1 else "legacy"


def _paths(value: Any) -> list[str]:
    return [str(path) for path in value] if isinstance(value, (list, ListConfig)) else [str(value)]
