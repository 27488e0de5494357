"""The flags of slime that reach reward hooks: names, defaults, and how slime resolves them at startup.

slime ignores unknown flags, so it trains without a reward after a misspelled `--custom-rm-pth`. Here an unknown name is
an error that suggests the nearest.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ..fake_trainer import refuse_unknown

ESTIMATORS = ("grpo", "gspo", "cispo", "ppo")

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"

DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"

DEFAULTS: dict[str, Any] = {
    # These two defaults differ from slime's: there the first is required, the second is 1.
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": None,
    "partial_rollout": False,
    "data_source_path": DEFAULT_DATA_SOURCE,
    "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION,
    "eval_function_path": None,
    "custom_generate_function_path": None,
    "dynamic_sampling_filter_path": None,
    "custom_rm_path": None,
    "eval_custom_rm_path": None,
    "group_rm": False,
    "rm_url": None,
    "reward_key": None,
    "eval_reward_key": None,
    "custom_reward_post_process_path": None,
    "custom_rollout_log_function_path": None,
    "custom_eval_rollout_log_function_path": None,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "n_samples_per_eval_prompt": 1,
    "colocate": False,
    "offload_train": None,
    "debug_rollout_only": False,
}

_READ_BY_HOOKS = "num_rollout eval_interval hf_checkpoint rollout_temperature rollout_top_p rollout_top_k use_wandb"
INERT: dict[str, Any] = dict.fromkeys(_READ_BY_HOOKS.split())
"""Flags for hooks that read them. They change nothing in the fake."""

_NOT_PLAYED = " It does not play all of slime's flags."


def resolve_args(flags: Mapping[str, Any], extra: Mapping[str, Any]) -> Namespace:
    """The `args` of a slime process that was started with `flags`.

    `extra` is the content of a `--custom-config-path` file: every key becomes an attribute and overrides a flag. Raises
    `TypeError` for a flag that is unknown or not played, and `ValueError` if slime refuses to start.
    """
    refuse_unknown(flags, [*DEFAULTS, *INERT], "FakeSlimeTrainer", note=_NOT_PLAYED)
    args = Namespace(**{**INERT, **DEFAULTS, **flags})
    if args.advantage_estimator not in ESTIMATORS:
        played = f"plays the estimators {', '.join(ESTIMATORS)}"
        raise ValueError(f"FakeSlimeTrainer {played}, not {args.advantage_estimator!r}")
    for name in ("rollout_batch_size", "n_samples_per_prompt", "n_samples_per_eval_prompt"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(args, name)}")
    args.eval_function_path = args.eval_function_path or args.rollout_function_path
    args.eval_reward_key = args.eval_reward_key or args.reward_key
    args.grpo_std_normalization = args.grpo_std_normalization and args.n_samples_per_prompt > 1
    args.over_sampling_batch_size = args.over_sampling_batch_size or args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(f"over_sampling_batch_size {args.over_sampling_batch_size} is below rollout_batch_size")
    vars(args).update(extra)
    return args
