"""Prints how to train with a configuration; `check` and `init` end with it."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Literal

from rich.text import Text

from .console import OUT, say

Framework = Literal["verl", "slime", "roll", "trl", "none"]
"""`none`: no framework; rollouts are scored from files or Python."""

_LINES: dict[Framework, str] = {
    "verl": "python -m verl.trainer.main_ppo ... reward.reward_manager.name=qreward {override}",
    "slime": "{before}--custom-rm-path slime_adapter.reward{after}",
    "roll": "user_defined_rollout_loop_cls: roll_adapter.QRewardRolloutLoop\n  rewards: {{my_domain: {{worker_cls: "
    "roll_adapter.QRewardWorker, reward_manager_config: [{{config: {yaml}}}]}}}}",
    "trl": "GRPOTrainer(..., reward_funcs=[qreward_plugins.bridges.trl.reward({python})])",
    "none": "qreward score {shell} rollouts.jsonl --out scored.jsonl",
}
_PAGES: dict[Framework, str] = {
    "verl": "docs/verl.md",
    "slime": "docs/slime.md",
    "roll": "docs/roll.md",
    "trl": "docs/trainers.md",
}

_PLAIN = re.compile(r"[\w./~+-]+", re.ASCII)


def installed() -> list[Framework]:
    """Return the frameworks that are installed here. Imports none of them."""
    return list(filter(_is_installed, _PAGES))


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ValueError:  # it was imported without a spec
        return False


def say_how_to_train(path: Path, framework: Framework | None, *, wrapped: bool) -> None:
    """Print a line for `framework`. None: for slime if the tree is below the key `qreward` (`wrapped`), otherwise for
    the frameworks that are installed, or for all.
    """
    guessed: list[Framework] = ["slime"] if wrapped else installed() or [*_PAGES]
    for name in [framework] if framework else guessed:
        where = f"Train with {name} ({_PAGES[name]}):" if name in _PAGES else "Score a file of rollouts:"
        say(OUT, Text(where, style="bold"))
        say(OUT, f"  {training_line(name, path, wrapped=wrapped)}")


def training_line(framework: Framework, path: Path, *, wrapped: bool = False) -> str:
    """Return what to add to a training to use the configuration at `path`."""
    file = str(path.expanduser().absolute())
    quoted = json.dumps(file, ensure_ascii=False)
    value, shell = file if _PLAIN.fullmatch(file) else quoted, shlex.quote(file)
    return _LINES[framework].format(
        override=shlex.quote(f"+qreward.config={value}"),
        # slime takes a file of custom settings only with the tree below the key `qreward`.
        before="" if wrapped else f"export QREWARD_CONFIG={shell}; ... ",
        after=f" --custom-config-path {shell}" if wrapped else "",
        yaml=value,
        python=quoted,
        shell=shell,
    )
