"""The flags of slime that reach reward hooks: names, defaults, and how slime resolves them at startup.

slime ignores unknown flags, so it trains without a reward after a misspelled `--custom-rm-pth`. Here an unknown name is
an error that suggests the nearest.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..flags import refuse_unknown
from .samples import SlimeSample

ESTIMATORS = ("grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo")

DEFAULT_ROLLOUT_FUNCTION = "slime.rollout.sglang_rollout.generate_rollout"

DEFAULT_DATA_SOURCE = "slime.rollout.data_source.RolloutDataSourceWithBuffer"

DEFAULTS: dict[str, Any] = {
    # These two defaults differ from slime's: there the first is required, the second is 1.
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "over_sampling_batch_size": None,
    "global_batch_size": None,
    "num_steps_per_rollout": None,
    "partial_rollout": False,
    "mask_offpolicy_in_partial_rollout": False,
    "data_source_path": DEFAULT_DATA_SOURCE,
    "rollout_function_path": DEFAULT_ROLLOUT_FUNCTION,
    "eval_function_path": None,
    "custom_generate_function_path": None,
    "rollout_sample_hook_path": (),
    "buffer_filter_path": None,
    "dynamic_sampling_filter_path": None,
    "rollout_sample_filter_path": None,
    "rollout_all_samples_process_path": None,
    "custom_rm_path": None,
    "group_rm": False,
    "rm_type": None,
    "rm_url": None,
    "reward_key": None,
    "eval_reward_key": None,
    "custom_reward_post_process_path": None,
    "custom_convert_samples_to_train_data_path": None,
    "custom_rollout_log_function_path": None,
    "custom_eval_rollout_log_function_path": None,
    "log_passrate": False,
    "log_reward_category": None,
    "wandb_always_use_train_step": False,
    "advantage_estimator": "grpo",
    "rewards_normalization": True,
    "grpo_std_normalization": True,
    "normalize_advantages": False,
    "gamma": 1.0,
    "lambd": 1.0,
    "rollout_shuffle": False,
    "rollout_seed": 42,
    "rollout_num_gpus": None,
    "sglang_server_concurrency": 512,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "rollout_max_response_len": None,
    "rollout_stop": None,
    "rollout_stop_token_ids": None,
    "rollout_skip_special_tokens": False,
    "n_samples_per_eval_prompt": 1,
    "eval_temperature": None,
    "eval_top_p": None,
    "eval_top_k": None,
    "eval_max_response_len": None,
    "eval_custom_rm_path": None,
    # For hooks that read them; they change nothing in the fake.
    "rollout_global_dataset": True,
    "num_rollout": None,
    "num_epoch": None,
    "eval_interval": None,
    "custom_config_path": None,
    "hf_checkpoint": None,
    "kl_coef": 0.0,
    "use_wandb": False,
    "use_tensorboard": False,
    "ci_test": False,
    "colocate": False,
    "offload_train": None,
    "offload_rollout": None,
    "release_train": False,
    "debug_rollout_only": False,
    "debug_train_only": False,
    "load_debug_rollout_data": None,
    "save_debug_rollout_data": None,
}


@dataclass(frozen=True)
class EvalDataset:
    """An evaluation data set, resolved against the flags as in slime; `samples` are its prompts."""

    name: str
    samples: Sequence[SlimeSample]
    n_samples_per_eval_prompt: int
    custom_rm_path: Any = None
    custom_generate_function_path: Any = None
    rm_type: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_response_len: int | None = None
    metadata_overrides: Mapping[str, Any] = field(default_factory=dict)

    def metadata_of(self, sample: SlimeSample) -> dict[str, Any]:
        """The metadata of a sample of this data set: its own, the `rm_type`, then the overrides."""
        chosen = {} if self.rm_type is None else {"rm_type": self.rm_type}
        return {**(sample.metadata or {}), **chosen, **self.metadata_overrides}


EVAL_DATASET_KEYS = (
    "n_samples_per_eval_prompt",
    "custom_rm_path",
    "custom_generate_function_path",
    "rm_type",
    "temperature",
    "top_p",
    "top_k",
    "max_response_len",
    "metadata_overrides",
)


def resolve_args(flags: Mapping[str, Any], extra: Mapping[str, Any]) -> Namespace:
    """The `args` of a slime process that was started with `flags`.

    `extra` is the content of a `--custom-config-path` file: every key becomes an attribute and overrides a flag. Raises
    `TypeError` for an unknown flag, and `ValueError` if slime refuses to start.
    """
    refuse_unknown(flags, DEFAULTS, "FakeSlimeTrainer")
    args = Namespace(**{**DEFAULTS, **flags})
    if args.advantage_estimator not in ESTIMATORS:
        raise ValueError(f"advantage_estimator is one of {', '.join(ESTIMATORS)}, not {args.advantage_estimator!r}")
    if args.advantage_estimator.startswith("reinforce_plus_plus") and not args.normalize_advantages:
        raise ValueError(f"slime starts {args.advantage_estimator} with normalize_advantages=True only")
    for name in ("rollout_batch_size", "n_samples_per_prompt", "n_samples_per_eval_prompt"):
        if getattr(args, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(args, name)}")
    if args.eval_function_path is None:
        args.eval_function_path = args.rollout_function_path
    if args.eval_reward_key is None:
        args.eval_reward_key = args.reward_key
    size = args.rollout_batch_size * args.n_samples_per_prompt
    if args.num_steps_per_rollout is not None:
        steps = size // args.num_steps_per_rollout
        if args.global_batch_size not in (None, steps):
            raise ValueError(
                f"global_batch_size {args.global_batch_size} is not {size} samples / num_steps_per_rollout"
            )
        args.global_batch_size = steps
    if args.global_batch_size is None:
        args.global_batch_size = size
    if args.n_samples_per_prompt == 1:
        args.grpo_std_normalization = False
    if args.over_sampling_batch_size is None:
        args.over_sampling_batch_size = args.rollout_batch_size
    if args.over_sampling_batch_size < args.rollout_batch_size:
        raise ValueError(
            f"over_sampling_batch_size {args.over_sampling_batch_size} is below rollout_batch_size "
            f"{args.rollout_batch_size}"
        )
    if isinstance(args.rollout_sample_hook_path, str) or callable(args.rollout_sample_hook_path):
        args.rollout_sample_hook_path = [args.rollout_sample_hook_path]
    args.rollout_sample_hook_path = list(args.rollout_sample_hook_path)
    _resolve_offloading(args)
    for name, value in extra.items():
        setattr(args, name, value)
    return args


def _resolve_offloading(args: Namespace) -> None:
    """Set who leaves the GPUs to whom, as slime does."""
    if args.debug_rollout_only:
        args.colocate = args.offload_train = args.offload_rollout = False
    if args.colocate:
        if args.release_train:
            args.offload_train, args.offload_rollout = False, True
        args.offload_train = True if args.offload_train is None else args.offload_train
        args.offload_rollout = True if args.offload_rollout is None else args.offload_rollout
    args.offload_train = bool(args.offload_train) or args.advantage_estimator == "ppo"
    args.offload_rollout = bool(args.offload_rollout)


def resolve_eval_dataset(
    args: Namespace, name: str, samples: Sequence[SlimeSample], settings: Mapping[str, Any]
) -> EvalDataset:
    """A data set with slime's fallbacks: its own setting, else the flag of the evaluation, else that of the rollout.

    Raises `TypeError` for an unknown setting.
    """
    refuse_unknown(settings, EVAL_DATASET_KEYS, f"the eval data set {name!r}")

    def choose(key: str, *flags: str) -> Any:
        if key in settings:
            return settings[key]
        return next((value for flag in flags if (value := getattr(args, flag)) is not None), None)

    return EvalDataset(
        name=name,
        samples=samples,
        n_samples_per_eval_prompt=choose("n_samples_per_eval_prompt", "n_samples_per_eval_prompt"),
        custom_rm_path=choose("custom_rm_path", "eval_custom_rm_path", "custom_rm_path"),
        custom_generate_function_path=settings.get("custom_generate_function_path"),
        rm_type=settings.get("rm_type"),
        temperature=choose("temperature", "eval_temperature", "rollout_temperature"),
        top_p=choose("top_p", "eval_top_p", "rollout_top_p"),
        top_k=choose("top_k", "eval_top_k", "rollout_top_k"),
        max_response_len=choose("max_response_len", "eval_max_response_len", "rollout_max_response_len"),
        metadata_overrides=settings.get("metadata_overrides") or {},
    )
