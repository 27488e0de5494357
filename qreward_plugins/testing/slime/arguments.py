"""The flags of slime that reach reward hooks: names, defaults, and how slime resolves them at startup.

slime ignores unknown flags, so it trains without a reward after a misspelled `--custom-rm-pth`. Here an unknown name is
an error that suggests the nearest.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fake_trainer import refuse_unknown
from .samples import Row, SlimeSample, prompt_of

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

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
    "rollout_sample_filter_path": None,
    "custom_rm_path": None,
    "eval_custom_rm_path": None,
    "group_rm": False,
    "rm_url": None,
    "reward_key": None,
    "eval_reward_key": None,
    "custom_reward_post_process_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "custom_rollout_log_function_path": None,
    "custom_eval_rollout_log_function_path": None,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "normalize_advantages": False,
    "rollout_max_response_len": None,
    "n_samples_per_eval_prompt": 1,
    "eval_max_response_len": None,
    "colocate": False,
    "offload_train": None,
    "release_train": False,
    "debug_rollout_only": False,
}

INERT: dict[str, Any] = dict.fromkeys(
    (
        *("num_rollout", "eval_interval", "hf_checkpoint", "rollout_num_gpus", "sglang_server_concurrency"),
        *("rollout_temperature", "rollout_top_p", "rollout_top_k", "use_wandb", "use_tensorboard"),
    )
)
"""Flags for hooks that read them. They change nothing in the fake."""

_NOT_PLAYED = " It does not play all of slime's flags."


@dataclass(frozen=True)
class EvalDataset:
    """An evaluation data set, resolved against the flags as in slime; `samples` are its prompts."""

    name: str
    samples: Sequence[SlimeSample]
    n_samples_per_eval_prompt: int
    custom_rm_path: Any
    max_response_len: int | None
    metadata_overrides: Mapping[str, Any]


def resolve_args(flags: Mapping[str, Any], extra: Mapping[str, Any]) -> Namespace:
    """The `args` of a slime process that was started with `flags`.

    `extra` is the content of a `--custom-config-path` file: every key becomes an attribute and overrides a flag. Raises
    `TypeError` for a flag that is unknown or not played, and `ValueError` if slime refuses to start.
    """
    refuse_unknown(flags, [*DEFAULTS, *INERT], "FakeSlimeTrainer", note=_NOT_PLAYED)
    args = Namespace(**{**INERT, **DEFAULTS, **flags})
    if args.advantage_estimator not in ESTIMATORS:
        raise ValueError(f"advantage_estimator is one of {', '.join(ESTIMATORS)}, not {args.advantage_estimator!r}")
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        raise ValueError(f"slime starts {args.advantage_estimator} with normalize_advantages=True only")
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


def eval_dataset(args: Namespace, name: str, given: Sequence[Row] | Mapping[str, Any]) -> EvalDataset:
    """A data set with slime's fallbacks: its own setting, else the flag of the evaluation, else that of the rollout."""
    own = given if isinstance(given, Mapping) else {"rows": given}
    fallbacks = {
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "custom_rm_path": args.eval_custom_rm_path or args.custom_rm_path,
        "max_response_len": args.eval_max_response_len or args.rollout_max_response_len,
        "metadata_overrides": {},
    }
    refuse_unknown(own, ("rows", *fallbacks), f"the eval data set {name!r}")
    samples = [prompt_of(row) for row in own["rows"]]
    return EvalDataset(name, samples, **{key: own.get(key, value) for key, value in fallbacks.items()})
