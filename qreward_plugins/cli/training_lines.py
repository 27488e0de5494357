"""Prints how to train with a configuration, and what may be wrong with it in a training; `check` and `init` end with
that.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from rich.text import Text

from ..config import Config, sources_of
from ..judges import kind_of
from ..sources import TEXT
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
FEWEST_THOUGHTS = 4096
"""With fewer tokens, thoughts are often cut off before the verdict."""


def cautions(config: Config) -> Iterator[str]:
    """Yield a sentence for each setting that is valid and loses samples in a training."""
    deadline_s = config.engine.deadline_s
    for name, source in config.sources.items():
        if source.timeouts.total_s > deadline_s:
            yield (
                f"sources.{name}.timeouts.total_s: one try may take {source.timeouts.total_s:g} s, longer than"
                f" engine.deadline_s ({deadline_s:g} s); lower it, or raise the deadline"
            )
    for judge, source_name, most in thinking(config):
        if most is not None and most < FEWEST_THOUGHTS:
            yield (
                f"judges.{judge}.max_tokens: {most:,} for the thoughts of {source_name} and a verdict; write 8192 or"
                " more, and timeouts.total_s to match"
            )


def thinking(config: Config) -> Iterator[tuple[str, str, int | None]]:
    """Yield the judges that think by the parameters of their sources: judge, source, and the judge's `max_tokens`."""
    for judge, node in config.judges.items():
        for source in sources_of(config, judge) if kind_of(node).asks == TEXT else ():
            parameters: Mapping[str, Any] = getattr(config.sources[source], "parameters", {})
            template = parameters.get("chat_template_kwargs")
            enabled = isinstance(template, Mapping) and template.get("enable_thinking")
            if enabled or parameters.get("reasoning_effort") not in (None, "none"):
                yield judge, source, getattr(node, "max_tokens", None)


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
