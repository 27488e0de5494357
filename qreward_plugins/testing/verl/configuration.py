"""verl's trainer configuration, composed from overrides as on verl's command line, with Hydra's own errors."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

MODULE = "qreward_plugins.testing.verl.conf"

_NOT_CHECKED = re.compile(
    r"(actor_rollout_ref|critic|custom_reward_function|data|distillation|global_profiler|model_engine|ray_kwargs"
    r"|reward_model|reward\.reward_model\.rollout|sandbox_fusion|skip|transfer_queue|trainer(?!\.v1\.(trainer_mode|sampl))"
    r"|algorithm\.(kl_.*|pf_ppo|rollout_correction))[.=]"
)
"""Nodes that do not concern rewards. Any key of them is taken, as if there were a `++` before it."""


def compose_config(given: Mapping[str, Any] | Iterable[str]) -> DictConfig:
    """The configuration of a run: overrides, or a mapping laid over verl's defaults, of which any key is taken.

    Raises what Hydra raises, such as `ConfigCompositionException` for a key that verl does not have.
    """
    if isinstance(given, str):
        raise TypeError(f"overrides are a list of texts, not {given!r}")
    if not isinstance(given, Mapping):
        return _composed(*(f"++{each}" if _NOT_CHECKED.match(each) else each for each in map(str, given)))
    config = _composed()
    OmegaConf.set_struct(config, False)
    merged = OmegaConf.merge(config, given)
    assert isinstance(merged, DictConfig)
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
