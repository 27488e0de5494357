"""The part of ROLL's configuration that rewards use: names, defaults, and how ROLL resolves them at the start.

ROLL reads its YAML with dacite, which drops unknown keys without a message. Here an unknown name is an error that
suggests the nearest.
"""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .. import fake_trainer as _shared

DEFAULT_LOOP = "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"

DEFAULTS: dict[str, Any] = {
    # ROLL's own: 128 prompts, groups of 1, prompts of 1024 tokens and no default length of responses.
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "prompt_length": 128,
    "sequence_length": 192,
    "response_length": None,
    "val_prompt_length": None,
    "val_sequence_length": None,
    "generate_opt_level": 1,
    "is_num_return_sequences_expand": False,
    "user_defined_rollout_loop_cls": DEFAULT_LOOP,
    "rpc_timeout": 3600,
    "adv_estimator": "gae",
    "gamma": 1,
    "lambd": 0.95,
    "norm_mean_type": None,
    "norm_std_type": None,
    "max_len_mask": False,
    "difficulty_mask": False,
    "difficulty_low_threshold": 0.0,
    "difficulty_high_threshold": 1.0,
    # For workers and loops that read them; they change nothing in the fake.
    "add_token_level_kl": False,
    "init_kl_coef": 0.2,
    "use_kl_loss": False,
    "max_steps": 500,
    "eval_steps": 10,
    "pretrain": None,
    "exp_name": "fake_roll_trainer",
    "output_dir": "./output",
}

NOT_PLAYED: dict[str, Any] = {
    "async_generation_ratio": 0,
    "is_use_additional_prompts": False,
    "reward_clip": None,
    "advantage_clip": None,
    "whiten_rewards": False,
    "whiten_advantages": False,
    "error_max_len_clip": False,
}
"""What the fake refuses to set to anything but ROLL's default, which stands here."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "adv_estimator": ("gae", "reinforce", "grpo"),
    "norm_mean_type": (None, "batch", "group"),
    "norm_std_type": (None, "batch", "group"),
}

REWARD_DEFAULTS: dict[str, Any] = {
    "name": None,
    "worker_cls": None,
    "world_size": 1,  # ROLL's own is None, but workers without GPUs need a number
    "max_concurrency": 1,
    "tag_included": (),
    "query_filter_config": None,
    "response_filter_config": None,
    "reward_manager_config": (),
    "system_envs": None,
    # For workers that read them.
    **dict.fromkeys(
        [
            "device_mapping",
            "data_args",
            "generating_args",
            "strategy_args",
            "model_args",
            "code_url",
            "judge_prompt",
            "judge_model_type",
            "judge_model_name",
            "judge_api_url",
            "judge_api_key",
            "format_pattern",
            "reward_type",
        ]
    ),
    "use_local": True,
}

FILTERS = ("no_filter", "mean_filter", "std_filter")


class ModelArguments:
    """The source of the tokenizer. In ROLL every process reads it from the same path; here all copies of a
    configuration share one tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.model_name_or_path: str | None = None
        self.qreward_tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelArguments:
        return self


@dataclass
class GeneratingArguments:
    """How responses are generated; as a dict it is `generation_config` of the meta information."""

    do_sample: bool = True
    temperature: float = 0.95
    top_p: float = 0.7
    top_k: int = 50
    num_beams: int = 1
    max_new_tokens: int = 8192
    repetition_penalty: float = 1.0
    num_return_sequences: int = 1
    stop_strings: list[str] | None = None
    logprobs: int | None = 0

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


refuse_unknown = functools.partial(_shared.refuse_unknown, note=" ROLL itself ignores unknown keys.")


def path_of(value: Any) -> Any:
    """The dotted path of a class, as in ROLL's configuration."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def make_config(
    rewards: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Any,
    generating_args: Mapping[str, Any],
    val_generating_args: Mapping[str, Any],
) -> Namespace:
    """The `pipeline_config` of a run (rlvr_config.py).

    Raises `TypeError` for unknown names, `ValueError` if ROLL would not start, and `NotImplementedError` for what the
    fake does not play.
    """
    refuse_unknown(flags, [*DEFAULTS, *NOT_PLAYED], "FakeRollTrainer")
    config = Namespace(**{**NOT_PLAYED, **DEFAULTS, **flags}, seed=seed, async_pipeline=False)
    for name, default in NOT_PLAYED.items():
        if getattr(config, name) != default:
            raise NotImplementedError(f"{name}={getattr(config, name)} is not played by FakeRollTrainer")
    for name, choices in CHOICES.items():
        if (value := getattr(config, name)) not in choices:
            raise NotImplementedError(f"{name}={value} is not played by FakeRollTrainer; it plays {choices}")
    config.user_defined_rollout_loop_cls = path_of(config.user_defined_rollout_loop_cls)
    for name in ("rollout_batch_size", "num_return_sequences_in_group"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(config, name)}")
    if config.response_length is not None:
        config.sequence_length = config.prompt_length + config.response_length
    if config.sequence_length <= config.prompt_length:
        raise ValueError(f"sequence_length {config.sequence_length} leaves no room after prompt_length")
    if (config.val_prompt_length is None) != (config.val_sequence_length is None):
        raise ValueError("val_prompt_length and val_sequence_length must be set simultaneously")
    if config.val_prompt_length is None:
        config.val_prompt_length, config.val_sequence_length = config.prompt_length, config.sequence_length
    model = ModelArguments(tokenizer)
    room, val_room = (
        config.sequence_length - config.prompt_length,
        config.val_sequence_length - config.val_prompt_length,
    )
    sampling = _generating(
        generating_args, max_new_tokens=room, num_return_sequences=config.num_return_sequences_in_group
    )
    config.actor_train = Namespace(name="actor_train", model_args=model)
    config.actor_infer = Namespace(name="actor_infer", model_args=model, generating_args=sampling)
    config.validation = Namespace(name=None, generating_args=_generating(val_generating_args, max_new_tokens=val_room))
    config.rewards = {domain: _reward_config(domain, given, model) for domain, given in rewards.items()}
    if not config.rewards:
        raise ValueError("rewards is empty: there is no domain to train on")
    config.tag_2_domain = {tag: domain for domain, reward in config.rewards.items() for tag in reward.tag_included}
    return config


def _generating(given: Mapping[str, Any], **derived: Any) -> GeneratingArguments:
    refuse_unknown(given, asdict(GeneratingArguments()), "generating_args")
    return GeneratingArguments(**{**given, **derived})


def _reward_config(domain: str, given: Mapping[str, Any], model: ModelArguments) -> Namespace:
    where = f"rewards.{domain}"
    refuse_unknown(given, REWARD_DEFAULTS, where)
    reward = Namespace(**{**REWARD_DEFAULTS, **copy.deepcopy(dict(given))})
    if reward.worker_cls is None:
        raise ValueError(f"{where}.worker_cls is missing")
    reward.worker_cls = path_of(reward.worker_cls)
    if not reward.world_size or reward.world_size < 1:
        raise ValueError(f"{where}.world_size must be 1 or more, not {reward.world_size}")
    if not isinstance(reward.reward_manager_config, (list, tuple)):
        raise ValueError(f"{where}.reward_manager_config must be a list (of one tree), as ROLL's field is")
    reward.tag_included, reward.reward_manager_config = list(reward.tag_included), list(reward.reward_manager_config)
    reward.system_envs = dict(reward.system_envs or {})
    for name, value in reward.system_envs.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}.system_envs.{name} must be a str: Ray takes no {type(value).__name__}")
    for name in ("query_filter_config", "response_filter_config"):
        told = getattr(reward, name) or {}
        refuse_unknown(told, ("type", "filter_args"), f"{where}.{name}")
        kind = told.get("type", "no_filter")
        if kind not in FILTERS:
            raise ValueError(f"{where}.{name}.type is one of {', '.join(FILTERS)}, not {kind!r}")
        setattr(reward, name, Namespace(type=kind, filter_args=dict(told.get("filter_args") or {})))
    reward.model_args = reward.model_args or model
    return reward


def batch_sizes(config: Namespace, shares: Mapping[str, float] | None) -> dict[str, int]:
    """The prompts of each domain in a batch, by `domain_interleave_probs`; the last gets the rest, as in ROLL.

    Raises `TypeError` for a domain without a reward, and `ValueError` for one without a prompt.
    """
    domains = list(shares or config.rewards)
    refuse_unknown(domains, config.rewards, "rewards (for which domain_interleave_probs has a share)")
    sizes = {
        domain: int((shares or {}).get(domain, 1 / len(domains)) * config.rollout_batch_size) for domain in domains[:-1]
    }
    sizes[domains[-1]] = config.rollout_batch_size - sum(sizes.values())
    empty = [domain for domain, size in sizes.items() if size < 1]
    if empty:
        raise ValueError(f"rollout_batch_size {config.rollout_batch_size} leaves no prompt for {', '.join(empty)}")
    return sizes
