"""The dry run of a slime recipe (slime 0.3.1): slime's own parsers read the flags of train.py."""

from __future__ import annotations

import argparse
import importlib
import itertools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from qreward_plugins.errors import ConfigurationError
from slime_adapter.start import contradictions

from .data_lines import data_lines, tokenizer_of
from .judging import Step, judge_devices, judge_lines, sleeping_lines
from .lines import Line, check
from .machine import folder_line, gpu_line, has_module, model_line, packages_line, path_line

_HOOKS = (
    "custom_rm_path",
    "data_source_path",
    "custom_reward_post_process_path",
    "dynamic_sampling_filter_path",
    "custom_rollout_log_function_path",
    "custom_eval_rollout_log_function_path",
    "eval_function_path",
)


def slime_lines(judges: Path, flags: Sequence[str], *, ask: bool) -> list[Line]:
    """Check the flags of slime's train.py, and the judges' file. slime must be importable."""
    if not has_module("slime.utils"):
        return [Line("slime", "FAIL", "the package slime is not importable here",
                     "run this in slime's image, with SLIME_DIR and MEGATRON_DIR on PYTHONPATH")]  # fmt: skip
    parsed: list[argparse.Namespace] = []
    lines = [check("flags", lambda: _parsed(flags, parsed), "correct the flag, or write it as slime does")]
    if not parsed:
        return lines
    args = parsed[0]
    lines.append(check("hooks", lambda: _hooks(args), "correct the dotted path"))
    lines.extend(Line(mistake.path, "FAIL", mistake.problem, mistake.remedy) for mistake in contradictions(args))
    lines.append(model_line("model", str(args.hf_checkpoint)))
    lines.append(path_line("reference", str(args.ref_load), "make it with slime's tools/convert_hf_to_torch_dist.py"))
    if getattr(args, "sglang_config", None):
        lines.append(check("servers", lambda: _servers(args), "correct the file of --sglang-config"))
    save = re.split(r"[= ]", next((text for text in _values(flags, "--save")), ""), maxsplit=1)[0]
    if save:
        lines.append(folder_line("checkpoints", save))
    lines.append(packages_line("logger", ["tensorboard"] if args.use_tensorboard else [], "pip install tensorboard"))
    evaluated = list(args.eval_prompt_data or [])
    data, reports = data_lines(
        "slime",
        [_file(args.prompt_data)],
        [_file(path) for path in evaluated[1::2]],
        tokenizer=tokenizer_of(str(args.hf_checkpoint)),
        max_tokens=args.rollout_max_prompt_len,
    )
    lines += data
    from qreward_plugins.config import load_layers

    try:
        settings = load_layers(_tree(judges), origin="qreward")
    except (ConfigurationError, OSError, ValueError) as error:
        return [*lines, Line("judges", "FAIL", str(error), "mend the file, then: qreward check FILE")]
    gpus = int(args.actor_num_gpus_per_node)
    nodes = int(args.actor_num_nodes)
    if not args.colocate and args.rollout_num_gpus:
        nodes = -(-(nodes * gpus + int(args.rollout_num_gpus)) // gpus)
    lines.append(gpu_line(nodes, gpus, judge_devices=judge_devices(settings)))
    from slime_adapter.phases import problem_of

    share = getattr(args, "sglang_mem_fraction_static", None)
    lines += sleeping_lines(settings, problem_of(args)[0], engine_share=share, key="--sglang-mem-fraction-static")
    samples = int(args.rollout_batch_size) * int(args.n_samples_per_prompt)
    task = next((report.tasks[0] for report in reports if report.tasks), None)
    step = Step(
        samples=max(samples, int(args.over_sampling_batch_size or 0) * int(args.n_samples_per_prompt)),
        steps=args.num_rollout,
        most_response_tokens=int(args.rollout_max_response_len),
        prompt_tokens=reports[0].mean_tokens if reports else None,
    )
    return lines + judge_lines(settings, judges, task, step, ask=ask)


def _parsed(flags: Sequence[str], into: list[argparse.Namespace]) -> str:
    """Read the flags with the parsers of slime, SGLang and Megatron.

    Raises `SystemExit` for a value that does not fit, and `ValueError` for a flag that none of them has.
    """
    from slime.backends.sglang_utils.arguments import add_sglang_arguments
    from slime.utils.arguments import get_slime_extra_args_provider

    args, left = get_slime_extra_args_provider(None)(argparse.ArgumentParser(allow_abbrev=False)).parse_known_args(
        flags
    )
    engine = argparse.ArgumentParser(allow_abbrev=False)
    add_sglang_arguments(engine)
    served, left = engine.parse_known_args(left)
    for key, value in vars(served).items():
        if not hasattr(args, key):
            setattr(args, key, value)
    into.append(args)
    rest = [flag.split("=")[0] for flag in left if flag.startswith("--")]
    arguments = importlib.import_module("megatron.training.arguments")
    if not hasattr(arguments, "add_megatron_arguments"):
        return f"slime takes its flags; {len(rest)} of Megatron's were not checked, because Megatron is not here"
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    known = {option for action in parser._actions for option in action.option_strings}
    unknown = [flag for flag in rest if flag not in known]
    if unknown:
        raise ValueError(f"neither slime nor SGLang nor Megatron has {', '.join(unknown)}")
    return "slime, SGLang and Megatron take every flag"


def _hooks(args: argparse.Namespace) -> str:
    named = {key: getattr(args, key, None) for key in _HOOKS}
    for path in filter(None, named.values()):
        module, _, name = path.rpartition(".")
        getattr(importlib.import_module(module), name)
    if not str(named["custom_rm_path"] or "slime_adapter.").startswith("slime_adapter."):
        raise ValueError("--custom-rm-path is not slime_adapter.reward, so qreward would not be asked")
    return ", ".join(path for path in named.values() if path)


def _servers(args: argparse.Namespace) -> str:
    from slime.backends.sglang_utils.sglang_config import SglangConfig

    read = SglangConfig.from_yaml(args.sglang_config)
    for model in read.models:
        model.resolve(args)
    total = sum(model.total_num_gpus for model in read.models)
    wanted = int(args.actor_num_nodes) * int(args.actor_num_gpus_per_node)
    if args.colocate and total != wanted:
        raise ValueError(f"the groups take {total} GPUs, but the trainer, with which they share them, has {wanted}")
    served = [f"{model.name} on {model.total_num_gpus} GPUs{'' if model.update_weights else ' (frozen)'}"
            for model in read.models]  # fmt: skip
    return ", ".join(served)


def _values(flags: Sequence[str], name: str) -> Iterable[str]:
    yield from (value for flag, value in itertools.pairwise(flags) if flag == name)


def _file(path: str) -> str:
    """slime takes the rows 0 to 99 of a file as `file@[0:100]`."""
    return re.sub(r"@\[[-\d:]*\]$", "", path)


def _tree(judges: Path) -> Any:
    """What slime hands on: the tree below `qreward`, with `${...}` as they are; a file without that key is named."""
    import yaml

    read = yaml.safe_load(judges.read_text())
    if isinstance(read, dict) and "qreward" in read:
        return read["qreward"]
    return {"config": os.fspath(judges)}
