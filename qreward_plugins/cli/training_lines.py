"""Prints what to add to a training so that it uses a configuration; `check` and `init` end with it."""

from __future__ import annotations

import importlib.util
import re
import shlex
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from .console import say

Framework = Literal["verl", "slime", "roll", "trl", "none"]
"""`none`: no framework; rollouts are scored from files or Python."""

FRAMEWORKS: tuple[Framework, ...] = ("verl", "slime", "roll", "trl")
_PARTS = {"verl": "trainer", "slime": "rollout", "roll": "distributed", "trl": "trainer"}
"""A folder of each framework. Other packages of these names, such as an emulator called `slime`, have none."""
_PLAIN = re.compile(r"[\w./~+-]+", re.ASCII)
_PLUGINS_FROM = (0, 9)
"""The first version of verl that finds our reward manager by an entry point."""


def installed() -> list[Framework]:
    """Return the frameworks that are installed here. Imports none of them."""
    return [name for name in FRAMEWORKS if _is_installed(name)]


def _is_installed(name: Framework) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return False
    folders = (spec.submodule_search_locations if spec is not None else None) or ()
    return any((Path(folder) / _PARTS[name]).is_dir() for folder in folders)


def framework_of(path: Path, *, wrapped: bool) -> Framework | None:
    """Return the framework that a configuration is for: slime if the tree is below the key `qreward` (`wrapped`),
    otherwise the only one that is installed. None if several are possible.
    """
    here = installed()
    if wrapped and here in ([], ["slime"]):
        return "slime"
    return here[0] if len(here) == 1 and not (here == ["slime"] and not wrapped) else None


def say_how_to_train(out: Console, path: Path, framework: Framework | None, *, wrapped: bool) -> None:
    """Print what to add to a training; for all frameworks if `framework` is None."""
    if framework is not None:
        say(out, Text(_LEADS[framework], style="bold"))
        say(out, _indented(training_line(framework, path, wrapped=wrapped)))
        return
    say(out, Text("Train with it:", style="bold"))
    for name in FRAMEWORKS:
        say(out, Text(f"  {_TITLES[name]}", style="bold"))
        say(out, _indented(training_line(name, path, wrapped=wrapped), 4))


_TITLES = {"verl": "verl", "slime": "slime", "roll": "ROLL", "trl": "TRL"}
_LEADS = {
    "verl": "Train with verl:",
    "slime": "Train with slime: add these flags to your script, in place of --rm-type:",
    "roll": "Train with ROLL: add this to your RLVR configuration:",
    "trl": "Train with TRL:",
    "none": "Score a file of rollouts:",
}


def training_line(framework: Framework, path: Path, *, wrapped: bool = False) -> str:
    """Return what to add to a training to use the configuration at `path`. `wrapped`: its tree is below `qreward`."""
    file = str(path.expanduser().absolute())
    if framework == "verl":
        value = file if _PLAIN.fullmatch(file) else '"' + file.replace("\\", "\\\\").replace('"', '\\"') + '"'
        override = shlex.quote(f"+qreward.config={value}")
        plugin = "VERL_USE_EXTERNAL_MODULES=verl_adapter.plugin " if _before_plugins() else ""
        return f"{plugin}python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward {override}"
    if framework == "slime":
        # slime takes a file of custom settings only with the tree below the key `qreward`.
        first = "" if wrapped else f"export QREWARD_CONFIG={shlex.quote(file)}\n"
        place = f"--custom-config-path {shlex.quote(file)}\n" if wrapped else ""
        return f"{first}--custom-rm-path slime_adapter.reward\n{place}{_SLIME_HOOKS}"
    if framework == "roll":
        return _ROLL.format(file=file if _PLAIN.fullmatch(file) else "'" + file.replace("'", "''") + "'")
    if framework == "trl":
        return f"from qreward_plugins.bridges.trl import reward\nGRPOTrainer(..., reward_funcs=[reward({file!r})])"
    return f"qreward score {shlex.quote(file)} rollouts.jsonl --out scored.jsonl"


_SLIME_HOOKS = """\
--data-source-path slime_adapter.DataSource
--custom-reward-post-process-path slime_adapter.post_process
--dynamic-sampling-filter-path slime_adapter.drop_failed_groups
--custom-rollout-log-function-path slime_adapter.log_rollout
--custom-eval-rollout-log-function-path slime_adapter.log_eval"""

_ROLL = """\
user_defined_rollout_loop_cls: roll_adapter.QRewardRolloutLoop
is_num_return_sequences_expand: true
rewards:
  my_domain:
    worker_cls: roll_adapter.QRewardWorker
    tag_included: [my_tag]
    world_size: 1
    reward_manager_config: [{{config: {file}}}]
actor_train:
  data_args:
    domain_interleave_probs: {{my_domain: 1.0}}"""


def _before_plugins() -> bool:
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        return False
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    return numbers < _PLUGINS_FROM


def _indented(text: str, columns: int = 2) -> str:
    return "\n".join(" " * columns + line for line in text.splitlines())
