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
    # For workers and loops that read them; they change nothing in the fake.
    "exp_name": "fake_roll_trainer",
    "max_steps": 500,
    "output_dir": "./output",
}

ESTIMATORS = ("gae", "grpo", "reinforce")

REWARD_DEFAULTS: dict[str, Any] = {
    "name": None,
    "worker_cls": None,
    "world_size": 1,  # ROLL's own is None, but workers without GPUs need a number
    "max_concurrency": 1,
    "tag_included": (),
    "query_filter_config": None,
    "reward_manager_config": (),
    "system_envs": None,
    # For workers that read them.
    **dict.fromkeys(
        (
            *("response_filter_config", "device_mapping", "data_args", "generating_args", "strategy_args"),
            *("model_args", "code_url", "judge_prompt", "judge_model_type", "judge_model_name", "judge_api_url"),
            *("judge_api_key", "format_pattern", "reward_type", "use_local"),
        )
    ),
}

SAMPLING = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "max_new_tokens": 8192, "num_return_sequences": 1}

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


class GeneratingArguments(Namespace):
    """How responses are generated; as a dict it is `generation_config` of the meta information."""

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


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
    config.validation = Namespace(name=None, generating_args=_sampling(val_generating_args, max_new_tokens=room))
    config.rewards = {domain: _reward_config(domain, given, model) for domain, given in rewards.items()}
    if not config.rewards:
        raise ValueError("rewards is empty: there is no domain to train on")
    config.tag_2_domain = {tag: domain for domain, reward in config.rewards.items() for tag in reward.tag_included}
    return config


def path_of(value: Any) -> Any:
    """The dotted path of a class, as in ROLL's configuration."""
    return f"{value.__module__}.{value.__qualname__}" if isinstance(value, type) else value


def _sampling(given: Mapping[str, Any], **derived: Any) -> GeneratingArguments:
    refuse_unknown(given, SAMPLING, "generating_args")
    return GeneratingArguments(**{**SAMPLING, **given, **derived})


def _reward_config(domain: str, given: Mapping[str, Any], model: ModelArguments) -> Namespace:
    where = f"rewards.{domain}"
    refuse_unknown(given, REWARD_DEFAULTS, where)
    reward = Namespace(**{**REWARD_DEFAULTS, **copy.deepcopy(dict(given))})
    told = {"type": "no_filter", "filter_args": {}, **(reward.query_filter_config or {})}
    refuse_unknown(told, ("type", "filter_args"), f"{where}.query_filter_config")
    envs = reward.system_envs or {}
    problems = {
        "worker_cls is missing": reward.worker_cls is None,
        "world_size must be 1 or more": not reward.world_size or reward.world_size < 1,
        "reward_manager_config must be a list (of one tree), as ROLL's field is": not isinstance(
            reward.reward_manager_config, list | tuple
        ),
        "system_envs must be texts: Ray takes nothing else": not all(isinstance(each, str) for each in envs.values()),
        f"query_filter_config.type is one of {', '.join(FILTERS)}": told["type"] not in FILTERS,
    }
    for problem, is_there in problems.items():
        if is_there:
            raise ValueError(f"{where}.{problem}")
    reward.worker_cls = path_of(reward.worker_cls)
    reward.tag_included, reward.reward_manager_config = list(reward.tag_included), list(reward.reward_manager_config)
    reward.system_envs, reward.query_filter_config = dict(envs), Namespace(**told)
    reward.model_args = reward.model_args or model
    return reward


def batch_sizes(config: Namespace) -> dict[str, int]:
    """The prompts of each domain in a batch: equal parts, and the last gets the rest, as in ROLL. Raises `ValueError`
    if a domain gets none.
    """
    part = config.rollout_batch_size // len(config.rewards)
    if not part:
        raise ValueError(f"rollout_batch_size {config.rollout_batch_size} leaves no prompt for some domains")
    *domains, last = config.rewards
    return {**dict.fromkeys(domains, part), last: config.rollout_batch_size - part * len(domains)}
