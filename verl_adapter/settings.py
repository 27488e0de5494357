"""Where the qreward tree comes from in a verl run, and what verl's own configuration adds to it.

The tree may stand inline (`+qreward.sources...`, or a config group `+qreward=name`), in a file that `+qreward.config`
or the environment variable `QREWARD_CONFIG` names, or in both, inline keys winning. Without judges of its own it is
completed by one that runs verl's reward function, so that whoever has a function needs no configuration at all.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from qreward_plugins.config import Config, FunctionSource, load_config
from qreward_plugins.errors import ConfigurationError, Mistake

_log = logging.getLogger("verl_adapter")

COMPUTE_SCORE = "verl_adapter:compute_score"
"""The `function` of a source that stands for the reward function of this verl run, default or custom."""

ENVIRONMENT = "QREWARD_CONFIG"
_NAME = "compute_score"


def load_settings(trainer: DictConfig | None, tree: Any = None) -> Config:
    """The validated configuration of a verl run.

    Args:
        trainer: verl's configuration; its node `qreward` is the inline tree.
        tree: an inline tree that takes the place of that node.

    Raises `ConfigurationError` with every mistake.
    """
    inline = tree if tree is not None else (trainer.get("qreward") if trainer is not None else None)
    inline = OmegaConf.create({}) if inline is None else _as_config(inline)
    path = inline.get("config") or os.environ.get(ENVIRONMENT)
    inline = OmegaConf.masked_copy(inline, [str(key) for key in inline if key != "config"])
    _warn_of_printed_keys(inline)
    if path:
        origin = str(path)
        merged = OmegaConf.merge(_read(origin), inline)
    else:
        origin, merged = "qreward", inline
    assert isinstance(merged, DictConfig)
    if "judges" not in merged:
        merged = OmegaConf.merge(_reward_function(), merged)
    return load_config(merged, origin=origin)


def reward_function_sources(config: Config) -> Iterator[tuple[str, FunctionSource]]:
    """The sources of `config` that stand for verl's reward function."""
    for name, source in config.sources.items():
        if isinstance(source, FunctionSource) and source.function == COMPUTE_SCORE:
            yield name, source


def processes_of(trainer: DictConfig) -> int:
    """How many processes share the limits: verl's number of reward workers."""
    workers = OmegaConf.select(trainer, "reward.num_workers") or OmegaConf.select(trainer, "reward_model.num_workers")
    return int(workers or 1)


def check_failure_policy(config: Config, trainer: DictConfig) -> None:
    """Refuse what would end the run at the first failed sample.

    Leaving a sample out is a matter of verl's V1 trainer; in the legacy one an exception of a reward manager ends the
    run (trainer/ppo/ray_trainer.py).
    """
    if config.on_failure == "exclude" and not OmegaConf.select(trainer, "trainer.use_v1"):
        raise ConfigurationError(
            [
                Mistake(
                    "on_failure",
                    "`exclude` needs verl's V1 trainer; the legacy trainer ends the run when a sample has no reward.",
                    "Set trainer.use_v1=True, or choose `on_failure: {constant: x}`, or `raise` to end it knowingly.",
                )
            ],
            origin="qreward",
        )


def _reward_function() -> DictConfig:
    return OmegaConf.create(
        {
            "sources": {_NAME: {"kind": "function", "function": COMPUTE_SCORE}},
            "judges": {_NAME: {"kind": "function", "sources": [_NAME]}},
        }
    )


def _as_config(tree: Any) -> DictConfig:
    if isinstance(tree, str):
        return OmegaConf.create({"config": tree})
    if isinstance(tree, DictConfig):
        return tree
    if isinstance(tree, Mapping):
        return OmegaConf.create(dict(tree))
    raise ConfigurationError([Mistake("qreward", f"must be a mapping or a path, not {type(tree).__name__}.")])


def _read(path: str) -> DictConfig:
    """The tree of a file, read so that inline keys can be laid over it; `load_config` says what is wrong with it."""
    try:
        tree = OmegaConf.load(path)
    except Exception:
        load_config(path)
        raise
    if not isinstance(tree, DictConfig):
        load_config(path)
    assert isinstance(tree, DictConfig)
    unwrapped = tree.get("qreward") if list(tree) == ["qreward"] else tree
    return unwrapped if isinstance(unwrapped, DictConfig) else tree


def _warn_of_printed_keys(inline: DictConfig) -> None:
    sources = inline.get("sources")
    for name in sources if isinstance(sources, DictConfig) else ():
        source = sources.get(name)
        if isinstance(source, DictConfig) and source.get("api_key"):
            _log.warning(
                "qreward.sources.%s.api_key stands in verl's own configuration, which verl prints and uploads with "
                "everything resolved. Use api_key_env, or move the tree to a file (+qreward.config=FILE).",
                name,
            )
