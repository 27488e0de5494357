"""verl's trainer configuration, composed from overrides as on verl's command line, with Hydra's own errors."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

MODULE = "qreward_plugins.testing.verl.conf"
_OF_ROLLOUT = [
    "mode",
    "full_determinism",
    "dtype",
    "gpu_memory_utilization",
    "ignore_eos",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "free_cache_engine",
    "tensor_model_parallel_size",
    "data_parallel_size",
    "expert_parallel_size",
    "pipeline_model_parallel_size",
    "max_num_batched_tokens",
    "max_model_len",
    "max_num_seqs",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "logprobs_mode",
    "scheduling_policy",
    "load_format",
    "layered_summon",
    "log_prob_micro_batch_size",
    "log_prob_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu",
    "disable_log_stats",
    "over_sample_rate",
    "multi_stage_wake_up",
    "engine_kwargs",
    "router_config_path",
    "multi_turn",
    "checkpoint_engine",
    "trace",
    "skip_tokenizer_init",
    "enable_rollout_routing_replay",
    "moe_load_balance_metrics_interval",
    "profiler",
    "prometheus",
    "quantization",
    "quantization_config_file",
    "mtp",
    "qat",
    "disaggregation",
    "agent.custom_async_server",
]

OPEN = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.model",
    "actor_rollout_ref.nccl_timeout",
    *(f"actor_rollout_ref.rollout.{name}" for name in _OF_ROLLOUT),
    "critic",
    "data",
    "distillation",
    "global_profiler",
    "model_engine",
    "ray_kwargs",
    "reward.reward_model.rollout",
    "skip",
    "trainer.v1.separate_async.hybrid_rollout",
    "transfer_queue",
)
"""Nodes whose keys are not checked, because none of them concerns rewards. All other keys of verl are known."""

_OVERRIDE = re.compile(r"^(\+\+|\+|~)?([\w@./-]+)=", re.DOTALL)


def compose_config(given: DictConfig | Mapping[str, Any] | Iterable[str]) -> DictConfig:
    """The configuration of a run: a composed one as it is, a mapping laid over verl's defaults, or overrides.

    Raises what Hydra and OmegaConf raise: for a key that verl does not have `ConfigCompositionException` (the `+` is
    missing) with overrides, and `ConfigKeyError` with a mapping.
    """
    if isinstance(given, DictConfig):
        return given
    overrides = [] if isinstance(given, Mapping) else list(given)
    if isinstance(given, str):
        raise TypeError(f"overrides are a list of texts, not {given!r}")
    config = _composed([_opened(_defaults(), override) for override in overrides])
    return _laid_over(config, given) if isinstance(given, Mapping) else config


def check_config(config: DictConfig) -> None:
    """What verl asserts of a configuration before it starts, as far as it reaches rewards. Raises `AssertionError`."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.val_kwargs.do_sample:
        assert rollout.temperature > 0, "validation gen temperature should be greater than 0 when enabling do_sample"
    actor = config.actor_rollout_ref.actor
    if actor.get("ppo_mini_batch_size") is not None and config.data.train_batch_size < actor.ppo_mini_batch_size:
        raise ValueError(
            f"train_batch_size ({config.data.train_batch_size}) must be >= "
            f"actor.ppo_mini_batch_size ({actor.ppo_mini_batch_size})"
        )


@functools.cache
def _defaults() -> DictConfig:
    """verl's defaults, to look keys up. They are composed once, which takes a third of a second, and never changed."""
    config = _composed([])
    OmegaConf.set_readonly(config, True)
    return config


def _composed(overrides: list[str]) -> DictConfig:
    hydra = GlobalHydra.instance()
    before = hydra.hydra
    hydra.clear()
    try:
        with initialize_config_module(MODULE, version_base=None):
            return compose("ppo_trainer", overrides=overrides)
    finally:
        hydra.hydra = before


def _opened(known: DictConfig, override: str) -> str:
    """An override of a key that only verl's own tree has, so that it is added here."""
    match = _OVERRIDE.match(override)
    if match is None or match[1]:
        return override
    key = match[2]
    if OmegaConf.select(known, key, default=_NOTHING, throw_on_missing=False) is not _NOTHING:
        return override
    return f"++{override}" if any(_is_within(key, open_key) for open_key in OPEN) else override


_NOTHING = object()


def _is_within(key: str, node: str) -> bool:
    return key == node or key.startswith(f"{node}.")


def _laid_over(config: DictConfig, tree: Mapping[str, Any]) -> DictConfig:
    extra = {key: value for key, value in tree.items() if key == "qreward"}
    rest = {key: value for key, value in tree.items() if key != "qreward"}
    merged = OmegaConf.merge(config, OmegaConf.create(rest))
    assert isinstance(merged, DictConfig)
    if extra:
        with open_dict(merged):
            merged.qreward = OmegaConf.create(extra["qreward"])
    return merged
