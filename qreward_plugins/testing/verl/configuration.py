"""verl's trainer configuration, composed from overrides as on verl's command line, with Hydra's own errors."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

MODULE = "qreward_plugins.testing.verl.conf"

_OPEN = ("actor_rollout_ref", "critic", "data")
_NOT_CHECKED = re.compile(
    rf"({'|'.join(_OPEN)}|distillation|global_profiler|model_engine|ray_kwargs|skip|transfer_queue"
    r"|(reward\.)?reward_model\.rollout|trainer\.v1\.separate_async)\."
)
"""Nodes that do not concern rewards. Any key of them is taken, as if there were a `++` before it."""


def compose_config(given: DictConfig | Mapping[str, Any] | Iterable[str]) -> DictConfig:
    """The configuration of a run: a composed one as it is, a mapping laid over verl's defaults, or overrides.

    Raises what Hydra and OmegaConf raise: for a key that verl does not have `ConfigCompositionException` (the `+` is
    missing) with overrides, and `ConfigKeyError` with a mapping.
    """
    if isinstance(given, DictConfig):
        return given
    if isinstance(given, str):
        raise TypeError(f"overrides are a list of texts, not {given!r}")
    if not isinstance(given, Mapping):  # texts
        return _composed(*(f"++{each}" if _NOT_CHECKED.match(each) else each for each in map(str, given)))
    config = _composed()
    for node in _OPEN:
        OmegaConf.set_struct(config[node], False)
    rest = {key: value for key, value in given.items() if key != "qreward"}
    merged = OmegaConf.merge(config, OmegaConf.create(rest))
    assert isinstance(merged, DictConfig)
    if "qreward" in given:
        with open_dict(merged):
            merged.qreward = OmegaConf.create(given["qreward"])
    return merged


def _composed(*overrides: str) -> DictConfig:
    return copy.deepcopy(_composed_once(overrides))


@functools.lru_cache(maxsize=128)
def _composed_once(overrides: tuple[str, ...]) -> DictConfig:
    """Hydra takes 0.1 s to compose, which is most of a step."""
    hydra = GlobalHydra.instance()
    before = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_module(MODULE, version_base=None):
            return compose("ppo_trainer", overrides=list(overrides))
    finally:
        hydra.hydra = before
