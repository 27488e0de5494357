"""The part of ROLL's configuration that rewards use: names, defaults, and how ROLL resolves them at the start.

ROLL reads its YAML with dacite, which drops unknown keys without a message. Here an unknown name is an error that
suggests the nearest.
"""

from __future__ import annotations

import copy
import functools
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from .. import fake_trainer as _shared

DEFAULT_LOOP = "roll.distributed.scheduler.user_defined_rollout_loop.UserDefinedRolloutLoop"

DEFAULTS: dict[str, Any] = {
    # ROLL's own: 128 prompts, groups of 1, prompts of 1024 tokens and no default length of responses.
    "rollout_batch_size": 4,
    "num_return_sequences_in_group": 4,
    "prompt_length": 128,
    "sequence_length": 192,
    "generate_opt_level": 1,
    "is_num_return_sequences_expand": False,
    "user_defined_rollout_loop_cls": DEFAULT_LOOP,
    "rpc_timeout": 3600,
    "adv_estimator": "gae",
    "gamma": 1,
    "lambd": 0.95,
}

ESTIMATORS = ("gae", "grpo", "reinforce")

_READ_BY_WORKERS = "judge_prompt judge_model_type judge_model_name judge_api_url judge_api_key reward_type code_url"
REWARD_DEFAULTS: dict[str, Any] = {
    "worker_cls": None,
    "world_size": 1,  # ROLL's own is None, but workers without GPUs need a number
    "tag_included": (),
    "query_filter_config": None,
    "reward_manager_config": (),
    "system_envs": None,
    **dict.fromkeys(_READ_BY_WORKERS.split()),
}

SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "max_new_tokens": 8192, "num_return_sequences": 1}

FILTERS = ("no_filter", "mean_filter", "std_filter")


class ModelArguments:
    """The source of the tokenizer. In ROLL every process reads it from the same path; here all copies of a
    configuration share one tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.qreward_tokenizer = tokenizer

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelArguments:
        return self


refuse_unknown = functools.partial(
    _shared.refuse_unknown, note=" ROLL itself ignores unknown keys, and FakeRollTrainer does not play all."
)


def make_config(
    rewards: Mapping[str, Mapping[str, Any]],
    flags: Mapping[str, Any],
    *,
    seed: int,
    tokenizer: Any,
    val_generating_args: Mapping[str, Any],
) -> Namespace:
    """The `pipeline_config` of a run (rlvr_config.py).

    Raises `TypeError` for names that are unknown or not played, and `ValueError` if ROLL would not start.
    """
    refuse_unknown(flags, DEFAULTS, "FakeRollTrainer")
    config = Namespace(**{**DEFAULTS, **flags}, seed=seed, async_pipeline=False)
    if config.adv_estimator not in ESTIMATORS:
        raise ValueError(f"FakeRollTrainer plays the estimators {', '.join(ESTIMATORS)}, not {config.adv_estimator!r}")
    config.user_defined_rollout_loop_cls = path_of(config.user_defined_rollout_loop_cls)
    for name in ("rollout_batch_size", "num_return_sequences_in_group"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be 1 or more, not {getattr(config, name)}")
    room = config.sequence_length - config.prompt_length
    if room < 1:
        raise ValueError(f"sequence_length {config.sequence_length} leaves no room after prompt_length")
    model = ModelArguments(tokenizer)
    size = config.num_return_sequences_in_group
    sampling = _sampling({}, max_new_tokens=room, num_return_sequences=size)
    config.actor_train = Namespace(name="actor_train", model_args=model)
    config.actor_infer = Namespace(name="actor_infer", model_args=model, generating_args=sampling)
    config.validation = Namespace(generating_args=_sampling(val_generating_args, max_new_tokens=room))
    if len(rewards) != 1:
        raise ValueError(f"FakeRollTrainer plays one domain, not {len(rewards)}: make a trainer for each")
    config.rewards = {domain: _reward_config(f"rewards.{domain}", given, model) for domain, given in rewards.items()}
    return config


def path_of(value: Any) -> Any:
    """The dotted path of a class, as in ROLL's configuration."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def _sampling(given: Mapping[str, Any], **derived: Any) -> dict[str, Any]:
    refuse_unknown(given, SAMPLING, "generating_args")
    return {**SAMPLING, **given, **derived}


def _reward_config(where: str, given: Mapping[str, Any], model: ModelArguments) -> Namespace:
    refuse_unknown(given, REWARD_DEFAULTS, where)
    reward = Namespace(**{**REWARD_DEFAULTS, **copy.deepcopy(dict(given))})
    if reward.worker_cls is None:
        raise ValueError(f"{where}.worker_cls is missing")
    if not isinstance(reward.reward_manager_config, list | tuple):
        raise ValueError(f"{where}.reward_manager_config must be a list (of one tree), as ROLL's field is")
    told = {"type": "no_filter", "filter_args": {}, **(reward.query_filter_config or {})}
    if told["type"] not in FILTERS:
        raise ValueError(f"{where}.query_filter_config.type is one of {', '.join(FILTERS)}")
    reward.worker_cls = path_of(reward.worker_cls)
    reward.system_envs, reward.query_filter_config = reward.system_envs or {}, Namespace(**told)
    reward.model_args = model
    return reward
