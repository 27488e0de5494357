"""What ROLL and the fake make of responses and of their rewards. For ROLL's process."""

from __future__ import annotations

import itertools
import math
import random
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import torch
from roll.distributed.scheduler import generate_scheduler, user_defined_rollout_loop
from roll.utils import functionals

from qreward_plugins.testing.roll import estimates, metrics, rollout_loop

from . import rollouts
from .twins import KINDS, PROMPTS, SEQUENCE_LENGTH, difference, number_difference, prompts

GROUP_SIZE = 4
_WORDS = range(2, 30)
_MODELS = ("old_log_probs", "ref_log_probs", "values", "prompt_id")
"""What only ROLL's batch has: the fake has no models to say it."""


def responses() -> dict[str, str]:
    """Requests of a prompt, and what becomes of the engine's answers to them."""
    rng = random.Random(5)
    told = {}
    for expanded, count, row in itertools.product((True, False), (1, 3), range(PROMPTS)):
        answers = [[*_answer(rng, 15), 1] for _ in range(count)]
        real, fake = (
            _responses(kind, row, answers, expanded, expand, loop)
            for kind, expand, loop in zip(
                KINDS,
                (generate_scheduler.expand_requests, rollout_loop.expand_requests),
                (user_defined_rollout_loop, rollout_loop),
                strict=True,
            )
        )
        for place, pair in enumerate(zip(real, fake, strict=True)):
            told[f"{count} of row {row}, {'expanded' if expanded else 'together'}, {place}"] = difference(*pair)
    return told


def _answer(rng: random.Random, longest: int) -> list[int]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(1, longest))]


def _responses(kind: Any, row: int, answers: list[list[int]], expanded: bool, expand: Any, loop: Any) -> list[Any]:
    data = prompts(kind, {"generation_config": {"num_return_sequences": len(answers)}})[[row]]
    made = []
    for place, request in enumerate(expand(data, len(answers), expanded)):
        own = [answers[place]] if expanded else answers
        request.meta_info.update(
            output_token_ids=own,
            output_logprobs=[[0.25] * len(tokens) for tokens in own],
            finish_reasons=["stop"] * len(own),
            eos_token_id=[1, 0],
            pad_token_id=0,
        )
        made.append(loop.postprocess_output_data(request, kind(meta_info=request.meta_info), SEQUENCE_LENGTH))
    return made


def filters() -> dict[str, str]:
    """Which groups ROLL's query filter keeps."""
    settings = (
        ("no_filter", {}),
        ("mean_filter", {}),
        ("mean_filter", {"threshold_up": 0.9, "threshold_down": 0.1}),
        ("std_filter", {"std_threshold": 0}),
    )
    rewards = ([1.0, 1.0], [0.0, 1.0], [0.0, 0.0], [math.nan, 1.0], [1.0])
    told = {}
    for (kind, arguments), group in itertools.product(settings, rewards):
        config = Namespace(rewards={"a": Namespace(query_filter_config=Namespace(type=kind, filter_args=arguments))})
        real, fake = (
            bool(loop.query_filter([_rewarded(proto, reward) for reward in group], config))
            for proto, loop in zip(KINDS, (user_defined_rollout_loop, rollout_loop), strict=True)
        )
        told[f"{kind} {arguments} {group}"] = "" if real == fake else f"{fake}, not {real}"
    return told


def _rewarded(kind: Any, reward: float) -> Any:
    return kind.from_dict({"response_level_rewards": torch.tensor([reward])}, {"domain": ["a"]})


def reductions() -> dict[str, str]:
    """What becomes of metrics by the ends of their names."""
    given = {
        "a_sum": [1, 2],
        "b@max": [1, 5],
        "c_p99": [1, 2, 3],
        "d": [1, 2],
        "e": 3,
        "f_std": [1.0, 4.0],
        "g_min": [],
        "h@p50": (1, 9),
    }
    return {"all": number_difference(functionals.reduce_metrics(dict(given)), metrics.reduce_metrics(dict(given)))}


def training(settings: Mapping[str, Any]) -> dict[str, str]:
    """Masks, normalised rewards, advantages and metrics of three batches: a plain one, one with a NaN, and one of which
    a sample and a whole group are masked.
    """
    told = {}
    for name, spoilt in (("plain", {}), ("a NaN", {"nan": True}), ("masked", {"masked": True})):
        real, fake = (_batch(kind, **spoilt) for kind in KINDS)
        with torch.no_grad():
            real, real_metrics = rollouts.train_batch(real, _config(settings))
            fake, fake_metrics = estimates.train_batch(fake, _config(settings))
        real.pop([key for key in _MODELS if key in real.batch.keys()])  # noqa: SIM118 (a TensorDict refuses `in`)
        told[name] = difference(real, fake)
        known = {key: number for key, number in real_metrics.items() if not key.endswith("kl_coef")}
        told[f"{name}, metrics"] = number_difference(known, fake_metrics)
    return told


def _batch(kind: Any, *, nan: bool = False, masked: bool = False) -> Any:
    rng = random.Random(0)
    size = PROMPTS * GROUP_SIZE
    data = prompts(kind, {})
    answers = [_answer(rng, 16) for _ in range(size)]
    tensors = rollout_loop.response_batch(data, answers, None, sequence_length=SEQUENCE_LENGTH, pad_token_id=0)
    rewards = torch.tensor([rng.randint(0, 2) / 2 for _ in range(size)])
    if nan:
        rewards[3] = math.nan
    if masked:
        tensors["response_mask"][5] = 0
        tensors["response_mask"][8:12] = 0
    tensors |= {
        "response_level_rewards": rewards,
        "scores": rewards.clone(),
        "token_level_rewards": torch.zeros(size, tensors["responses"].shape[-1]),
    }
    return kind.from_dict(tensors, {"domain": ["ab"[row // 12] for row in range(size)]})


def _config(settings: Mapping[str, Any]) -> Namespace:
    defaults: dict[str, Any] = {
        "adv_estimator": "grpo",
        "norm_mean_type": None,
        "norm_std_type": None,
        "reward_clip": None,
        "max_len_mask": False,
        "difficulty_mask": False,
        "difficulty_low_threshold": 0.3,
        "difficulty_high_threshold": 0.7,
        "error_max_len_clip": False,
        "error_max_len_threshold": 6,
        "gamma": 1,
        "lambd": 0.95,
        "advantage_clip": None,
        "whiten_advantages": False,
        "whiten_rewards": False,
        "add_token_level_kl": False,
        "kl_penalty": "kl",
        "init_kl_coef": 0.2,
        "target_kl": None,
        "kl_horizon": None,
        "actor_infer": Namespace(generating_args=Namespace(num_return_sequences=GROUP_SIZE)),
    }
    return Namespace(**{**defaults, **settings})
